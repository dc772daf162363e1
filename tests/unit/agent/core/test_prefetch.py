"""Fragments that are pulled before anybody asks to hold them: an optimisation, never a promise."""

from dataclasses import replace

import numpy as np
import pytest

from ecckpt.agent.core import actions as act
from ecckpt.agent.core import prefetch as room
from ecckpt.errors import EcckptError, Fenced, InvalidMessage, MemoryBudgetTooSmall, NotHeld
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import RunWriter
from ecckpt.protocol.messages.restore import Fence, Forget
from ecckpt.protocol.messages.save import Prefetch
from tests.support.builders import generation, header, table_of, writer_of
from tests.support.hands import NEW, OLD, Hands, commit, hold, protect, reserve, stage, state

LARGE = {"shard_bytes": 100_000, "block_bytes": 4096}
ROWS = header(**LARGE).rows
FULL = MemoryBudgetTooSmall("n1", need_bytes=2, have_bytes=1, what="it")


@pytest.fixture
def hands():
    hands = Hands(early_bytes=0)
    hands.spares = 100
    return hands


def prefetch(index=2, *, writer=1, discard=(), timeout_s=60.0, **fields):
    return Prefetch(
        header=header(index, **LARGE | {"gen": NEW} | fields),
        writer=writer_of(writer),
        source="n0:1",
        timeout_s=timeout_s,
        discard=discard,
    )


def ask(index=2, **fields):
    return hold(index, **LARGE | fields)


def kinds(hands):
    return [type(each) for each in hands.todo]


def fetched(hands, message=None):
    """A fragment that is here before anybody asked to hold it."""
    hands.ask(message or prefetch())
    hands.end(act.Pull, 0)


def held(hands):
    """What the home is told; nothing is left of the work."""
    problem = hands.end(act.Post).message.problem
    assert not hands.todo
    assert not kept(hands)
    return problem


def kept(hands):
    """What is still there without being asked for."""
    prefetcher = hands.core._holder.prefetcher
    return [*prefetcher._takings, *prefetcher._waiting, *prefetcher._pulling]


def all_given_back(hands):
    gone = hands.took(act.Recycle) + hands.took(act.Discard)
    return sorted(int(each.region.name) for each in gone) == list(range(1, hands.regions + 1))


# -- the home -------------------------------------------------------------------------------------


def announced(hands):
    return [each for each in hands.todo if isinstance(each, act.Announce)]


def test_holders_of_data_are_told_when_encoding_begins(hands):
    stage(hands)
    hands.ask(protect())
    assert not announced(hands)
    hands.end(act.Allocate)
    assert kinds(hands) == [act.Encode, act.Announce, act.Announce, act.Announce]
    assert [each.message.header.index for each in announced(hands)] == [0, 1, 2]
    assert {each.address for each in announced(hands)} == {"h0:1", "h1:1", "h2:1"}
    for _ in range(2):
        hands.end(act.Announce, error=EcckptError("lost"))
    hands.end(act.Announce)
    assert state(hands).state == "encoding"
    assert not state(hands).problems


def test_what_is_small_or_sealed_is_not_announced():
    hands = Hands(early_bytes=header(gen=NEW).fragment_bytes + 1)
    stage(hands)
    hands.ask(protect())
    hands.end(act.Allocate)
    assert kinds(hands) == [act.Encode]
    hands = Hands(early_bytes=0)
    stage(hands)
    hands.ask(protect(targets=(), least=0))
    hands.end(act.Allocate)
    hands.end(act.Encode, table_of(header()))
    hands.ask(protect())  # parity has to be made again
    hands.end(act.Allocate)
    assert kinds(hands) == [act.Encode]


def test_data_can_be_had_while_it_is_encoded_by_name_only(hands):
    records, shard = hands.core.records, header(gen=NEW).shard

    def can_be_had(index, *, early):
        try:
            records.locate(shard, index, early=early)
        except NotHeld:
            return False
        return True

    stage(hands)
    assert not can_be_had(0, early=True)
    hands.ask(protect())
    hands.end(act.Allocate)
    assert can_be_had(0, early=True)
    assert not can_be_had(0, early=False)
    assert not can_be_had(3, early=True)  # parity
    assert not can_be_had(HOME, early=True)
    with pytest.raises(NotHeld):
        records.locate_shard(shard)
    hands.end(act.Encode, error=EcckptError("out of memory"))
    assert not can_be_had(0, early=True)
    hands.ask(protect())
    hands.end(act.Allocate)
    hands.end(act.Encode, table_of(header()))
    assert can_be_had(0, early=True)
    assert can_be_had(0, early=False)


# -- the holder -----------------------------------------------------------------------------------


