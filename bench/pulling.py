"""Plain pulls by separate processes: the cost of the transport alone for the same bytes.

A puller stands for an agent that would only receive: it reads ranges of a real agent's files into
tmpfs memory that it has touched before, in threads, and checks nothing.
"""

from __future__ import annotations

import mmap
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from ecckpt.format.ids import ShardId
from ecckpt.protocol.agent_client import peer_client

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Pull:
    """A pull of ``size_bytes`` of fragment ``index`` of a shard from an agent."""

    address: str
    shard: ShardId
    index: int
    size_bytes: int


class Pullers:
    """Processes that are ready to pull; use as a context manager."""

    def __init__(self, count: int, *, room_bytes: int) -> None:
        self._count, self._room_bytes = count, room_bytes
        self._stack = ExitStack()
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._room_bytes), daemon=True)
            process.start()
            theirs.close()
            self._stack.callback(process.join, 10)
            self._stack.callback(ours.close)
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def seconds(self, work: Sequence[Sequence[Pull]], *, fresh: bool = False) -> float:
        """Give each process a list of pulls; return the seconds until all are done.

        With ``fresh`` each process first allocates memory, as on a node that has held nothing yet.
        """
        started_s = time.perf_counter()
        busy = self._pipes[: len(work)]
        for pipe, pulls in zip(busy, work, strict=True):
            pipe.send((fresh, list(pulls)))
        for pipe in busy:
            if problem := pipe.recv():
                raise RuntimeError(f"a plain pull failed: {problem}")
        return time.perf_counter() - started_s


def _serve(pipe: Connection, room_bytes: int) -> None:
    used = _room(room_bytes)
    pipe.send("")
    with ThreadPoolExecutor(8) as pool:
        while True:
            try:
                fresh, pulls = pipe.recv()
            except EOFError:
                return
            room = _room(room_bytes) if fresh else used
            ends = [sum(pull.size_bytes for pull in pulls[: at + 1]) for at in range(len(pulls))]
            places = [
                room[end - pull.size_bytes : end] for end, pull in zip(ends, pulls, strict=True)
            ]
            try:
                list(pool.map(_pull, pulls, places))
                pipe.send("")
            except Exception as error:  # the parent raises it
                pipe.send(repr(error))


def _room(size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))


def _pull(pull: Pull, place: memoryview) -> None:
    client = peer_client(pull.address, "")
    client.pull_fragment(pull.shard, pull.index, place, timeout_s=TIMEOUT_S)
