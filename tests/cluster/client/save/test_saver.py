"""A save that cannot begin is skipped on all ranks: training goes on, and a later one commits."""

from __future__ import annotations

import logging
import random
import threading
import time

import pytest

from ecckpt.client.save import saver
from ecckpt.errors import InvalidConfig, SaveFailed, SaveSkipped
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.worlds import World, same_state, states_for, stopped

RANKS = 2


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def world(cluster6: LocalCluster):
    """A run of two ranks on six nodes with a committed save."""
    agents = cluster6.addresses()
    with World(cluster6, RANKS, agents=agents, code=(2, 1)) as world:
        world.restore(states_for(RANKS, seed=0))
        for step in (1, 2):  # both slots of a rank are made
            assert all(each.wait(30) for each in world.save(step, states_for(RANKS, seed=step)))
        world.await_slots()
        yield world


def restored(cluster: LocalCluster, blank):
    with World(cluster, RANKS, agents=cluster.addresses(), code=(2, 1)) as world:
        found = world.restore(blank)
    return found[0].step


@pytest.mark.parametrize("node", ["own", "peers"])
def test_saves_behind_one_that_hangs_are_skipped_and_the_next_commits(
    cluster6: LocalCluster, world: World, node: str
) -> None:
    nodes = ["n0"] if node == "own" else ["n1", "n2", "n3", "n4", "n5"]
    with stopped(cluster6, *nodes):
        first = world.save(3, states_for(RANKS, seed=3))
        for step in (4, 5, 6):
            skipped = world.save(step, states_for(RANKS, seed=step), patience_s=0.05)
            assert not any(each.done for each in first)
            assert all(each.skipped and each.done and not each.staged for each in skipped)
        error = skipped[0].error
        assert isinstance(error, SaveSkipped)
        assert (error.step, error.unfinished) == (6, 3)
        assert error.age_s > 0
        assert "the save of step 3 is not ready after" in str(error)
        assert "patience_s" in str(error)
    assert all(each.wait(30) for each in first)
    assert [each.skipped for each in world.checkpointers] == [3, 3]
    states = states_for(RANKS, seed=7)
    assert all(each.wait(30) for each in world.save(7, states))
    world.close()
    blank = states_for(RANKS, seed=0)
    assert restored(cluster6, blank) == 7
    assert all(map(same_state, blank, states))


def test_a_save_that_one_rank_skips_fails_on_all_and_costs_nothing_older(
    cluster6: LocalCluster, world: World
) -> None:
    larger = [*states_for(1, seed=3), *states_for(2, seed=3, elements=2_000_000)[1:]]
    with stopped(cluster6, "n1"):  # where rank 1 needs a larger slot
        early = world.checkpointers[0].save(3, larger[0])
        late = world.checkpointers[1].save(3, larger[1])
        assert isinstance(late.error, SaveSkipped)
        assert late.error.unfinished is None
        assert "its slot is not ready" in str(late.error)
        with pytest.raises(SaveFailed, match="another rank could not protect its shard"):
            early.wait(30)
    assert all(each.wait(30) for each in world.save(4, larger))
    world.close()
    assert restored(cluster6, larger) == 4


def test_no_rank_begins_a_save_before_all_are_through_with_the_one_before(
    cluster6: LocalCluster, world: World
) -> None:
    """Else two ranks could save in turns, each in vain."""
    larger = [*states_for(1, seed=3), *states_for(2, seed=3, elements=2_000_000)[1:]]
    with stopped(cluster6, "n0"):
        with stopped(cluster6, "n1"):
            early = world.checkpointers[0].save(3, larger[0])
            late = world.checkpointers[1].save(3, larger[1])
            assert (early.staged, late.skipped) == (True, True)
        world.await_slots()
        later = world.checkpointers[1].save(4, larger[1], patience_s=0.5)
        assert world.checkpointers[0].save(4, larger[0]).skipped
        assert not early.done
        assert isinstance(later.error, SaveSkipped)
        assert later.error.unfinished == 3
        assert "waiting for other ranks to be done with it" in str(later.error)
    assert all(each.wait(30) for each in world.save(5, larger))


def test_with_patience_a_save_waits_for_the_one_before(world: World) -> None:
    handles = [
        each
        for step in range(3, 8)
        for each in world.save(step, states_for(RANKS, seed=step), patience_s=30)
    ]
    assert all(each.wait(30) for each in handles)


def test_a_skipped_save_is_raised_where_that_was_asked_for(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=1)
    with World(cluster1, strict=True) as world:
        world.restore([state])
        assert world.save(1, [state])[0].wait(30)
        world.await_slots()
        with stopped(cluster1, "n0"):
            (first,) = world.save(2, [state])
            with pytest.raises(SaveSkipped, match="step 3 was skipped"):
                world.save(3, [state], patience_s=0.01)
        assert first.wait(30)
        assert world.save(4, [state])[0].wait(30)


@pytest.mark.parametrize("patience_s", [-1.0, float("nan")])
def test_patience_is_a_time(world: World, patience_s: float) -> None:
    with pytest.raises(InvalidConfig, match="patience_s="):
        world.checkpointers[0].save(9, {"x": 1}, patience_s=patience_s)


def test_saves_slower_than_their_cadence_commit_again_and_again(
    cluster6: LocalCluster, world: World
) -> None:
    """Ranks that come at different moments, agents that stop for a moment, no pause between."""
    chance = random.Random(1)
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(0.02):
            with stopped(cluster6, chance.choice(cluster6.nodes)):
                over.wait(chance.uniform(0.05, 0.3))

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    begun = committed = step = 0
    pending = []
    jitter = [random.Random(rank) for rank in range(RANKS)]
    states = states_for(RANKS, seed=5, elements=1_000_000)

    def save(rank: int):
        time.sleep(jitter[rank].uniform(0, 0.1))
        return world.checkpointers[rank].save(step, states[rank])

    try:
        step = 10
        while committed < 8 and step < 2000:
            step += 1
            handles = world.each(save)
            if any(each.staged for each in handles):
                begun += 1
                pending.append(handles)
            ended = [each for each in pending if all(handle.done for handle in each)]
            pending = [each for each in pending if each not in ended]
            committed += sum(all(handle.committed for handle in each) for each in ended)
    finally:
        over.set()
        disturbing.join()
    assert committed >= 8
    assert begun <= 3 * committed, f"{committed} of {begun} saves were committed, in {step} steps"


def test_the_list_of_failed_saves_in_each_message_is_bounded(
    cluster6: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_GIVEN_UP_LIMIT", 3)
    states = states_for(RANKS, seed=0)
    with World(cluster6, RANKS, agents=cluster6.addresses(), code=(3, 2)) as world:
        world.restore(states)
        assert all(each.wait(30) for each in world.save(1, states))
        cluster6.kill("n2", "n3", "n4", "n5")
        for step in range(2, 8):
            for handle in world.save(step, states):
                assert handle.wait_done(30)
                assert handle.error is not None
        given_up = list(world.checkpointers[0]._session.saver._given_up)
        assert [generation.step for generation in given_up] == [5, 6, 7]
