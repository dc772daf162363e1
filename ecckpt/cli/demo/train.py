"""The demo's training program: ``torchrun --nproc-per-node=6 -m ecckpt.cli.demo.train ARGS``.

Each rank appends its events to its own file (JSON lines), and at its end writes a result file with
all losses and digests of its final state. ``launch.py`` follows the ranks by these files, and
``show.py`` compares the results of two trainings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ecckpt
from ecckpt.cli.demo.corpus import Batches, corpus
from ecckpt.cli.demo.model import Gpt, Size

PEER_TIMEOUT_S = 60.0  # of collectives: the ranks share few cores and may wait for each other long
SAVE_PATIENCE_S = 60.0  # a save waits so long for the previous one instead of being skipped
WARMUP_STEPS = 5
LEARNING_RATE = 3e-3
BATCH = 4  # windows per rank and step
COPIES = 5  # number of plain copies that are timed; the median is used


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="ecckpt.cli.demo.train", description=__doc__)
    # Not "--run": torchrun accepts abbreviations and would take it for its own --run-path.
    parser.add_argument("--run-name", default="demo", help="name of the run")
    parser.add_argument(
        "--agents",
        type=lambda text: text.split(","),
        default=[],
        metavar="FOLDER,FOLDER,...",
        help="root folder of the agent of each rank's node",
    )
    parser.add_argument("--code", type=_code, default=(3, 2), metavar="K+M")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--events", type=Path, required=True, help="PATH.RANK gets JSON lines")
    parser.add_argument("--result", type=Path, required=True, help="PATH.RANK gets the result")
    parser.add_argument("--undisturbed", action="store_true", help="train without checkpoints")
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args(argv)
    if not arguments.undisturbed and not arguments.agents:
        parser.error("--agents is needed, except with --undisturbed")
    return arguments


def _code(text: str) -> tuple[int, int]:
    data, parity = text.split("+")
    return int(data), int(parity)


class Events:
    """JSON lines for one reader that tails the file while this rank may be killed at any time."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def add(self, event: str, step: int, **fields: Any) -> None:
        """Append one line with a single write, so that a kill does not leave half a line."""
        record = {"event": event, "rank": self._rank, "step": step, "time": time.time(), **fields}
        os.write(self._file, json.dumps(record).encode() + b"\n")


