"""How often rank 0 asks the agents, counted at real ones."""

from collections import Counter

import pytest
import torch

import ecckpt
from ecckpt.errors import AgentUnreachable
from ecckpt.protocol.verbs import BEGIN, INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.worlds import instead_of

NODES = 6


def checkpointer(cluster, node):
    return ecckpt.Checkpointer(
        "test", code=(2, 1), root=cluster.root(node), agents=cluster.addresses()
    )


@pytest.fixture
def begun(monkeypatch):
    """How many times each agent was asked to begin a timeline."""
    asked = Counter()

    def counted(client, message, real):
        asked[client.address] += 1
        return real()

    instead_of(monkeypatch, BEGIN, counted)
    return asked


def saved(cluster):
    state = {"w": torch.arange(1000.0)}
    with checkpointer(cluster, cluster.nodes[0]) as ckpt:
        ckpt.restore(state)
        ckpt.save(7, state).wait(60)
    return state


def restored_on_a_new_node(cluster):
    (home,) = cluster.replace(cluster.nodes[0])
    state = {"w": torch.zeros(1000)}
    with checkpointer(cluster, home) as ckpt:
        assert ckpt.restore(state, resume="required").step == 7
    return state


def test_a_new_run_is_begun_in_one_round(begun):
    with LocalCluster(nodes=NODES) as cluster:
        saved(cluster)
        assert list(begun.values()) == [1] * NODES


def test_a_home_that_is_new_costs_no_second_round(begun):
    with LocalCluster(nodes=NODES) as cluster:
        state = saved(cluster)
        begun.clear()
        cluster.kill(cluster.nodes[0])
        assert torch.equal(restored_on_a_new_node(cluster)["w"], state["w"])
        assert list(begun.values()) == [1] * NODES


def test_nobody_of_those_asked_first_answers(begun, monkeypatch):
    with LocalCluster(nodes=NODES) as cluster:
        state = saved(cluster)
        begun.clear()
        cluster.kill(cluster.nodes[0])

        def silent(client, run, real):
            raise AgentUnreachable(client.address, "no answer")

        instead_of(monkeypatch, INVENTORY, silent)
        assert torch.equal(restored_on_a_new_node(cluster)["w"], state["w"])
        assert list(begun.values()) == [2] * NODES
