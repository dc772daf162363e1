"""Ranks as processes of their own, in a gloo group: forked, so that torch is imported already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GROUP_TIMEOUT_S = 30


def run_ranks(
    folder: Path, ranks: int, act: Callable[[int], Any], *, timeout_s: float = 60.0
) -> list[Any]:
    """What ``act(rank)`` returned on each rank; fails if one raises, and at the deadline.

    ``act`` may be a closure. A rank that kills itself has None for a result.
    """
    fork = multiprocessing.get_context("fork")
    store = folder / f"store-{os.urandom(4).hex()}"
    pipes, processes = [], []
    for rank in range(ranks):
        mine, its = fork.Pipe(duplex=False)
        process = fork.Process(target=_be, args=(rank, ranks, store, act, its))
        process.start()
        its.close()
        pipes.append(mine)
        processes.append(process)
    try:
        answers = _collect(pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [f"rank {rank}: {text}" for rank, (fine, text) in answers.items() if not fine]
    assert not errors, "\n".join(errors)
    assert len(answers) == ranks, f"only ranks {sorted(answers)} answered within {timeout_s:g} s"
    return [answers[rank][1] for rank in range(ranks)]


def preload() -> None:
    """Import what optimizers import when they are made: here once, not in every rank."""
    import torch._dynamo  # noqa: F401


def die() -> None:
    """Be killed, as by the kernel."""
    os.kill(os.getpid(), signal.SIGKILL)


def _collect(pipes: list[Connection], deadline_s: float) -> dict[int, tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    left = {pipe: rank for rank, pipe in enumerate(pipes)}
    while left and (left_s := deadline_s - time.monotonic()) > 0:
        for pipe in wait(list(left), left_s):
            assert isinstance(pipe, Connection)
            try:
                answers[left.pop(pipe)] = pickle.loads(pipe.recv_bytes())
            except EOFError:  # killed
                answers[left.pop(pipe)] = (True, None)
    return answers


def _be(rank: int, ranks: int, store: Path, act: Callable[[int], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
        )
        answer = (True, act(rank))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # tensors by value, not as shared memory of ours
    if dist.is_initialized() and answer[0]:
        dist.destroy_process_group()
