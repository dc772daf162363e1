"""Slots ahead of their save: whoever has one asks nobody, and no hung agent holds a save up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from ecckpt.client.save import slot_reserver as reserving
from ecckpt.client.save.slot_reserver import Reserver, while_alive
from ecckpt.errors import AgentUnreachable, Fenced, MemoryBudgetTooSmall
from ecckpt.format.fragment_file import HOME
from ecckpt.protocol.messages.restore import Fence
from ecckpt.protocol.messages.save import Reserve, Slot, Stage
from ecckpt.protocol.verbs import FENCE, RESERVE, STAGE
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import generation, header
from tests.support.worlds import World, same_state, states_for, stopped


@pytest.fixture(autouse=True)
def _quick_and_quiet(caplog, monkeypatch) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(reserving, "_FIRST_LOOK_S", 0.05)
    monkeypatch.setattr(reserving, "_LATER_LOOKS_S", 0.1)
    monkeypatch.setattr(reserving, "_RETRY_S", 0.01)


# -- an agent in this process ---------------------------------------------------------------------


@dataclass
class Agent:
    """What a Reserver sees of its agent: answers in turn, each a slot's size or an error."""

    path: str
    answers: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    alive: bool = True
    may_answer: threading.Event = field(default_factory=threading.Event)
    timeout_s: float = 10.0

    def reserve(self, wish):
        self.asked.append(wish)
        assert self.may_answer.wait(10)
        answer = self.answers.pop(0) if self.answers else wish.header.file_bytes
        if isinstance(answer, Exception):
            raise answer
        return Slot(self.path, f"region{len(self.asked)}", 1, answer, 4096, wish.header)

    def node(self):
        if not self.alive:
            raise AgentUnreachable("here", "no answer")


class Slots:
    def ahead(self, slot, payload_bytes):
        pass


@contextmanager
def reserver(agent, revive=lambda: None, *, may_answer=True) -> Iterator[Reserver]:
    if may_answer:
        agent.may_answer.set()
    made = Reserver(agent, Slots(), revive)
    try:
        yield made
    finally:
        agent.may_answer.set()
        made.close()


@pytest.fixture
def agent(tmp_path, monkeypatch):
    path = tmp_path / "slot"
    path.touch()
    monkeypatch.setattr(reserving, "replace", lambda agent, **_: agent)
    return Agent(str(path))


def wish(size_bytes=1000, *, timeline=1, step=5):
    return Reserve(
        header(HOME, gen=generation(timeline, step), shard_bytes=size_bytes), 0, 1, 0, ()
    )


def await_idle(made):
    with made._news:
        assert made._news.wait_for(lambda: made._wish is None, 10)


def test_the_slot_reserved_ahead_is_the_one_that_is_taken(agent):
    with reserver(agent) as made:
        made.ahead(wish(step=5))
        slot = made.take(wish(step=6))
        assert slot.region == "region1"
        assert [each.header.shard.generation.step for each in agent.asked] == [5]
        assert made.take(wish(step=7)).region == "region2"  # once only


@pytest.mark.parametrize("other", [wish(100_000), wish(timeline=2)], ids=["larger", "restarted"])
def test_a_slot_that_will_not_do_is_not_taken(agent, other):
    with reserver(agent) as made:
        made.ahead(wish())
        await_idle(made)
        assert made.take(other).header == other.header
        assert len(agent.asked) == 2


def test_who_reserves_elsewhere_waits_until_nothing_is_reserved_here(agent):
    with reserver(agent, may_answer=False) as made:
        made.ahead(wish())
        threading.Timer(0.2, agent.may_answer.set).start()
        made.settle()
        assert made._wish is None
        assert made.take(wish()).region == "region2"  # the first is not counted on any more


def test_a_smaller_shard_takes_a_larger_slot(agent):
    with reserver(agent) as made:
        made.ahead(wish(100_000))
        assert made.take(wish(1000)).region == "region1"
        assert len(agent.asked) == 1


def test_a_slot_whose_file_is_gone_is_not_taken(agent, tmp_path):
    with reserver(agent) as made:
        made.ahead(wish())
        await_idle(made)
        (tmp_path / "slot").unlink()  # as a restarted agent does
        assert made.take(wish()).region == "region2"


def test_what_went_wrong_ahead_is_tried_again_and_then_raised(agent):
    no_room = MemoryBudgetTooSmall("n0", need_bytes=2, have_bytes=1, what="a test")
    agent.answers = [no_room, no_room, Fenced(timeline=1, current=2)]
    with reserver(agent) as made:
        made.ahead(wish())
        await_idle(made)
        with pytest.raises(MemoryBudgetTooSmall):
            made.take(wish())
        with pytest.raises(Fenced):
            made.take(wish())
        assert made.take(wish()).region == "region4"


def test_a_dead_agent_is_started_again_and_asked_again(agent):
    raised = threading.Event()
    agent.answers = [AgentUnreachable("here", "refused")]
    with reserver(agent, lambda: raised.wait(10)) as made:
        with pytest.raises(AgentUnreachable, match="refused"):
            made.take(wish())
        raised.set()
        await_idle(made)
        assert made.take(wish()).region == "region2"
        assert len(agent.asked) == 2