class DemoProgress:
    """The loss of each step so far on this rank; the number of losses is that of steps done."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the last step done (-1 before the first) and the exact losses."""
        return {"step": len(self.losses) - 1, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the history of a saved training."""
        self.losses = list(state["losses"])


class Training:
    """All state that a step changes, on one rank of a CPU mesh over the default process group."""

    def __init__(self, *, steps: int, seed: int) -> None:
        rank = dist.get_rank()
        size = Size()
        torch.manual_seed(seed)  # all ranks make the same weights; each then keeps its part
        self.model = Gpt(size)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.sched = torch.optim.lr_scheduler.LambdaLR(
            self.optim, lambda step: _rate(step, steps=steps)
        )
        self.data = Batches(corpus(), batch=BATCH, context=size.context, seed=seed, rank=rank)
        self.progress = DemoProgress()
        torch.manual_seed(seed + 1 + rank)  # dropout differs between ranks

    def step(self) -> float:
        """Do one optimizer step; return this rank's loss in nats per byte."""
        loss = self.model(*self.data.draw())
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.sched.step()
        self.progress.losses.append(loss.item())
        return self.progress.losses[-1]

    def params(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of each parameter, in the order of the model."""
        return (_local(parameter) for parameter in self.model.parameters())

    def moments(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of the optimizer state, by parameter and then by name."""
        for parameter in self.model.parameters():
            state = self.optim.state[parameter]
            yield from (_local(state[name]) for name in sorted(state))


def _rate(step: int, *, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return 0.55 + 0.45 * math.cos(math.pi * done)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _digest(tensors: Iterator[torch.Tensor]) -> str:
    """Return the SHA-256 of the bytes of all tensors, in hexadecimal."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _plain_copy_s(sources: list[torch.Tensor]) -> float:
    """Return the seconds that a plain copy of ``sources`` takes, to compare a save's stall with.

    The targets were written before, so that no page faults are measured.
    """
    targets = [source.clone() for source in sources]
    times_s = []
    for _ in range(COPIES):
        start = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s)


class DemoSaver:
    """Restores and saves a training through ecckpt, and reports both as events."""

    def __init__(self, arguments: argparse.Namespace, training: Training, events: Events) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        if len(arguments.agents) != world:
            raise ValueError(f"--agents names {len(arguments.agents)} folders for {world} ranks")
        self._training = training
        self._events = events
        self._copied: dict[str, float] = {}
        self._pending: dict[str, dict[int, Any]] = {
            "protected": {},
            "committed": {},
            "reprotected": {},
        }
        self._state = {
            "model": training.model,
            "optim": training.optim,
            "sched": training.sched,
            "data": training.data,
            "rng": ecckpt.RngState(),
            "progress": training.progress,
        }
        self._ckpt = ecckpt.Checkpointer(
            run=arguments.run_name,
            code=arguments.code,
            root=arguments.agents[rank],
            every_steps=arguments.save_every,
        )

    def restore(self) -> None:
        """Restore the newest surviving save of the run, if there is one."""
        restored = self._ckpt.restore(self._state)
        if restored:
            self._events.add(
                "restored",
                restored.step,
                timeline=restored.timeline,
                source=restored.source,
                restore_s=restored.seconds,
                pulled_bytes=restored.pulled_bytes,
                rebuilt_fragments=restored.rebuilt_fragments,
            )
            self._pending["reprotected"][restored.step] = restored.reprotection

    def after(self, step: int) -> None:
        """Save if a save is due, and report the progress of earlier saves."""
        if self._ckpt.due(step):
            # With patience: on a busy machine saves would be skipped, and the demo would show less.
            handle = self._ckpt.save(step, self._state, patience_s=SAVE_PATIENCE_S)
            if not self._copied:
                tensors = [*self._training.params(), *self._training.moments()]
                self._copied["copy_s"] = _plain_copy_s(tensors)
                self._copied["copy_bytes"] = sum(tensor.nbytes for tensor in tensors)
            self._events.add("saved", step, stall_s=handle.stall_s, **self._copied)
            for name in ("protected", "committed"):
                self._pending[name][step] = handle
        self._report()

    def close(self) -> None:
        """Wait for the last commit and report it."""
        self._ckpt.close()
        self._report()

    def _report(self) -> None:
        for name, pending in self._pending.items():
            for step, handle in list(pending.items()):
                if handle.protected if name == "protected" else handle.committed:
                    self._events.add(name, step, held=handle.held, protected_s=handle.protected_s)
                elif handle.error:
                    self._events.add("failed", step, stage=name, error=str(handle.error))
                else:
                    continue
                del pending[step]


def train(arguments: argparse.Namespace) -> None:
    """Train on this rank to the last step and write the result."""
    rank, world = dist.get_rank(), dist.get_world_size()
    training = Training(steps=arguments.steps, seed=arguments.seed)
    events = Events(Path(f"{arguments.events}.{rank}"), rank)
    local_bytes = sum(tensor.nbytes for tensor in training.params())
    events.add("start", -1, world=world, params_bytes=local_bytes, pid=os.getpid())
    saver = None if arguments.undisturbed else DemoSaver(arguments, training, events)
    if saver:
        saver.restore()
    for step in range(len(training.progress.losses), arguments.steps):
        start = time.perf_counter()
        loss = training.step()
        events.add("step", step, loss=loss.hex(), step_s=time.perf_counter() - start)
        if saver:
            saver.after(step)
    if saver:
        saver.close()
    result = {
        "rank": rank,
        "world": world,
        "losses": [loss.hex() for loss in training.progress.losses],
        "params_sha256": _digest(training.params()),
        "optim_sha256": _digest(training.moments()),
    }
    _write(Path(f"{arguments.result}.{rank}"), json.dumps(result))
    events.add("done", arguments.steps - 1)


def _write(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the whole text or no file."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.replace(path)


def main() -> None:
    """Run one rank."""
    arguments = parse()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PEER_TIMEOUT_S))
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
