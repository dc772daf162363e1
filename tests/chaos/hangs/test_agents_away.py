"""A rank whose own agent is away: the shard comes straight from the others, all take the newest."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ecckpt import errors
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.restore import Fetch
from ecckpt.protocol.verbs import FETCH
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.worlds import World, instead_of, same_state, states_for

RANKS = 6
OPTIONS: dict[str, Any] = {"code": (3, 2), "restore_timeout_s": 8.0}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL):
        yield


def _saved(cluster: LocalCluster, step: int, seed: int) -> list[dict[str, Any]]:
    states = states_for(RANKS, seed=seed)
    with World(cluster, **OPTIONS) as world:
        world.restore(states_for(RANKS, seed=0))
        assert all(handle.wait(30) for handle in world.save(step, states))
    return states


def _kill(cluster: LocalCluster, node: str) -> None:
    os.killpg(cluster.pid(node), signal.SIGKILL)
    cluster.wait(node)


@pytest.mark.parametrize("away", [["n2"], ["n0", "n3"]])
def test_all_restore_the_newest_while_agents_are_away(
    cluster6: LocalCluster, away: list[str]
) -> None:
    # Every rank passed over a generation that could be had.
    states, blank = _saved(cluster6, 1, seed=1), states_for(RANKS, seed=0)
    with World(cluster6, **OPTIONS) as world:
        for node in away:
            _kill(cluster6, node)
        found = world.restore(blank)
        assert {each.step for each in found} == {1}
        assert all(not each.rejected for each in found)
        assert all(map(same_state, blank, states))
        by_itself = [f"n{rank}" for rank, each in enumerate(found) if each.source == "peers"]
        assert by_itself == away
        # To make again what is missing, or to save, takes an agent: the handles say so.
        assert all(each.reprotection.wait_done(30) for each in found)
        for handle in world.save(2, states):
            with pytest.raises(errors.EcckptError):
                handle.wait(30)
        # Which the library has started again by now, or soon has.
        newer = states_for(RANKS, seed=2)
        for step in range(3, 30):
            handles = world.save(step, newer)
            assert all(handle.wait_done(30) for handle in handles)
            if all(handle.committed for handle in handles):
                break
    with World(cluster6, **OPTIONS) as world:
        found = world.restore(blank)
    assert {each.step for each in found} == {step}
    assert {each.source for each in found} == {"home"}
    assert all(map(same_state, blank, newer))


def test_an_agent_that_dies_of_its_fetch_is_done_without(
    cluster6: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, blank = _saved(cluster6, 1, seed=3), states_for(RANKS, seed=0)
    cluster6.kill("n4")
    (fresh,) = cluster6.replace("n4")

    def die(client: AgentClient, message: Fetch, real: Callable[[], Any]) -> Any:
        _kill(cluster6, fresh)
        return real()

    instead_of(monkeypatch, FETCH, die)
    with World(cluster6, **OPTIONS) as world:
        found = world.restore(blank)
        assert {each.step for each in found} == {1}
        assert found[4].source == "peers"
        assert all(each.reprotection.wait_done(30) for each in found)
    assert all(map(same_state, blank, states))


def test_another_number_of_ranks_restores_while_an_agent_is_away(cluster6: LocalCluster) -> None:
    same = [states_for(1, seed=5)[0] for _ in range(RANKS)]
    with World(cluster6, **OPTIONS) as world:
        world.restore([states_for(1, seed=0)[0] for _ in range(RANKS)])
        assert all(handle.wait(30) for handle in world.save(1, same))
    blank = [states_for(1, seed=0)[0] for _ in range(RANKS - 1)]
    agents = [cluster6.client("n5").node().address]
    with World(cluster6, RANKS - 1, agents=agents, **OPTIONS) as world:
        _kill(cluster6, "n2")
        found = world.restore(blank)
        assert {(each.step, each.saved_by) for each in found} == {(1, RANKS)}
    assert all(map(same_state, blank, same))
