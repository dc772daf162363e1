"""Every set of up to m + 1 lost nodes, for one code: ``python tests/chaos/kill_matrix.py 8 2``.

One cluster of k + m + 1 real agents, one shard homed on each. For each set of lost nodes the
survivors' inventories alone make the plan, and every shard whose home is lost is fetched by a
survivor from the survivors alone: pulled, decoded, proven and compared byte for byte.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.support.builders import writer_of

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest

from ecckpt import errors
from ecckpt.format.fragment_file import HOME
from ecckpt.policy.survival import ShardReport, plan_recovery
from ecckpt.protocol.messages.restore import Fetch, Fetched, Sources
from ecckpt.protocol.verbs import FETCH, INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.stored import store

SHARD_BYTES = 50_000  # several blocks in each fragment, the last one short


def losses(nodes: list[str], most: int) -> Iterator[tuple[str, ...]]:
    for count in range(1, most + 1):
        yield from itertools.combinations(nodes, count)


def run(k: int, m: int) -> Counter[str]:
    """All sets of up to m + 2 lost nodes; returns how much was tried."""
    tried: Counter[str] = Counter()
    with LocalCluster(nodes=k + m + 1) as cluster:
        shards = [
            hashlib.shake_128(f"{k} {m} {rank}".encode()).digest(SHARD_BYTES + 100 * rank)
            for rank in range(k + m + 1)
        ]
        store(cluster, shards, code=(k, m))
        matrix = _Matrix(cluster, shards, m)
        for lost in losses(cluster.nodes, m + 1):
            tried["shards decoded"] += matrix.survive(lost)
            tried["sets survived"] += 1
        for lost in itertools.combinations(cluster.nodes, m + 2):
            matrix.lose(lost, fetch=not tried["sets told to be lost"])
            tried["sets told to be lost"] += 1
    return tried


class _Matrix:
    def __init__(self, cluster: LocalCluster, shards: list[bytes], m: int) -> None:
        self._nodes = cluster.nodes
        self._shards = shards
        self._m = m
        self._clients = {node: cluster.client(node) for node in cluster.nodes}
        self._addresses = {node: each.node().address for node, each in self._clients.items()}
        self._inventories = {
            node: each.call(INVENTORY, "test") for node, each in self._clients.items()
        }

    def survive(self, lost: tuple[str, ...]) -> int:
        alive = [node for node in self._nodes if node not in lost]
        plan = plan_recovery("test", [self._inventories[node] for node in alive])
        assert plan.chosen is not None, lost
        assert plan.chosen.margin == self._m + 1 - len(lost), lost
        decoded = 0
        for report in plan.chosen.shards:
            home = self._nodes[report.rank]
            if home in alive:
                assert report.homes == (home,)
                continue
            assert not report.homes
            # Another survivor each time: what one of them fetched before is no help.
            at = alive[(report.rank + len(lost)) % len(alive)]
            fetched = self._fetch(report, at)
            with Path(fetched.slot.path).open("rb") as file:
                file.seek(fetched.slot.payload_offset)
                assert file.read(len(self._shards[report.rank])) == self._shards[report.rank], lost
            decoded += 1
        return decoded

    def lose(self, lost: tuple[str, ...], *, fetch: bool) -> None:
        """One node too many: exactly the shards at home on them are gone, and are told to be."""
        alive = [node for node in self._nodes if node not in lost]
        plan = plan_recovery("test", [self._inventories[node] for node in alive])
        assert plan.chosen is None
        (report,) = plan.generations
        gone = [shard for shard in report.shards if shard.state == "lost"]
        assert {self._nodes[shard.rank] for shard in gone} == set(lost)
        if fetch:
            with pytest.raises(errors.TooFewFragments):
                self._fetch(gone[0], alive[0])

    def _fetch(self, report: ShardReport, at: str) -> Fetched:
        assert report.header is not None
        sources = tuple(
            Sources(index, tuple(self._addresses[node] for node in nodes))
            for index, nodes in report.fragments.items()
        )
        header = replace(report.header.at(HOME), home=at)
        return self._clients[at].call(
            FETCH,
            Fetch(
                header=header, writer=writer_of(1), sources=sources, memory_bytes=0, timeout_s=30.0
            ),
        )


if __name__ == "__main__":
    print(dict(run(int(sys.argv[1]), int(sys.argv[2]))))