def test_what_is_here_is_sealed_when_it_is_asked_for(hands):
    fetched(hands)
    assert hands.held() == []
    assert hands.core._holder.coming(header(gen=NEW).shard) == []
    assert not hands.took(act.Seal)
    hands.ask(ask())
    assert kinds(hands) == [act.Post]  # no second region, no second pull
    assert len(hands.took(act.Seal)) == 1
    assert held(hands) == ""
    assert hands.regions == 1
    assert hands.held() == [(NEW, 0, 2)]


def test_it_may_be_asked_for_while_it_is_on_its_way(hands):
    hands.ask(prefetch())
    hands.ask(ask())
    assert hands.core._holder.coming(header(gen=NEW).shard) == [2]
    assert kinds(hands) == [act.Pull]
    hands.end(act.Pull, 0)
    assert held(hands) == ""
    assert hands.regions == 1


@pytest.mark.parametrize("asked", [False, True], ids=["asked after", "asked before"])
def test_one_that_fails_is_pulled_as_ever(hands, asked):
    hands.ask(prefetch())
    if asked:
        hands.ask(ask())
    hands.end(act.Pull, error=EcckptError("404"))
    if not asked:
        assert all_given_back(hands)
        hands.ask(ask())
        hands.end(act.Allocate)
    hands.end(act.Pull, 1)
    hands.end(act.Pull, 0)
    assert held(hands) == ""


@pytest.mark.parametrize("asked", [False, True], ids=["asked after", "asked before"])
def test_without_spare_memory_nothing_is_pulled(hands, asked):
    hands.spares = 0
    hands.ask(prefetch())
    if asked:
        hands.ask(ask())
    hands.end(act.Pull, error=NotHeld("no memory"))
    if not asked:
        assert not kept(hands)
        hands.ask(ask())
    hands.end(act.Allocate)
    hands.end(act.Pull, 0)
    assert held(hands) == ""


def test_only_blocks_that_differ_are_pulled_again_and_the_table_decides(hands):
    hands.ask(prefetch())
    hands.end(act.Pull, 2)  # they changed before they were encoded, or after
    hands.ask(ask())
    (pull,) = hands.todo
    assert np.flatnonzero(pull.taking.lacking()).tolist() == [0, 1]
    hands.end(act.Pull, 1)
    assert np.flatnonzero(pull.taking.lacking()).tolist() == [0]
    hands.end(act.Pull, 1)
    assert f"1 of {ROWS} blocks fail" in held(hands)
    assert hands.held() == []
    assert all_given_back(hands)


def test_another_shard_of_that_name_is_pulled_whole(hands):
    fetched(hands)
    hands.ask(ask(created_unix_s=1))
    hands.end(act.Allocate)
    hands.end(act.Pull, 0)
    assert hands.end(act.Post).message.problem == ""
    assert hands.regions == 2
    hands.ask(commit(NEW))
    assert not kept(hands)
    assert [each.region.name for each in hands.took(act.Recycle)] == ["1"]


def test_what_comes_after_it_was_asked_for_changes_nothing(hands):
    hands.ask(ask())
    hands.ask(prefetch())
    hands.end(act.Allocate)
    hands.ask(prefetch())
    hands.end(act.Pull, 0)
    hands.ask(prefetch())
    assert held(hands) == ""
    fetched(hands, prefetch(gen=generation(1, 11)))
    hands.ask(prefetch(gen=generation(1, 11)))  # twice
    assert not hands.todo


def test_it_waits_for_its_turn_and_keeps_nobody(hands):
    for rank in range(4):
        hands.ask(prefetch(rank=rank))
    assert kinds(hands) == [act.Pull] * room.PREFETCHES
    for rank in range(10, 14):
        hands.ask(ask(rank=rank))
    assert sum(kind is act.Allocate for kind in kinds(hands)) == 4
    hands.ask(ask(rank=3))  # was waiting both times
    hands.end(act.Pull, 0)
    assert sum(kind is act.Pull for kind in kinds(hands)) == room.PREFETCHES
    assert len(hands.core._holder.prefetcher._waiting) == 0


def test_a_full_queue_takes_no_more(hands, monkeypatch):
    monkeypatch.setattr(room, "_QUEUE_LIMIT", 1)
    for rank in range(4):
        hands.ask(prefetch(rank=rank))
    assert len(hands.core._holder.prefetcher._takings) == room.PREFETCHES + 1


def test_what_makes_no_sense_is_refused(hands):
    for index in (HOME, 3):
        with pytest.raises(InvalidMessage, match="only data fragments exist"):
            hands.tell(prefetch(index))
    hands.ask(Fence("test", writer_of(2), None, ()))
    with pytest.raises(Fenced):
        hands.tell(prefetch())
    assert not hands.todo
    assert not kept(hands)


# -- what nobody asks for -------------------------------------------------------------------------


def forget(hands):
    hands.ask(Forget("test", RunWriter(2, "0" * 16)))


