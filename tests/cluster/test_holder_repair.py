"""Holders that lose what they held, with real agents: noticed and made good without any save."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from ecckpt.testing.local_cluster import LocalCluster, children
from tests.support.runs import run_status
from tests.support.worlds import World, same_state, states_for


def soon(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def guard(cluster: LocalCluster, node: str) -> dict[str, Any]:
    found: dict[str, Any] = run_status(cluster.client(node))["guard"]
    return found


def saved(cluster: LocalCluster, **options: Any) -> tuple[World, list[dict[str, Any]]]:
    """Two ranks on the first two nodes, with a committed save."""
    states = states_for(2, seed=1)
    world = World(cluster, 2, code=(3, 2), agents=cluster.addresses(), **options)
    world.restore(states)
    assert all(handle.wait(30) for handle in world.save(4, states))
    return world, states


@pytest.mark.long
def test_an_emptied_holder_is_filled_again_and_any_three_others_may_go(
    cluster6: LocalCluster,
) -> None:
    world, states = saved(cluster6)
    with world:
        soon(lambda: [each.margin() for each in world.checkpointers] == [3, 3])
        cluster6.empty("n3")
        soon(lambda: [guard(cluster6, node)["repaired"] for node in ("n0", "n1")] == [1, 1])
        soon(lambda: [each.margin() for each in world.checkpointers] == [3, 3])
        port = cluster6.client("n0").node().address
        with urllib.request.urlopen(f"http://{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        (run,) = cluster6.client("n0").status()["runs"]
        labels = f'{{run="test",identity="{run.removeprefix("test~")}"}}'
        assert f"ecckpt_margin_nodes{labels} 3" in lines
        assert f"ecckpt_repairs_total{labels} 1" in lines
        assert f"ecckpt_committed_step{labels} 4" in lines
    cluster6.kill("n0", "n1", "n2")
    cluster6.replace("n0", "n1", "n2")
    blank = states_for(2, seed=0)
    with World(cluster6, 2, code=(3, 2), agents=cluster6.addresses()) as world:
        assert [each.step for each in world.restore(blank)] == [4, 4]
    assert all(map(same_state, blank, states))


@pytest.mark.long
def test_a_spare_node_takes_over_and_a_restarted_home_goes_on_watching() -> None:
    with LocalCluster(nodes=7) as cluster:
        world, states = saved(cluster)
        with world:
            soon(lambda: world.checkpointers[0].margin() == 3)
            cluster.kill("n3")
            soon(lambda: guard(cluster, "n0")["lost"] == ["n3"])
            soon(lambda: [each.margin() for each in world.checkpointers] == [3, 3])
            cluster.restart("n0")
            soon(lambda: world.checkpointers[0].margin() == 3)
            cluster.empty("n6")  # the spare of n0, a regular holder of n1
            soon(lambda: guard(cluster, "n0")["repaired"] == 1)
            soon(lambda: [each.margin() for each in world.checkpointers] == [3, 3])
        cluster.kill("n0", "n1", "n2")
        blank = states_for(2, seed=0)
        cluster.replace("n0", "n1", "n3")
        with World(cluster, 2, code=(3, 2), agents=cluster.addresses()) as world:
            assert [each.step for each in world.restore(blank)] == [4, 4]
        assert all(map(same_state, blank, states))


@pytest.mark.long
def test_a_holder_that_is_stopped_for_a_moment_is_not_repaired() -> None:
    with LocalCluster(nodes=7) as cluster:
        world, _ = saved(cluster)
        with world:
            soon(lambda: world.checkpointers[0].margin() == 3)
            stopped = [cluster.pid("n3"), *children(cluster.pid("n3"))]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(2.5)  # an answer or two is missed
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            time.sleep(8.0)
            for node in ("n0", "n1"):
                seen = guard(cluster, node)
                assert (seen["margin"], seen["repaired"], seen["lost"]) == (3, 0, [])
