"""A run is more than its name: jobs that did not know of each other are never merged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ecckpt import errors
from ecckpt.cli.command import main
from ecckpt.client.read.open import open as open_run
from ecckpt.protocol.verbs import IDENTITIES, INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.worlds import World, same_state, states_for


def saved(cluster: LocalCluster, *nodes: str, step: int, seed: int, **options: object) -> str:
    """Save a step with the ranks on these nodes, which see no other agent; the run's full name."""
    there = cluster.nodes
    cluster_view = [node for node in there if node in nodes] or list(there)
    with World(_Part(cluster, cluster_view), **options) as world:
        states = states_for(len(cluster_view), seed=seed)
        world.restore(states_for(len(cluster_view), seed=0))
        assert all(handle.wait(30) for handle in world.save(step, states))
        return world.checkpointers[0]._cluster.run


class _Part:
    """Some nodes of a cluster, for ranks that do not know of the others."""

    def __init__(self, cluster: LocalCluster, nodes: list[str]) -> None:
        self.nodes, self.root = nodes, cluster.root


def test_a_run_keeps_the_identity_of_its_first_start(cluster6: LocalCluster) -> None:
    first = saved(cluster6, step=1, seed=1)
    assert re.fullmatch("test~[0-9a-f]{16}", first)
    assert saved(cluster6, step=2, seed=2) == first
    cluster6.kill("n0", "n1", "n2")
    cluster6.replace("n0", "n1", "n2")
    with World(cluster6) as world:
        states = states_for(6, seed=0)
        assert world.restore(states)[0].step == 2
        assert world.checkpointers[0]._cluster.run == first
        assert world.checkpointers[0].run == "test"
    assert same_state(states[5], states_for(6, seed=2)[5])


def test_two_jobs_of_one_name_are_two_runs_and_no_start_chooses(cluster6: LocalCluster) -> None:
    ours = saved(cluster6, "n0", "n1", "n2", step=9000, seed=1)
    theirs = saved(cluster6, "n3", "n4", "n5", step=40, seed=2)
    assert ours != theirs
    with pytest.raises(errors.TwoHistories) as raised:
        World(cluster6)
    assert all(run in str(raised.value) for run in (ours, theirs))
    assert f'run="{min(ours, theirs)}"' in str(raised.value)
    # Neither has lost anything, and each is there by its full name.
    for run, step, nodes in ((ours, 9000, ["n0", "n1", "n2"]), (theirs, 40, ["n3", "n4", "n5"])):
        with World(_Part(cluster6, nodes), run=run) as world:
            assert world.restore(states_for(3, seed=0))[0].step == step


def test_commands_name_both_histories_and_forget_one(
    cluster6: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = saved(cluster6, "n0", "n1", "n2", step=9000, seed=1)
    theirs = saved(cluster6, "n3", "n4", "n5", step=40, seed=2)
    addresses = cluster6.addresses()
    for command in (["plan-restore", "test"], ["forget", "test"], ["repair", "test", "--dry-run"]):
        assert main([*command, *addresses]) == 2
        found = capsys.readouterr().err
        assert ours in found
        assert theirs in found
    with pytest.raises(errors.TwoHistories):
        open_run("test", addresses)
    assert open_run(ours, addresses).generation.step == 9000
    assert main(["forget", theirs, *addresses, "--yes"]) == 0
    assert open_run("test", addresses).generation.step == 9000
    for node in ("n3", "n4", "n5"):
        assert cluster6.client(node).call(IDENTITIES, "test").runs == ()
    with World(cluster6) as world:
        assert world.checkpointers[0]._cluster.run == ours


def test_an_agent_asked_by_the_plain_name_tells_of_the_only_run(cluster6: LocalCluster) -> None:
    run = saved(cluster6, step=1, seed=1)
    inventory = cluster6.client("n0").call(INVENTORY, "test")
    assert {header.shard.run for header in inventory.headers} == {run}
    assert not cluster6.client("n0").call(INVENTORY, "tes").headers


def test_the_identity_is_on_the_disk_too(tmp_path: Path) -> None:
    with LocalCluster(nodes=3, disk=tmp_path) as cluster:
        with World(cluster) as world:
            world.restore(states_for(3, seed=0))
            (first, *_) = world.save(1, states_for(3, seed=1))
            assert first.wait(30)
            run = world.checkpointers[0]._cluster.run
        cluster.cut_power()
        cluster.start()
        with World(cluster) as world:
            assert world.restore(states_for(3, seed=0))[0].step == 1
            assert world.checkpointers[0]._cluster.run == run
