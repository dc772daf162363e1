"""RS(3, 2) on 6 nodes: every set of up to 3 lost nodes, every shard compared byte for byte.

Here the survivors are agents that adopt copies of the folders, which takes long: a sample runs by
default. chaos/kill_matrix.py does it for several codes on one cluster.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import ShardId
from ecckpt.policy.survival import RecoveryPlan, plan_recovery
from ecckpt.protocol.agent_client import AgentClient, shard_path
from ecckpt.protocol.http import request
from ecckpt.protocol.messages.restore import Fetch, Sources
from ecckpt.protocol.verbs import FETCH, INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import writer_of
from tests.support.worlds import World, states_for

NODES = [f"n{index}" for index in range(6)]
LOSSES = [lost for count in (1, 2, 3) for lost in itertools.combinations(NODES, count)]
TOO_MANY = list(itertools.combinations(NODES, 4))


def _sampled(losses: list[tuple[str, ...]]) -> list[Any]:
    """The same, all but every tenth marked as long."""
    return [
        pytest.param(lost, marks=[pytest.mark.long] if number % 10 else [], id="-".join(lost))
        for number, lost in enumerate(losses)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, bytes]]]:
    """The folders of six nodes after one committed save, and each rank's shard."""
    keep = Path(f"/dev/shm/ecckpt-kept-{os.getpid()}")
    shutil.rmtree(keep, ignore_errors=True)
    with LocalCluster(nodes=6) as cluster:
        states = states_for(6, seed=1, elements=400_000)  # several blocks, the last one short
        with World(cluster, code=(3, 2)) as world:
            world.restore(states)
            handles = world.save(7, states)
            assert all(handle.wait(60) for handle in handles)
            assert [handle.held for handle in handles] == [5] * 6
            shards = {rank: _shard(cluster, f"n{rank}", handles[rank]) for rank in range(6)}
        shutil.copytree(cluster.root("n0").parent, keep, ignore=shutil.ignore_patterns("*.sock"))
    yield keep, shards
    shutil.rmtree(keep)


def _shard(cluster: LocalCluster, node: str, handle: object) -> bytes:
    rank = int(node[1:])
    generation = handle.generation  # type: ignore[attr-defined]
    return _download(cluster.client(node), ShardId("test", generation, rank))


def _download(client: AgentClient, shard: ShardId) -> bytes:
    path = f"{shard_path(shard)}/shard"
    status, body = request(client.address, "GET", path, timeout_s=30, limit_bytes=1 << 30)
    assert status == 200
    return body


def _plan(cluster: LocalCluster, alive: list[str]) -> RecoveryPlan:
    return plan_recovery("test", [cluster.client(node).call(INVENTORY, "test") for node in alive])


def _survivors(saved: Path, lost: tuple[str, ...], folder: Path) -> tuple[LocalCluster, list[str]]:
    """Agents on copies of the folders of those nodes that are left, and only those."""
    alive = [node for node in NODES if node not in lost]
    for node in alive:
        shutil.copytree(saved / node, folder / node)
    cluster = LocalCluster(nodes=6, folder=folder)
    cluster.start(only=alive)
    return cluster, alive


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/ecckpt-survivors-{os.getpid()}")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_there_are_41_losses() -> None:
    assert len(LOSSES) == 41


@pytest.mark.parametrize("lost", _sampled(LOSSES))
def test_every_loss_of_up_to_three_nodes(
    saved: tuple[Path, dict[int, bytes]], lost: tuple[str, ...], folder: Path
) -> None:
    keep, shards = saved
    cluster, alive = _survivors(keep, lost, folder)
    try:
        plan = _plan(cluster, alive)
        assert plan.chosen is not None
        assert plan.chosen.margin == 3 - len(lost)
        address = {node: cluster.client(node).node().address for node in alive}
        for report in plan.chosen.shards:
            home = f"n{report.rank}"
            assert report.header is not None
            assert (home in report.homes) == (home in alive)
            if home in lost:
                home = alive[report.rank % len(alive)]
                sources = tuple(
                    Sources(index, tuple(address[node] for node in nodes))
                    for index, nodes in report.fragments.items()
                )
                header = replace(report.header.at(HOME), home=home)
                cluster.client(home).call(
                    FETCH,
                    Fetch(
                        header=header,
                        writer=writer_of(2),
                        sources=sources,
                        memory_bytes=0,
                        timeout_s=30.0,
                    ),
                )
            shard = _download(cluster.client(home), report.header.shard)
            assert shard == shards[report.rank]
    finally:
        cluster.stop()


@pytest.mark.parametrize("lost", _sampled(TOO_MANY))
def test_every_loss_of_four_nodes_is_told_for_what_it_is(
    saved: tuple[Path, dict[int, bytes]], lost: tuple[str, ...], folder: Path
) -> None:
    keep, _ = saved
    cluster, alive = _survivors(keep, lost, folder)
    try:
        plan = _plan(cluster, alive)
        assert plan.chosen is None
        (report,) = plan.generations
        gone = {f"n{shard.rank}" for shard in report.shards if shard.state == "lost"}
        # A shard of a lost home has 2 of its 5 fragments left, one short; the others are at home.
        assert gone == set(lost)
        (why,) = plan.rejected().values()
        assert "4 of 6 shards lost" in why
    finally:
        cluster.stop()
