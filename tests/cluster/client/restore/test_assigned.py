"""Restores that assign, with real agents: what was restored stays, whatever its shard becomes."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ecckpt.client.admin.forget import forget_run
from ecckpt.client.admin.verify import verify_run
from ecckpt.errors import StateMismatch
from ecckpt.format.fragment_file import HOME
from ecckpt.protocol.verbs import INVENTORY, SLOT
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.media import small_tmpfs
from tests.support.runs import run_status
from tests.support.worlds import World, same_state, states_for, stopped

ELEMENTS = 300_000
BYTES = 4 * ELEMENTS


def _one(seed: int) -> dict[str, Any]:
    return states_for(1, seed=seed, elements=ELEMENTS)[0]


def _world(cluster: LocalCluster, **options: Any) -> World:
    """One rank, at home on n0."""
    return World(cluster, 1, agents=cluster.addresses(), **options)


def _save(cluster: LocalCluster, step: int) -> None:
    with _world(cluster) as world:
        world.restore([_one(0)])
        assert world.save(step, [_one(step)])[0].wait(30)


def _region(cluster: LocalCluster) -> Path:
    """Where the newest home copy on n0 is."""
    agent = cluster.client("n0")
    homes = [each for each in agent.call(INVENTORY, "test").headers if each.index == HOME]
    newest = max(homes, key=lambda header: header.shard.generation)
    return Path(agent.call(SLOT, newest.shard).path)


def _used_bytes(folder: Path) -> int:
    size = os.statvfs(folder)
    return size.f_frsize * (size.f_blocks - size.f_bfree)


def _mappings(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def test_a_restart_assigns_trains_saves_and_restarts_elsewhere(cluster6: LocalCluster) -> None:
    _save(cluster6, 1)
    state = _one(0)
    tensor = state["weights"]
    with _world(cluster6) as world:
        (found,) = world.restore([state], assign=True)
        assert (found.step, found.source, found.assigned_bytes) == (1, "home", BYTES)
        assert state["weights"] is tensor
        assert same_state(state, _one(1))
        tensor.mul_(2)
        (checked,) = verify_run("test", [cluster6.client("n0")])
        assert (checked.files, checked.bad) == (1, [])  # the home copy is as it was
        assert world.save(2, [state])[0].wait(30)
        tensor.zero_()
    cluster6.kill("n0")
    cluster6.replace("n0")
    blank = _one(0)
    with _world(cluster6) as world:
        (found,) = world.restore([blank], assign=True)
        assert (found.step, found.source, found.assigned_bytes) == (2, "peers", BYTES)
    assert torch.equal(blank["weights"], 2 * _one(1)["weights"])


@pytest.mark.parametrize("restarts", [False, True])
def test_saves_that_use_all_memory_again_leave_assigned_tensors_alone(
    cluster1: LocalCluster, restarts: bool
) -> None:
    """Also if the agent is killed before the shard may go."""
    _save(cluster1, 1)
    region, state = _region(cluster1), _one(0)
    with _world(cluster1, memory_bytes=3 * BYTES) as world:
        (found,) = world.restore([state], assign=True)
        assert found.assigned_bytes == BYTES
        if restarts:
            world.await_slots()
            cluster1.restart("n0")
        regions = set()
        for step in range(2, 8):
            assert world.save(step, [_one(step)])[0].wait(30)
            regions.add(_region(cluster1))
        assert len(regions) == 2  # used in turns
        assert region not in regions
        assert not region.exists()
        assert run_status(cluster1.client("n0"))["used_bytes"] < 3 * BYTES
    assert same_state(state, _one(1))


def test_a_shard_that_went_while_the_agent_was_away_is_not_used_again(
    cluster1: LocalCluster,
) -> None:
    _save(cluster1, 1)
    region, state = _region(cluster1), _one(0)
    with _world(cluster1) as world:
        world.restore([state], assign=True)
        saved = region.read_bytes()
        assert world.save(2, [_one(2)])[0].wait(30)
        world.await_slots()
        region.write_bytes(saved)  # as if it had been killed before it gave it back
        region.chmod(0o1600)
        cluster1.restart("n0")
        assert not region.exists()
        for step in range(3, 6):
            assert world.save(step, [_one(step)])[0].wait(30)
    assert same_state(state, _one(1))


def test_forgetting_the_run_leaves_assigned_tensors_alone(cluster1: LocalCluster) -> None:
    _save(cluster1, 1)
    region, state = _region(cluster1), _one(0)
    with _world(cluster1) as world:
        world.restore([state], assign=True)
    forget_run("test", [cluster1.client("n0")])
    assert not region.exists()
    with _world(cluster1) as world:
        assert world.restore([_one(0)]) == [None]
        for step in range(1, 5):
            assert world.save(step, [_one(10 + step)])[0].wait(30)
    assert same_state(state, _one(1))


def test_memory_goes_back_with_the_last_tensor(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path) as folder, LocalCluster(nodes=1, folder=folder) as cluster:
        _save(cluster, 1)
        region, state = _region(cluster), {"weights": torch.zeros(ELEMENTS), "progress": {}}
        with _world(cluster) as world:
            world.restore([state], assign=True)
            for step in (2, 3, 4):
                assert world.save(step, [_one(step)])[0].wait(30)
            world.await_slots()
        gc.collect()
        assert not region.exists()
        (mapping,) = _mappings(region.name)
        assert " rw-p " in mapping
        assert "(deleted)" in mapping
        before = _used_bytes(folder)
        del state
        gc.collect()
        assert not _mappings(region.name)
        assert BYTES < before - _used_bytes(folder) < 2 * BYTES


def test_nothing_is_assigned_before_all_ranks_agree(cluster6: LocalCluster) -> None:
    states = states_for(2, seed=1, elements=ELEMENTS)
    with World(cluster6, 2, agents=cluster6.addresses()) as world:
        world.restore(states)
        assert all(each.wait(30) for each in world.save(1, states))
    blank = states_for(2, seed=0, elements=ELEMENTS)
    address = blank[0]["weights"].data_ptr()
    blank[1]["weights"] = torch.zeros(3)
    with World(cluster6, 2, agents=cluster6.addresses()) as world:
        with pytest.raises(StateMismatch, match="shape"):
            world.restore(blank, assign=True)
        assert blank[0]["weights"].data_ptr() == address
        assert same_state(blank[0], states_for(2, seed=0, elements=ELEMENTS)[0])


def test_a_rank_without_its_agent_assigns_what_it_read(cluster6: LocalCluster) -> None:
    _save(cluster6, 1)
    state = _one(0)
    with _world(cluster6, restore_timeout_s=4.0) as world, stopped(cluster6, "n0"):
        (found,) = world.restore([state], assign=True)
    assert (found.source, found.assigned_bytes) == ("peers", BYTES)
    assert same_state(state, _one(1))


def test_on_another_number_of_ranks_all_is_copied(cluster6: LocalCluster) -> None:
    _save(cluster6, 1)
    blank = [_one(0), _one(0)]
    with World(cluster6, 2, agents=cluster6.addresses()) as world:
        found = world.restore(blank, assign=True)
    assert [each.assigned_bytes for each in found] == [0, 0]
    assert all(same_state(each, _one(1)) for each in blank)


def test_without_assign_nothing_is_kept(cluster1: LocalCluster) -> None:
    _save(cluster1, 1)
    region, state = _region(cluster1), _one(0)
    with _world(cluster1) as world:
        (found,) = world.restore([state])
        assert found.assigned_bytes == 0
        for step in range(2, 5):
            assert world.save(step, [_one(step)])[0].wait(30)
    assert region.exists()  # taken again
    assert same_state(state, _one(1))
