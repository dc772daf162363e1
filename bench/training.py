"""What protecting costs the training beside it: ``python -m bench.training``.

A rank trains a small model on one CPU, with 64 MiB of state saved every few steps, RS(3, 2) over
six agents. Steps are timed in three ways that take turns: undisturbed, while a save of just before
is being protected by agents on another CPU, and by agents on the same one. Only whole steps between
the return of ``save()`` and the commit count as disturbed. Five of the six agents stand for other
nodes, whose work would not be on this machine: the figures are above what a node would see.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

import ecckpt
from bench.save import even_state
from ecckpt.testing import LocalCluster, children

MIB = 64
WARM_UP_SAVES = 4


class Training:
    """A step of about ten milliseconds that uses one thread."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
        self._batch = torch.rand(64, 512)

    def step_s(self) -> float:
        """Seconds of one step."""
        started_s = time.perf_counter()
        self._model(self._batch).square().mean().backward()
        return time.perf_counter() - started_s


def move_agents(cluster: LocalCluster, cpus: set[int]) -> None:
    """Bind all threads of all agents to these CPUs."""
    for node in cluster.nodes:
        for pid in (cluster.pid(node), *children(cluster.pid(node))):
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), cpus)


def steps_while(handle: ecckpt.SaveHandle, training: Training) -> list[float]:
    """Seconds of the steps that end before the save does."""
    taken = []
    while not handle.done:
        seconds = training.step_s()
        if not handle.done:
            taken.append(seconds)
    return taken


def measure(rounds: int, mib: int) -> dict[str, list[float]]:
    """Medians of the steps of each round, by way."""
    cpus = sorted(os.sched_getaffinity(0))
    state, training = even_state(mib << 20, 100), Training()
    found: dict[str, list[float]] = {"undisturbed": [], "another CPU": [], "same CPU": []}
    with LocalCluster(nodes=6) as cluster:
        settings = {"code": (3, 2), "root": cluster.root("n0"), "agents": cluster.addresses()}
        with ecckpt.Checkpointer("training", **settings) as ckpt:
            ckpt.restore(state)
            os.sched_setaffinity(0, {cpus[0]})
            step = 0
            for turn in range(WARM_UP_SAVES + rounds):
                for way, where in (("another CPU", set(cpus[1:])), ("same CPU", {cpus[0]})):
                    move_agents(cluster, where)
                    alone = [training.step_s() for _ in range(20)]
                    step += 1
                    handle = ckpt.save(step, state, patience_s=120)
                    disturbed = steps_while(handle, training)
                    assert handle.wait(120)
                    if turn >= WARM_UP_SAVES and disturbed:
                        found["undisturbed"].append(statistics.median(alone))
                        found[way].append(statistics.mean(disturbed))
    return found


def main() -> None:
    """Print medians, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.training")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=MIB)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.rounds, arguments.mib)
    alone_s = statistics.median(found["undisturbed"])
    row: dict[str, float] = {"step_ms": 1e3 * alone_s}
    print(f"{'a step, undisturbed':28} {1e3 * alone_s:8.2f} ms")
    for way in ("another CPU", "same CPU"):
        if found[way]:
            row[way] = statistics.median(found[way]) / alone_s
            print(f"{f'while protecting, {way}':28} {row[way]:8.3f} x")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
