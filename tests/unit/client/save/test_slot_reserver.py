"""A client reserves the slot of its next save ahead, so that no hung agent delays the save."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ecckpt.client import deadlines
from ecckpt.client.effects import PingAgent, ReviveAgent, until
from ecckpt.client.save.slot_reserver import SlotReserver, while_alive
from ecckpt.client.state_effects import MapSlot, SlotExists
from ecckpt.errors import AgentUnreachable, CorruptFragment, Fenced, MemoryBudgetTooSmall
from ecckpt.format.fragment_file import HOME
from ecckpt.protocol.messages.restore import Fence
from ecckpt.protocol.messages.save import Reserve, Slot, Stage
from ecckpt.protocol.verbs import FENCE, RESERVE, STAGE
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import generation, header, writer_of
from tests.support.performers import Choose, Performer, drive, explore
from tests.support.worlds import World, same_state, states_for, stopped

REFUSED = AgentUnreachable("here", "refused")


@pytest.fixture(autouse=True)
def _quiet(caplog) -> None:
    caplog.set_level(logging.CRITICAL)


# -- the routines alone ---------------------------------------------------------------------------


class Client(Performer):
    """Its agent answers in turn, each time with a slot or an error."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.reserver = SlotReserver()
        self.errors = list(errors)
        self.may_answer = True
        self.answers[RESERVE] = self._reserve
        self.gates[RESERVE] = lambda effect: self.may_answer
        self.gates[PingAgent] = lambda effect: self.is_alive
        self.is_alive = True

    def _reserve(self, effect: Any) -> Slot:
        if self.errors:
            raise self.errors.pop(0)
        wish, count = effect.message, len(self.asked())
        return Slot(
            path="path",
            region=f"region{count}",
            use=1,
            file_bytes=wish.header.file_bytes,
            payload_offset=4096,
            header=wish.header,
        )

    def asked(self) -> list[int]:
        """The steps for which a slot was asked for."""
        return [each.message.header.shard.generation.step for each in self.calls(RESERVE)]

    def ahead(self, wish: Reserve) -> None:
        self.run(self.reserver.ahead(wish))

    def take(self, wish: Reserve, deadline_s: float = math.inf) -> Slot | None:
        return self.run(self.reserver.take(wish, deadline_s))

    def await_idle(self) -> None:
        assert self.run(until(lambda: self.reserver.is_idle, 100))

    def pings(self) -> list[float]:
        return [each.patience_s for each in self.done if isinstance(each, PingAgent)]

    def count(self, kind: type) -> int:
        return sum(isinstance(each, kind) for each in self.done)


def wish(size_bytes=1000, *, timeline=1, step=5):
    return Reserve(
        header=header(HOME, gen=generation(timeline, step), shard_bytes=size_bytes),
        memory_bytes=0,
        local_ranks=1,
        holders=0,
        discard=(),
    )


def test_the_slot_reserved_ahead_is_the_one_that_is_taken():
    client = Client()
    client.ahead(wish(step=5))
    client.await_idle()
    slot = client.take(wish(step=6))
    assert slot.region == "region1"
    assert client.asked() == [5]
    assert client.count(MapSlot) == 1
    assert client.take(wish(step=7)).region == "region2"  # once only


@pytest.mark.parametrize("other", [wish(100_000), wish(timeline=2)], ids=["larger", "restarted"])
def test_a_slot_that_will_not_do_is_not_taken(other):
    client = Client()
    client.ahead(wish())
    client.await_idle()
    assert client.take(other).header == other.header
    assert len(client.asked()) == 2


def test_who_reserves_elsewhere_waits_until_nothing_is_reserved_here():
    client = Client()
    client.may_answer = False
    client.ahead(wish())
    settling = client.begin(client.reserver.settle())
    began_s = client.now_s
    drive([client], lambda: client.now_s > began_s + 1)
    assert not settling.ended
    client.may_answer = True
    drive([client], lambda: settling.ended)
    assert settling.result() is None
    assert client.reserver.is_idle
    assert client.take(wish()).region == "region2"  # the first is not counted on any more


def test_a_smaller_shard_takes_a_larger_slot():
    client = Client()
    client.ahead(wish(100_000))
    assert client.take(wish(1000)).region == "region1"
    assert len(client.asked()) == 1


def test_a_slot_whose_file_is_gone_is_not_taken():
    client = Client()
    client.ahead(wish())
    client.await_idle()
    client.on[SlotExists] = lambda effect: False  # as a restarted agent leaves it
    assert client.take(wish()).region == "region2"


def test_what_went_wrong_ahead_is_tried_again_and_then_raised():
    no_room = MemoryBudgetTooSmall("n0", need_bytes=2, have_bytes=1, what="a test")
    client = Client(no_room, no_room, Fenced(timeline=1, current=2))
    client.ahead(wish())
    client.await_idle()
    with pytest.raises(MemoryBudgetTooSmall):
        client.take(wish())
    with pytest.raises(Fenced):
        client.take(wish())
    assert client.take(wish()).region == "region4"
    assert "no slot for the next save" in client.log()[0]


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), CorruptFragment("too short")])
def test_a_slot_that_cannot_be_mapped_is_none(error):
    client = Client()
    client.on[MapSlot] = [error, None]
    with pytest.raises(type(error)):
        client.take(wish())
    assert client.take(wish()).region == "region2"


def test_a_dead_agent_is_started_again_and_asked_again():
    client, may_come = Client(REFUSED), []
    client.gates[ReviveAgent] = lambda effect: bool(may_come)
    with pytest.raises(AgentUnreachable, match="refused"):
        client.take(wish())
    may_come.append(True)
    client.await_idle()
    assert client.take(wish()).region == "region2"
    assert len(client.asked()) == 2


