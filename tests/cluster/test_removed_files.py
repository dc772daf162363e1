"""Files of running agents that another process removes: they cost margin, and are made again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecckpt.testing.local_cluster import LocalCluster
from tests.support.media import fill, small_tmpfs
from tests.support.runs import run_status
from tests.support.worlds import World, same_state, states_for


def soon(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def save(world: World, step: int, states: list[dict[str, object]]) -> list[bool]:
    return [handle.wait(30) for handle in world.save(step, states)]


def test_what_a_cleaner_takes_from_all_holders_is_lost_and_then_made_good() -> None:
    """Two saves between, then the home is lost: the newest step is still there."""
    with LocalCluster(nodes=4) as cluster:
        states = states_for(4, seed=1)
        with World(cluster, code=(2, 1)) as world:
            world.restore(states)
            for step in (1, 2):
                assert all(save(world, step, states))
            for node in ("n1", "n2", "n3"):
                for region in (cluster.root(node) / "regions").iterdir():
                    region.unlink()
            for step in (3, 4):
                assert all(save(world, step, states))
            soon(lambda: world.checkpointers[0].margin() == 2)
        cluster.kill("n0")
        cluster.replace("n0")
        blank = states_for(4, seed=0)
        with World(cluster, code=(2, 1)) as world:
            assert {each.step for each in world.restore(blank)} == {4}
        assert all(map(same_state, blank, states))


def test_the_margin_says_at_once_what_a_cleaner_took_and_repair_makes_it_again() -> None:
    with LocalCluster(nodes=4) as cluster:
        states = states_for(4, seed=1)
        with World(cluster, code=(2, 1)) as world:
            world.restore(states)
            assert all(save(world, 1, states))
            soon(lambda: world.checkpointers[0].margin() == 2)
            shutil.rmtree(cluster.root("n1") / "regions")
            soon(lambda: run_status(cluster.client("n0"))["guard"]["repaired"] > 0)
            soon(lambda: world.checkpointers[0].margin() == 2)
            assert all(save(world, 2, states))


def test_a_node_whose_folder_is_removed_saves_again() -> None:
    with LocalCluster(nodes=4) as cluster:
        states = states_for(4, seed=1)
        with World(cluster, code=(2, 1)) as world:
            world.restore(states)
            assert all(save(world, 1, states))
            # Renamed first: the agent may be making a file in it.
            gone = cluster.root("n1").rename(cluster.root("n1").with_name("gone"))
            shutil.rmtree(gone, ignore_errors=True)
            assert cluster.wait("n1") != 0
            step = 2
            while not all(save(world, step, states)):
                step += 1
                assert step < 10
            soon(lambda: world.checkpointers[0].margin() == 2)


@pytest.mark.parametrize("what", ["bytes", "files"])
def test_a_run_is_restored_from_a_tmpfs_that_another_program_filled(
    tmp_path: Path, what: str
) -> None:
    with (
        small_tmpfs(tmp_path, "64m,nr_inodes=300") as folder,
        LocalCluster(nodes=3, folder=folder) as cluster,
    ):
        states = states_for(3, seed=1)
        with World(cluster, code=(1, 1), memory_bytes=4 << 20) as world:
            world.restore(states)
            assert all(save(world, 1, states))
        fill(folder, what)
        cluster.restart("n0")
        blank = states_for(3, seed=0)
        with World(cluster, code=(1, 1), memory_bytes=4 << 20) as world:
            assert {each.step for each in world.restore(blank)} == {1}
        assert all(map(same_state, blank, states))
