"""Another node's agent at an address that was a holder's."""

from __future__ import annotations

import pytest

from ecckpt.errors import AgentMismatch
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing import LocalCluster
from tests.support.worlds import World, states_for


def test_what_reaches_another_node_does_not_count_as_held(cluster6: LocalCluster) -> None:
    states = states_for(1, seed=1)
    addresses = {node: cluster6.client(node).node().address for node in cluster6.nodes}
    with World(cluster6, 1, code=(3, 2), agents=cluster6.addresses()) as world:
        world.restore(states)
        world.save(1, states)
        cluster6.kill("n3")
        cluster6._domains["x0"] = "x0"
        cluster6._launch(["x0"], listen=addresses["n3"])
        (handle,) = world.save(2, states)
        handle.wait(30)
        assert handle.held == 4
        assert "agent of node x0, not of n3" in str(handle.problems)
        assert not cluster6.client("x0").call(INVENTORY, "test").headers.shards
    with pytest.raises(AgentMismatch, match="of node x0, not of n3"):
        AgentClient(addresses["n3"], for_node="n3").call(INVENTORY, "test")