def test_one_that_cannot_be_started_is_tried_for_until_the_end():
    client = Client(*[REFUSED] * 100)
    client.on[ReviveAgent] = AgentUnreachable("here", "did not come up")
    client.ahead(wish())
    began_s = client.now_s
    drive([client], lambda: client.count(ReviveAgent) == 3)
    assert client.now_s - began_s >= 2 * deadlines.REVIVE_AGAIN_S
    with pytest.raises(AgentUnreachable):
        client.take(wish())
    client.reserver.close()
    drive([client], lambda: not client.running)
    assert client.log()[0] == "this node's agent: agent here: did not come up"


def test_a_client_that_closes_starts_no_agent():
    client = Client(REFUSED)
    client.may_answer = False
    client.ahead(wish())
    client.reserver.close()
    client.may_answer = True
    drive([client], lambda: not client.running)
    assert client.asked() == [5]
    assert client.count(ReviveAgent) == 0


def test_an_agent_that_works_long_is_waited_for():
    client = Client()
    client.may_answer = False
    taking = client.begin(client.reserver.take(wish(), math.inf))
    began_s = client.now_s
    drive([client], lambda: client.now_s > began_s + 9)
    first, later = deadlines.FIRST_PING_AFTER_S, deadlines.LATER_PINGS_AFTER_S
    assert len(client.pings()) == 1 + int((9 - first) / later)
    assert set(client.pings()) == {deadlines.PING_S}
    client.may_answer = True
    drive([client], lambda: taking.ended)
    assert taking.result().region == "region1"


def test_an_agent_that_hangs_is_given_a_moment_the_second_time():
    client = Client()
    client.is_alive = client.may_answer = False
    for _ in range(2):
        began_s = client.now_s
        with pytest.raises(AgentUnreachable, match="no answer"):
            client.take(wish())
    assert client.now_s - began_s < 0.1
    assert client.pings() == [deadlines.PING_S, deadlines.GLANCE_S]
    client.is_alive = client.may_answer = True
    client.await_idle()
    assert client.take(wish())


def test_an_agent_that_came_back_unnoticed_is_waited_for():
    client, may_come = Client(REFUSED), []
    client.gates[ReviveAgent] = lambda effect: bool(may_come)
    client.ahead(wish())
    drive([client], lambda: isinstance(client.running[0].effect, ReviveAgent))
    taking = client.begin(client.reserver.take(wish(), math.inf))
    drive([client], lambda: client.pings() == [deadlines.GLANCE_S])
    may_come.append(True)
    drive([client], lambda: taking.ended)
    assert taking.result().region == "region2"


def test_with_a_deadline_there_is_no_slot_by_then_and_one_for_who_comes_next():
    client = Client()
    client.is_alive = client.may_answer = False  # no call would be answered
    assert client.take(wish(), client.now_s + 0.1) is None
    assert client.reserver.waits_for == "waiting for this node's agent to make it"
    assert client.take(wish(), client.now_s) is None
    client.may_answer = True
    assert client.take(wish(), client.now_s + 10).region == "region1"
    assert (len(client.asked()), client.pings()) == (1, [])


def test_with_a_deadline_a_dead_agent_is_waited_for_and_named():
    client, may_come = Client(REFUSED), []
    client.gates[ReviveAgent] = lambda effect: bool(may_come)
    assert client.take(wish(), client.now_s + 0.1) is None
    assert "agent here: refused" in client.reserver.waits_for
    may_come.append(True)
    assert client.take(wish(), client.now_s + 10).region == "region2"


def test_waiting_ends_at_its_deadline_though_the_agent_lives():
    client = Client()
    began_s = client.now_s

    def never(wait_s: float) -> Any:
        return (yield from until(lambda: False, wait_s))

    assert client.run(while_alive(never, timeout_s=5.0)) is False
    assert client.now_s - began_s == pytest.approx(5.0)


def test_in_any_order_the_one_who_takes_has_a_slot_that_fits():
    """A slot is reserved ahead, another wish comes, and a save takes one meanwhile."""

    def play(choose: Choose) -> None:
        client = Client()
        client.ahead(wish(1000, step=5))
        other = client.begin(client.reserver.ahead(wish(100_000, step=6)))
        taking = client.begin(client.reserver.take(wish(50_000, step=7), math.inf))
        drive([client], lambda: taking.ended and other.ended and not client.running, choose)
        slot = taking.result()
        assert slot is not None
        assert slot.file_bytes >= wish(50_000).header.file_bytes
        assert client.reserver.is_idle

    assert explore(play) > 10


# -- real agents ----------------------------------------------------------------------------------


@pytest.fixture
def world(cluster1: LocalCluster, monkeypatch) -> Iterator[World]:
    """A run of one rank with a committed save and a slot for the next."""
    monkeypatch.setattr(deadlines, "PING_S", 0.3)
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
    """The agent frees a dead trainer's slot at the next reserve, and staged bytes at a fence."""
    client = cluster1.client("n0")
    regions = cluster1.root("n0") / "regions"
    wished = replace(wish(), header=replace(wish().header, home="n0"))
    slot = client.call(RESERVE, wished)
    again = client.call(RESERVE, wished)
    assert [path.stem for path in regions.iterdir()] == [again.region] != [slot.region]
    client.call(STAGE, Stage(wished.header, again.region))
    client.call(FENCE, Fence("test", writer_of(2), None, ()))
    assert list(regions.iterdir()) == []