def test_one_that_cannot_be_started_is_tried_for_until_the_end(agent):
    tried = threading.Semaphore(0)

    def revive():
        tried.release()
        raise AgentUnreachable("here", "did not come up")

    agent.answers = [AgentUnreachable("here", "refused")] * 1000
    with reserver(agent, revive) as made:
        made.ahead(wish())
        for _ in range(3):
            assert tried.acquire(timeout=10)
        with pytest.raises(AgentUnreachable):
            made.take(wish())


def test_an_agent_that_works_long_is_waited_for(agent):
    with reserver(agent, may_answer=False) as made:
        threading.Timer(0.3, agent.may_answer.set).start()
        assert made.take(wish()).region == "region1"


def test_an_agent_that_hangs_is_given_a_moment_the_second_time(agent, monkeypatch):
    agent.alive = False
    looks = []
    monkeypatch.setattr(
        reserving, "replace", lambda agent, *, timeout_s: looks.append(timeout_s) or agent
    )
    with reserver(agent, may_answer=False) as made:
        for _ in range(2):
            with pytest.raises(AgentUnreachable, match="no answer"):
                made.take(wish())
        assert looks == [reserving._SIGN_OF_LIFE_S, reserving._GLANCE_S]
        agent.may_answer.set()
        await_idle(made)
        assert made.take(wish())


def test_an_agent_that_came_back_unnoticed_is_waited_for(agent):
    back = threading.Event()
    agent.answers = [AgentUnreachable("here", "refused")]
    with reserver(agent, lambda: back.wait(10)) as made:
        made.ahead(wish())
        with made._news:
            assert made._news.wait_for(lambda: made._silent, 10)
        threading.Timer(0.2, back.set).start()
        assert made.take(wish()).region == "region2"


def test_with_a_deadline_there_is_no_slot_by_then_and_one_for_who_comes_next(agent):
    agent.alive = False  # nobody looks
    with reserver(agent, may_answer=False) as made:
        assert made.take(wish(), time.monotonic() + 0.1) is None
        assert made.waits_for == "waiting for this node's agent to make it"
        assert made.take(wish(), time.monotonic()) is None
        agent.may_answer.set()
        assert made.take(wish(), time.monotonic() + 10).region == "region1"
        assert len(agent.asked) == 1


def test_with_a_deadline_a_dead_agent_is_waited_for_and_named(agent):
    raised = threading.Event()
    agent.answers = [AgentUnreachable("here", "refused")]
    with reserver(agent, lambda: raised.wait(10)) as made:
        assert made.take(wish(), time.monotonic() + 0.1) is None
        assert "agent here: refused" in made.waits_for
        raised.set()
        assert made.take(wish(), time.monotonic() + 10).region == "region2"


def test_waiting_ends_at_its_deadline_though_the_agent_lives(agent):
    assert while_alive(agent, time.sleep, timeout_s=0.3) is False


# -- real agents ----------------------------------------------------------------------------------


@pytest.fixture
def world(cluster1: LocalCluster, monkeypatch) -> Iterator[World]:
    """A run of one rank with a committed save and a slot for the next."""
    monkeypatch.setattr(reserving, "_SIGN_OF_LIFE_S", 0.3)
    with World(cluster1) as world:
        world.restore(states_for(1, seed=0))
        assert world.save(1, states_for(1, seed=1))[0].wait(30)
        world.await_slots()
        yield world


def restored(cluster: LocalCluster, elements: int = 20_000):
    blank = states_for(1, seed=0, elements=elements)
    with World(cluster) as world:
        (found,) = world.restore(blank)
    return found.step, blank[0]


def test_a_save_needs_no_word_from_its_agent(cluster1: LocalCluster, world: World) -> None:
    (state,) = states_for(1, seed=2)
    with stopped(cluster1, "n0"):
        (handle,) = world.save(2, [state])
        assert handle.staged
        assert not handle.done
    assert handle.wait(30)
    step, found = restored(cluster1)
    assert step == 2
    assert same_state(found, state)


def test_a_slot_of_an_agent_that_was_restarted_is_not_used(
    cluster1: LocalCluster, world: World
) -> None:
    cluster1.restart("n0")
    (state,) = states_for(1, seed=5)
    assert world.save(2, [state])[0].wait(30)
    assert restored(cluster1)[0] == 2


def test_the_next_writer_takes_the_slot_of_a_dead_one_away(cluster1: LocalCluster) -> None:
    """What a trainer had reserved, and what it had put there, is nobody's when it is gone."""
    client = cluster1.client("n0")
    regions = cluster1.root("n0") / "regions"
    wished = replace(wish(), header=replace(wish().header, home="n0"))
    slot = client.call(RESERVE, wished)
    again = client.call(RESERVE, wished)
    assert [path.stem for path in regions.iterdir()] == [again.region] != [slot.region]
    client.call(STAGE, Stage(wished.header, again.region))
    client.call(FENCE, Fence("test", 2, None, ()))
    assert list(regions.iterdir()) == []