def passes(hands):
    (wake,) = hands.took(act.Wake)
    assert wake.at_s == 160.0
    hands.tell(act.Due(wake.task))


ENDS = {
    "deadline": passes,
    "commit": lambda hands: hands.ask(commit(NEW)),
    "newer commit": lambda hands: hands.ask(commit(generation(1, 11))),
    "fence": lambda hands: hands.ask(Fence("test", writer_of(2), None, ())),
    "forget": forget,
    "given up": lambda hands: hands.ask(
        prefetch(index=0, gen=generation(1, 11), discard=(NEW,), rank=0)
    ),
    "newer hold": lambda hands: hands.ask(ask(index=0, gen=generation(1, 11))),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("pulling", [False, True], ids=["here", "on its way"])
def test_it_goes_and_leaves_nothing(hands, end, pulling):
    if pulling:
        hands.ask(prefetch())
    else:
        fetched(hands)
    mine = hands.regions
    end(hands)
    if pulling:
        pull = hands.next(act.Pull)
        assert pull.taking.dropped
        if end is not forget:
            assert not hands.took(act.Recycle)  # somebody writes to it
        hands.tell(act.Finished(pull, hands.sums(pull.taking, 0)))
    gone = [*hands.took(act.Recycle), *hands.took(act.Discard)]
    assert [each.region.name for each in gone] == [str(mine)]
    assert (header(gen=NEW).shard, 2) not in kept(hands)
    assert hands.held() == []


def test_the_deadline_of_what_was_asked_for_means_nothing(hands):
    fetched(hands)
    hands.ask(ask())
    (wake,) = hands.took(act.Wake)
    hands.tell(act.Due(wake.task))
    assert hands.held() == [(NEW, 0, 2)]
    assert not hands.took(act.Recycle)


def test_other_ranks_and_runs_keep_theirs(hands):
    fetched(hands, prefetch(rank=1))
    fetched(hands, prefetch(run="other"))
    hands.ask(prefetch(gen=generation(1, 11)))
    hands.ask(Fence("third", writer_of(5), None, ()))
    hands.ask(commit(OLD))
    assert len(kept(hands)) == 4  # the third is on its way, and counts twice


def test_whoever_needs_the_room_goes_first(hands):
    fetched(hands, prefetch(rank=1))
    hands.ask(prefetch(rank=2))
    hands.tell(reserve())
    hands.end(act.Allocate, error=FULL)
    assert [each.region.name for each in hands.took(act.Recycle)] == ["1"]
    assert [each.region.name for each in hands.took(act.Discard)] == ["2"]  # free at once
    hands.end(act.Allocate)
    assert isinstance(hands.answers.pop(), act.Reply)
    hands.end(act.Pull, 0)
    assert not hands.took(act.Recycle)
    assert not kept(hands)


def test_room_is_made_of_that_run_where_its_budget_is_the_limit(hands):
    fetched(hands, prefetch(run="other"))
    hands.tell(reserve())
    hands.end(act.Allocate, error=FULL)
    assert isinstance(hands.answers.pop(), act.Refuse)
    assert len(kept(hands)) == 1


def test_a_writer_fenced_after_it_was_asked_for_is_not_kept(hands):
    hands.ask(prefetch())
    hands.ask(ask())
    hands.ask(Fence("test", writer_of(2), None, ()))
    hands.end(act.Pull, 0)
    assert "fenced off" in held(hands)
    assert hands.held() == []
    assert all_given_back(hands)


def test_a_fragment_that_came_another_way_ends_it(hands):
    hands.ask(prefetch())
    hands.ask(ask())
    hands.ask(replace(ask(), source="n0:2"))  # a home that was restarted: it pulls it itself
    hands.end(act.Allocate)
    late = hands.next(act.Pull)
    hands.end(act.Pull, 0)
    assert hands.end(act.Post).message.problem == ""
    hands.tell(act.Finished(late, hands.sums(late.taking, 0)))
    assert hands.held() == [(NEW, 0, 2)]
    assert len(hands.took(act.Recycle)) == 1
    assert held(hands) == ""


def test_a_repair_of_what_is_outdated_ends_it_at_once(hands):
    hands.ask(prefetch(gen=OLD))
    for rank in range(10, 14):
        hands.ask(ask(rank=rank))  # all places are taken
    hands.ask(ask(gen=OLD, repair=True))
    hands.ask(commit(NEW))
    early = hands.next(act.Pull)
    hands.end(act.Allocate, error=EcckptError("no"))
    assert early.taking.dropped
    assert [each.region.name for each in hands.took(act.Discard)] == ["1"]
    hands.tell(act.Finished(early, hands.sums(early.taking, 0)))
    assert not hands.took(act.Recycle)
    assert not kept(hands)
