"""How saves and restores grow with nodes, ranks, bytes and tensors: ``python -m bench.growth``.

Ranks are threads of one process that meet over a real store. Each rank's home is one real agent.
The code is RS(2, 1), RS(8, 2) where there are nodes for it, and a whole copy where there is one
other node. Each size has three medians of the slowest rank: over a few saves, each committed before
the next; over restores of new Checkpointers on the same nodes; and over restores after one rank's
node was lost and replaced. All share two CPUs, so times grow with the total work; CPU seconds per
rank show whether each rank's own work grows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import ecckpt
from bench.save import WARM_UP_ROUNDS, even_state
from bench.usage import cpu_s
from ecckpt.testing.local_cluster import LocalCluster

# Between saves, as in training: in this time ranks tell agents without ranks of the commit. A save
# right after the commit would wait for that.
PAUSE_S = 0.3
WAIT_S = 120.0

State = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Size:
    """The varied sizes; ``mib`` and ``tensors`` are of each rank."""

    nodes: int
    ranks: int
    mib: int
    tensors: int
    code: tuple[int, int]


SIZES = (
    Size(2, 1, 32, 100, (1, 0)),
    *(Size(nodes, 1, 32, 100, (2, 1)) for nodes in (4, 8, 16, 32)),
    *(Size(11, ranks, 16, 100, (2, 1)) for ranks in (1, 2, 4, 8)),
    *(Size(11, 1, mib, 100, (8, 2)) for mib in (16, 64, 256)),
    *(Size(4, 1, 64, tensors, (2, 1)) for tensors in (100, 1_000, 10_000)),
)
QUICK = (SIZES[1], SIZES[6], SIZES[9])

COLUMNS = {
    "stall_ms": "stall",
    "protected_ms": "protected",
    "committed_ms": "committed",
    "restore_ms": "restore",
    "restore_lost_ms": "1 node lost",
    "save_cpu_ms": "CPU a rank",
}


class Ranks:
    """All ranks of a run, which do the same at the same time."""

    def __init__(self, cluster: LocalCluster, size: Size, pool: ThreadPoolExecutor) -> None:
        self._cluster, self._size, self._pool = cluster, size, pool
        self.states: list[State] = [
            even_state(size.mib << 20, size.tensors) for _ in range(size.ranks)
        ]
        self.homes = cluster.nodes[: size.ranks]

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        """Call ``act`` for each rank at once; return the results."""
        return list(self._pool.map(act, range(self._size.ranks)))

    @contextmanager
    def started(self) -> Iterator[list[ecckpt.Checkpointer]]:
        """Start the run: a Checkpointer for each rank."""
        store = dist.HashStore()
        made = self.each(
            lambda rank: ecckpt.Checkpointer(
                "growth",
                code=self._size.code,
                root=self._cluster.root(self.homes[rank]),
                agents=self._cluster.addresses(),
                store=store,
                rank=rank,
                world_size=self._size.ranks,
            )
        )
        try:
            yield made
        finally:
            for checkpointer in made:
                checkpointer.close()

    def restored_s(self) -> float:
        """Restore in new Checkpointers; return the seconds of the slowest rank."""
        with self.started() as ranks:
            found = self.each(lambda rank: ranks[rank].restore(self.states[rank]))
            assert all(each.reprotection.wait(WAIT_S) for each in found)
        return max(each.seconds for each in found)

    def lose_one(self) -> None:
        """Kill the first rank's node and replace it by a new one."""
        self._cluster.kill(self.homes[0])
        self.homes[0] = self._cluster.replace(self.homes[0])[0]


def saves(ranks: Ranks, pids: list[int], rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of each save, and the agents' CPU seconds per rank."""
    found: dict[str, list[float]] = {name: [] for name in list(COLUMNS)[:3]} | {"save_cpu_ms": []}
    with ranks.started() as made:
        ranks.each(lambda rank: made[rank].restore(ranks.states[rank]))
        for step in range(WARM_UP_ROUNDS + rounds):
            before_s = cpu_s(pids)
            handles = ranks.each(
                lambda rank, step=step: made[rank].save(step, ranks.states[rank], patience_s=WAIT_S)
            )
            assert all(handle.wait(WAIT_S) for handle in handles)
            used_s = cpu_s(pids) - before_s
            time.sleep(PAUSE_S)
            if step >= WARM_UP_ROUNDS:
                found["stall_ms"].append(max(handle.stall_s for handle in handles))
                found["protected_ms"].append(max(handle.protected_s for handle in handles))
                found["committed_ms"].append(max(handle.committed_s for handle in handles))
                found["save_cpu_ms"].append(used_s / len(handles))
    return found


def measure(size: Size, rounds: int) -> dict[str, float]:
    """Return medians, in milliseconds."""
    with (
        LocalCluster(nodes=size.nodes) as cluster,
        ThreadPoolExecutor(size.ranks) as pool,
    ):
        ranks = Ranks(cluster, size, pool)
        pids = [cluster.client(node).node().pid for node in cluster.nodes]
        found = saves(ranks, pids, rounds)
        found["restore_ms"] = [ranks.restored_s() for _ in range(rounds)]
        found["restore_lost_ms"] = []
        for _ in range(rounds):
            ranks.lose_one()
            found["restore_lost_ms"].append(ranks.restored_s())
    return {name: 1e3 * statistics.median(found[name]) for name in COLUMNS}


def main() -> None:
    """Print a table, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one size of each kind but the last")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(
        f"{'nodes':>6} {'ranks':>6} {'MiB':>5} {'tensors':>8} {'code':>6}"
        + "".join(f"{name:>13}" for name in COLUMNS.values())
        + "   all in ms"
    )
    for size in QUICK if arguments.quick else SIZES:
        row = measure(size, arguments.rounds)
        rows.append({**asdict(size), **row})
        code = "+".join(map(str, size.code))
        print(
            f"{size.nodes:6} {size.ranks:6} {size.mib:5} {size.tensors:8} {code:>6}"
            + "".join(f"{row[name]:13.1f}" for name in COLUMNS),
            flush=True,
        )
    print(json.dumps({"growth": rows}))


if __name__ == "__main__":
    main()
