"""Holders that lose what they held, with real agents: noticed and made good without any save."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import generation
from worlds import World, same_state, states_for

from ecckpt import cli, wire
from ecckpt.errors import AgentUnreachable, NothingToRestore
from ecckpt.fragment import BLOCK_BYTES, HOME, Header, fragment_bytes_for
from ecckpt.generation import ShardId
from ecckpt.testing import LocalCluster, children


def soon(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def guard(cluster: LocalCluster, node: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.client(node).status()["runs"]["test"]["guard"]
    return found


def saved(cluster: LocalCluster, **options: Any) -> tuple[World, list[dict[str, Any]]]:
    """Two ranks on the first two nodes, with a committed save."""
    states = states_for(2, seed=1)
    world = World(cluster, 2, code=(3, 2), agents=cluster.addresses(), **options)
    world.restore(states)
    assert all(handle.wait(30) for handle in world.save(4, states))
    return world, states


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
        assert 'ecckpt_margin_nodes{run="test"} 3' in lines
        assert 'ecckpt_repairs_total{run="test"} 1' in lines
        assert 'ecckpt_committed_step{run="test"} 4' in lines
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


# -- by hand --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Five agents, for RS(2, 2) or less."""
    with LocalCluster(nodes=5) as cluster:
        yield cluster


def protected(cluster: LocalCluster, run: str) -> ShardId:
    """A shard of n0, RS(2, 1) over n1 to n3, that nobody guards."""
    shard = ShardId(run, generation(1, 5), 0)
    size_bytes = fragment_bytes_for(5000, 2)
    home = Header(shard, 1, HOME, 2, 1, 5000, size_bytes, BLOCK_BYTES, "n0", None, 0)
    client = cluster.client("n0")
    slot = client.reserve(wire.Reserve(home, 0, 1, 3, ()))
    with Path(slot.path).open("r+b") as file:
        file.seek(slot.payload_offset)
        file.write(bytes(5000))
    client.stage(wire.Stage(home, slot.region))
    targets = tuple(
        wire.Target(index, node, cluster.client(node).node().address)
        for index, node in enumerate(("n1", "n2", "n3"))
    )
    client.protect(wire.Protect(shard, 1, targets, 3, 0, 10.0, ()))
    state = "encoding"
    while state not in ("protected", "failed"):
        state = client.watch(wire.Watch(shard, state, False, 5.0)).state
    assert state == "protected"
    client.commit(run, shard.generation)
    return shard


def repair(
    capsys: pytest.CaptureFixture[str], cluster: LocalCluster, *arguments: str
) -> tuple[int, str, str]:
    status = cli.main(["repair", *arguments, *cluster.addresses()])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_repair_by_hand(capsys: pytest.CaptureFixture[str], cluster: LocalCluster) -> None:
    shard = protected(cluster, "by-hand")
    assert repair(capsys, cluster, "by-hand", "--dry-run")[:2] == (
        0,
        f"{shard.generation}: complete, survives 2 more node losses\n",
    )
    cluster.empty("n0", "n3")
    status, out, _ = repair(capsys, cluster, "by-hand", "--dry-run", "--json")
    plan = json.loads(out)
    assert (status, plan["state"], plan["margin"]) == (1, "recoverable", 0)
    (mend,) = plan["repairs"]
    assert (mend["home"], mend["fetch"], list(mend["targets"])) == ("n0", True, ["2"])
    status, out, err = repair(capsys, cluster, "by-hand")
    assert (status, err) == (0, "")
    assert "1 shards brought to a home, 1 fragments made again" in out
    assert "survives 2 more node losses, 0 before" in out
    cluster.empty("n1")
    status, out, _ = repair(capsys, cluster, "by-hand", "--json")
    done = json.loads(out)
    assert (status, done["margin_before"], done["margin"], done["fragments"]) == (0, 1, 2, 1)
    assert repair(capsys, cluster, "by-hand")[0] == 0  # nothing is left to do


def test_repair_that_cannot_do_everything_says_so(
    capsys: pytest.CaptureFixture[str], cluster: LocalCluster
) -> None:
    protected(cluster, "too-few")
    *two, other = [cluster.client(node).node().address for node in ("n0", "n1", "n4")]
    status = cli.main(["repair", "too-few", *two, "127.0.0.1:1"])
    captured = capsys.readouterr()
    assert status == 1
    assert "more is missing, and no node could take it" in captured.out
    assert "no answer: 127.0.0.1:1" in captured.err
    status = cli.main(["repair", "too-few", other])
    assert status == 2
    assert capsys.readouterr().err.startswith(f"ecckpt: {NothingToRestore.__name__}")
    status = cli.main(["repair", "too-few", "127.0.0.1:1"])
    assert status == 2
    assert f"ecckpt: {AgentUnreachable.__name__}" in capsys.readouterr().err
