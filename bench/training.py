"""The cost of protecting to the training beside it: ``python -m bench.training``.

A rank trains a small model on one CPU and saves 64 MiB every few steps, RS(3, 2) over six agents.
The six agents together code, serve and pull one shard 5/3 times. The one agent of a node does as
much for a save if every node has a rank with such a shard, and pulls its peers' fragments. So six
agents on the other CPU do the work of one, except that their bytes cross no network card but are
copied twice.

The whole steps between the return of ``save()`` and the commit are compared with those just before
the save. The ways take turns: agents on another CPU that pull as fast as they can, and 1 GB and
250 MB a second in all (``ecckpt agent --pull-mb-s``); and agents on the CPU of the training. Two
more ways show the cost of the other CPU without our code: a loop there that touches no memory, and
one that only copies memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ecckpt
from bench.elsewhere import Elsewhere
from bench.measuring import Timed, timed
from bench.save import even_state
from ecckpt.testing.local_cluster import LocalCluster, children

MIB = 64
HOLDERS = 5
WARM_UP_SAVES = 4
STEPS_BEFORE = 20
LOOP_S = 0.3
PACES = {"": 0.0, ", 1 GB/s": 1000.0, ", 250 MB/s": 250.0}


class Training:
    """A step of about ten milliseconds that uses one thread."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
        self._batch = torch.rand(64, 512)

    def step_s(self) -> tuple[float, float]:
        """Run one step; return its wall seconds and its CPU seconds."""
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        self._model(self._batch).square().mean().backward()
        return time.perf_counter() - started_s, time.thread_time() - started_cpu_s

    def steps(self) -> np.ndarray:
        """Run undisturbed steps; return seconds of shape (steps, 2)."""
        return np.array([self.step_s() for _ in range(STEPS_BEFORE)])

    def steps_while(self, disturbed: Callable[[], bool]) -> np.ndarray:
        """Run steps while disturbed; return the seconds of whole ones, of shape (steps, 2)."""
        taken = []
        while disturbed():
            seconds = self.step_s()
            if disturbed():
                taken.append(seconds)
        return np.array(taken).reshape(-1, 2)


def move_agents(cluster: LocalCluster, cpus: set[int]) -> None:
    """Bind all threads of all agents to these CPUs."""
    for node in cluster.nodes:
        for pid in (cluster.pid(node), *children(cluster.pid(node))):
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), cpus)


class Saver:
    """A run on agents that pull ``pull_mb_s`` MB a second in all (0: as fast as they can)."""

    def __init__(
        self, stack: contextlib.ExitStack, state: dict[str, Any], pull_mb_s: float = 0.0
    ) -> None:
        cluster = LocalCluster(nodes=HOLDERS + 1, pull_mb_s=pull_mb_s / HOLDERS)
        self.cluster, self._state = stack.enter_context(cluster), state
        self._ckpt = stack.enter_context(
            ecckpt.Checkpointer(
                "training", code=(3, 2), root=cluster.root("n0"), agents=cluster.addresses()
            )
        )
        self._ckpt.restore(state)
        self._steps = iter(range(1 << 20))
        for _ in range(WARM_UP_SAVES):
            self.save().wait(120)

    def save(self) -> ecckpt.SaveHandle:
        """Begin a save."""
        return self._ckpt.save(next(self._steps), self._state, patience_s=120)


@contextlib.contextmanager
def loops(folder: Path, cpu: int) -> Iterator[dict[str, Timed]]:
    """Cases for ``bench.elsewhere`` that keep a CPU busy for a while."""
    os.sched_setaffinity(0, {cpu})
    source, target = np.ones(MIB << 20, np.uint8), np.ones(MIB << 20, np.uint8)

    def loop(act: Callable[[], object]) -> None:
        end_s = time.monotonic() + LOOP_S
        while time.monotonic() < end_s:
            act()

    def copy() -> None:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)

    yield {
        "a loop on another CPU": timed(lambda: loop(lambda: None)),
        "a loop on another CPU that copies memory": timed(lambda: loop(copy)),
    }


@dataclass
class Comparison:
    """Disturbed steps relative to undisturbed ones, by round: wall, CPU, and ms lost."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    lost_ms: list[float] = field(default_factory=list)

    def add(self, alone: np.ndarray, disturbed: np.ndarray) -> None:
        """Add a round's steps."""
        before_s, taken_s = alone.mean(axis=0), disturbed.mean(axis=0)
        self.wall.append(float(taken_s[0] / before_s[0]))
        self.cpu.append(float(taken_s[1] / before_s[1]))
        self.lost_ms.append(1e3 * len(disturbed) * float(taken_s[0] - before_s[0]))

    def medians(self) -> dict[str, float]:
        """Return the medians over the rounds."""
        return {name: statistics.median(values) for name, values in vars(self).items()}


def measure(rounds: int, mib: int) -> tuple[float, dict[str, Comparison]]:
    """Return the seconds of an undisturbed step, and the ratios of disturbed ones, by way."""
    cpus = sorted(os.sched_getaffinity(0))
    others = set(cpus[1:]) or set(cpus)
    state, training = even_state(mib << 20, 100), Training()
    alone_s: list[float] = []
    found: dict[str, Comparison] = defaultdict(Comparison)

    def compare(way: str, begin: Callable[[], Callable[[], bool]]) -> None:
        alone, disturbed = training.steps(), training.steps_while(begin())
        if len(disturbed):
            alone_s.append(float(np.median(alone[:, 0])))
            found[way].add(alone, disturbed)

    def protect(saver: Saver) -> Callable[[], bool]:
        handle = saver.save()
        return lambda: not handle.done

    with contextlib.ExitStack() as stack:
        savers = {
            f"agents on another CPU{pace}": Saver(stack, state, mb_s)
            for pace, mb_s in PACES.items()
        }
        other = stack.enter_context(Elsewhere(loops, min(others)))
        os.sched_setaffinity(0, {cpus[0]})
        ways = {way: (saver, others) for way, saver in savers.items()}
        ways["agents on the same CPU"] = (savers["agents on another CPU"], {cpus[0]})

        def start(name: str) -> Callable[[], bool]:
            other.start(name)
            return other.running

        names = other.names()
        for _ in range(rounds):
            for way, (saver, where) in ways.items():
                move_agents(saver.cluster, where)
                compare(way, lambda saver=saver: protect(saver))
            for name in names:
                compare(name, lambda name=name: start(name))
                other.seconds()
    return statistics.median(alone_s), found


def main() -> None:
    """Print medians, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.training")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=MIB)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    alone_s, found = measure(arguments.rounds, arguments.mib)
    ways = {way: each.medians() for way, each in found.items()}
    print(f"a step, undisturbed: {1e3 * alone_s:.2f} ms")
    print(f"{'steps beside':40} {'x wall':>7} {'x CPU':>7} {'ms lost':>8}")
    for way, each in ways.items():
        print(f"{way:40} {each['wall']:7.3f} {each['cpu']:7.3f} {each['lost_ms']:8.1f}")
    print(json.dumps({"step_ms": 1e3 * alone_s, "ways": ways}))


if __name__ == "__main__":
    main()
