"""Dropping a run: nothing of it is left, nobody writes it, and its name is as good as new."""

import contextlib
import json
import time

import pytest

from ecckpt import errors
from ecckpt.cli import main
from ecckpt.format.ids import RunWriter
from ecckpt.protocol.messages.restore import Begin, Forget
from ecckpt.protocol.verbs import BEGIN, FORGET, INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.worlds import World, states_for

RUN = "test"


def saved(cluster, **options):
    """A world of six ranks that has saved step 1."""
    world = World(cluster, code=(3, 2), **options)
    states = states_for(6, seed=1)
    world.restore(states)
    assert all(handle.wait(30) for handle in world.save(1, states))
    return world


def forget(cluster, capsys, *options):
    """Exit status and what was printed."""
    status = main(["forget", RUN, *cluster.addresses(), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def regions(cluster):
    return [path for node in cluster.nodes for path in (cluster.root(node) / "regions").iterdir()]


def stored(folder):
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a draft that has just got its name
            if path.is_file() and path.stat().st_size > 4096:
                found.append(path)
    return found


def test_without_yes_nothing_is_dropped(cluster6: LocalCluster, capsys):
    saved(cluster6).close()
    before = [cluster6.client(node).call(INVENTORY, RUN) for node in cluster6.nodes]
    status, found = forget(cluster6, capsys)
    assert (status, found["dropped"]) == (0, False)
    assert [each["node"] for each in found["nodes"]] == list(cluster6.nodes)
    assert all(each["memory_bytes"] and each["saved_unix_s"] for each in found["nodes"])
    assert [cluster6.client(node).call(INVENTORY, RUN) for node in cluster6.nodes] == before


def test_a_run_is_dropped_and_its_name_is_as_good_as_new(cluster6: LocalCluster, capsys):
    world = saved(cluster6)
    status, found = forget(cluster6, capsys, "--yes")
    assert (status, found["dropped"]) == (0, True)
    for node in cluster6.nodes:
        inventory = cluster6.client(node).call(INVENTORY, RUN)
        assert not inventory.headers
        assert (inventory.committed, inventory.rejected) == (None, {})
    # Who was still at work goes on without being saved.
    states = states_for(6, seed=2)
    handles = world.save(2, states)
    assert all(handle.wait_done(30) and handle.error is not None for handle in handles)
    world.close()
    cluster6.restart(*cluster6.nodes)
    assert regions(cluster6) == []
    with World(cluster6, code=(3, 2)) as new:
        assert new.restore(states) == [None] * 6
        assert all(handle.wait(30) for handle in new.save(1, states))


def test_what_is_on_disk_goes_as_well(tmp_path, capsys):
    with LocalCluster(nodes=6, disk=tmp_path) as cluster:
        world = saved(cluster)
        world.close()
        assert stored(tmp_path)
        status, found = forget(cluster, capsys, "--yes")
        assert status == 0
        assert sum(each["disk_bytes"] for each in found["nodes"]) > 0
        deadline_s = time.monotonic() + 20
        while stored(tmp_path) and time.monotonic() < deadline_s:  # disks are behind the answer
            time.sleep(0.05)
        cluster.stop()
        assert not stored(tmp_path)
        cluster.start()
        with World(cluster, code=(3, 2)) as new:
            assert new.restore(states_for(6, seed=2)) == [None] * 6


def test_a_node_that_was_not_reached_is_told(cluster6: LocalCluster, capsys):
    saved(cluster6).close()
    addresses = cluster6.addresses()
    cluster6._end("n2")  # its memory stays
    assert main(["forget", RUN, *addresses, "--yes"]) == 1
    assert f"{addresses[2]}: 0 bytes in memory" in capsys.readouterr().out
    cluster6._launch(["n2"])
    with World(cluster6, code=(3, 2)) as new, pytest.raises(errors.NothingToRestore):
        new.restore(states_for(6, seed=2))
    assert main(["forget", RUN, *cluster6.addresses(), "--yes"]) == 0
    with World(cluster6, code=(3, 2)) as new:
        assert new.restore(states_for(6, seed=2)) == [None] * 6


def test_a_run_that_nobody_has_is_an_error(cluster1: LocalCluster, capsys):
    assert main(["forget", "nobodys", *cluster1.addresses()]) == 2
    assert "nothing of run 'nobodys' was found" in capsys.readouterr().err


def test_a_run_that_began_anew_meanwhile_is_not_dropped(cluster1: LocalCluster):
    client = cluster1.client("n0")
    client.call(BEGIN, Begin(RUN, RunWriter(5, "a" * 16), 0.0))
    with pytest.raises(errors.Fenced):
        client.call(FORGET, Forget(RUN, RunWriter(5, "b" * 16)))
    with pytest.raises(errors.Fenced):
        client.call(FORGET, Forget(RUN, RunWriter(4, "a" * 16)))
