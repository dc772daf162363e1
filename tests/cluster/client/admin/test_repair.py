"""Nodes were lost and replaced, no training runs: the margin comes back."""

import re

import pytest

from ecckpt.cli import main
from ecckpt.client.admin.repair import repair_run
from ecckpt.errors import AgentUnreachable, NothingToRestore
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.worlds import World, same_state, states_for


def clients(cluster: LocalCluster) -> list[AgentClient]:
    return [AgentClient(address) for address in cluster.addresses()]


def test_what_replaced_nodes_lack_is_made_again(
    cluster6: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    states = states_for(6, seed=2)
    with World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(4, states))
    assert repair_run("test", clients(cluster6)).fragments == 0
    cluster6.kill("n1", "n3")
    cluster6.replace("n1", "n3")
    done = repair_run("test", clients(cluster6))
    # Each lost node had one fragment of each of the other five shards, and its own home copy.
    assert (done.fragments, done.homes, done.margin_before) == (10, 2, 1)
    assert (done.margin, done.complete, done.problems) == (3, True, [])
    cluster6.kill("n0", "n2", "n4")
    cluster6.replace("n0", "n2", "n4")
    assert main(["repair", "test", "--dry-run", *cluster6.addresses()]) == 1
    out = capsys.readouterr().out
    assert "survived 0 more node losses, now 0" in out
    assert re.search("rank 0, decoded at n0.*: fragment . to n", out)
    assert main(["repair", "test", *cluster6.addresses()]) == 0
    assert "survived 0 more node losses, now 3" in capsys.readouterr().out
    cluster6.kill(*cluster6.nodes[:3])
    cluster6.replace(*cluster6.nodes[:3])
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        assert [each.step for each in world.restore(blank)] == [4] * 6
    assert all(map(same_state, blank, states))


@pytest.mark.long
def test_what_cannot_be_repaired_is_said(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=2)
    with pytest.raises(NothingToRestore):
        repair_run("test", clients(cluster6))
    with World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(4, states))
    agents = clients(cluster6)
    cluster6.kill("n1")
    with pytest.raises(AgentUnreachable):
        repair_run("test", agents)
    # On five nodes a shard has its home copy and four fragments at most.
    done = repair_run("test", clients(cluster6))
    assert (done.margin_before, done.margin, done.complete) == (2, 2, False)
    cluster6.kill("n0", "n2", "n3")
    with pytest.raises(NothingToRestore, match="4 of 6 shards lost"):
        repair_run("test", clients(cluster6))
