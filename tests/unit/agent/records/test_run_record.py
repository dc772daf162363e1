"""Retention: nothing goes before something newer is committed, and never another run's."""

from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecckpt.agent.records.entry import Entry
from ecckpt.agent.records.run_record import RunRecord
from ecckpt.agent.storage.region import Region
from ecckpt.errors import Fenced, OlderStart
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import RunWriter
from ecckpt.policy.rollbacks import RollBack
from tests.support.builders import generation, header, table_of, writer_of

STEPS = [8, 9, 10, 99, 100, 999_999, 1_000_000, 10_000_000]


def enter(ledger, gen, *, rank=0, index=HOME, sealed=True):
    shard = header(index, rank=rank, gen=gen, run=ledger.run)
    region = Region(path=Path("nowhere"), size_bytes=0, view=memoryview(b""))
    entry = Entry(header=shard, region=region, table=table_of(shard) if sealed else None)
    ledger.entries[entry.key] = entry
    return entry


def ledger_with(*gens, **state):
    ledger = RunRecord(run="test", **state)
    for gen in gens:
        for index in (HOME, 2):
            enter(ledger, gen, index=index)
    return ledger


def commit(ledger, gen):
    """Commit, write that down, and tell what may go."""
    ledger.commit(gen)
    ledger.noted = ledger.notes
    return ledger.outdated()


def generations_of(entries):
    return sorted({entry.header.shard.generation for entry in entries})


# -- commit ---------------------------------------------------------------------------------------


def test_a_commit_retires_what_is_older_and_only_that():
    gens = [generation(1, step) for step in STEPS]
    for at, gen in enumerate(gens):
        assert generations_of(commit(ledger_with(*gens), gen)) == gens[:at]


def test_nothing_goes_before_a_commit():
    ledger = ledger_with(*(generation(1, step) for step in STEPS))
    assert ledger.given_up(0, []) == []
    assert ledger.abandoned() == []
    assert ledger.unfinished() == []


def test_nothing_goes_before_the_commit_is_written_down():
    ledger = ledger_with(generation(1, 8), generation(1, 9))
    ledger.commit(generation(1, 9))
    assert ledger.outdated() == []


@pytest.mark.parametrize("order", list(permutations([9, 10, 100])))
def test_commits_out_of_order_keep_the_highest_step(order):
    ledger = ledger_with(*(generation(1, step) for step in order))
    for step in order:
        for entry in commit(ledger, generation(1, step)):
            del ledger.entries[entry.key]
    assert ledger.committed == generation(1, 100)
    assert generations_of(ledger.entries.values()) == [generation(1, 100)]


def test_after_going_back_the_abandoned_tail_is_older():
    abandoned, back = generation(1, 5000), generation(2, 400)
    ledger = ledger_with(abandoned, generation(1, 300), back, fence=2)
    assert generations_of(commit(ledger, back)) == [generation(1, 300), abandoned]


def test_a_failed_save_leaves_the_committed_one_alone():
    committed, failed = generation(1, 8), generation(1, 9)
    ledger = ledger_with(committed, failed)
    ledger.commit(committed)
    assert generations_of(ledger.given_up(0, {committed, failed})) == [failed]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=12))
def test_whatever_the_order_of_commits_the_newest_committed_stays(order):
    gens = sorted({generation(*each) for each in order})
    ledger = ledger_with(*gens)
    for each in order:
        for entry in commit(ledger, generation(*each)):
            assert entry.header.shard.generation < ledger.committed
            ledger.entries.pop(entry.key)
    assert ledger.committed == gens[-1]
    assert generations_of(ledger.entries.values()) == [gens[-1]]


# -- giving up ------------------------------------------------------------------------------------


def test_a_rank_gives_up_its_own_shards_only():
    gen = generation(1, 9)
    ledger = RunRecord(run="test")
    mine, copy = enter(ledger, gen, rank=3), enter(ledger, gen, rank=3, index=1)
    enter(ledger, gen, rank=4)
    enter(ledger, generation(1, 10), rank=3)
    assert ledger.given_up(3, {gen}) == [mine, copy]


def test_giving_up_in_another_session_touches_nothing():
    ledger = ledger_with(generation(1, 9))
    assert ledger.given_up(0, {generation(1, 9, "f" * 16)}) == []


def test_slots_that_nobody_sealed_or_works_on_are_unfinished():
    ledger = RunRecord(run="test")
    sealed = enter(ledger, generation(1, 8), rank=0)
    gone = enter(ledger, generation(1, 9), rank=0, sealed=False)
    other = enter(ledger, generation(1, 9), rank=1, sealed=False)
    busy = enter(ledger, generation(1, 9), rank=2, sealed=False)
    busy.pins = 1
    enter(ledger, generation(1, 9), rank=2, index=1, sealed=False)
    assert ledger.unfinished() == [gone, other]
    assert ledger.unfinished(rank=1) == [other]
    assert ledger.unfinished(rank=2) == []
    assert sealed not in ledger.unfinished(rank=0)


# -- timelines ------------------------------------------------------------------------------------


def test_an_older_writer_is_fenced_off_with_both_numbers():
    ledger = RunRecord(run="test", fence=3)
    with pytest.raises(Fenced, match="timeline 2 is fenced off: timeline 3") as caught:
        ledger.admit(writer_of(2))
    assert (caught.value.timeline, caught.value.current) == (2, 3)
    assert ledger.fence == 3


def test_the_first_writer_of_a_newer_timeline_is_news():
    ledger = RunRecord(run="test", fence=3)
    assert [ledger.admit(writer_of(writer)) for writer in (3, 4, 4, 7)] == [
        False,
        True,
        False,
        True,
    ]
    assert ledger.fence == 7


def test_of_two_starts_at_most_one_begins_a_timeline():
    ledger = RunRecord(run="test", fence=3)
    assert ledger.begin_timeline(RunWriter(4, "one"), 0.0)
    assert not ledger.begin_timeline(RunWriter(4, "one"), 0.0)  # asked again
    with pytest.raises(Fenced, match="timeline 4 is fenced off: timeline 4"):
        ledger.begin_timeline(RunWriter(4, "two"), 0.0)
    assert ledger.begin_timeline(RunWriter(5, "two"), 0.0)
    with pytest.raises(Fenced):
        ledger.begin_timeline(RunWriter(4, "one"), 0.0)
    assert ledger.reach(6)  # by a file that was found: whose it is this node does not know
    assert not ledger.begin_timeline(RunWriter(6, "one"), 0.0)
    with pytest.raises(Fenced):
        ledger.begin_timeline(RunWriter(6, "two"), 0.0)


def test_a_start_that_is_older_than_the_one_that_began_is_refused():
    ledger = RunRecord(run="test", fence=3)
    ledger.begin_timeline(RunWriter(4, "new"), 100.0)
    with pytest.raises(OlderStart, match="younger than this one began timeline 4"):
        ledger.begin_timeline(RunWriter(5, "old"), 99.0)
    assert ledger.fence == 4
    ledger.begin_timeline(RunWriter(4, "new"), 99.5)  # the first time its message took longer
    with pytest.raises(OlderStart):
        ledger.begin_timeline(RunWriter(5, "old"), 99.0)
    assert ledger.begin_timeline(RunWriter(5, "younger"), 99.8)
    ledger.admit(RunWriter(6, "unknown"))  # when that was started this node does not know
    assert ledger.begin_timeline(RunWriter(7, "old"), 99.0)


def test_a_start_may_be_older_than_the_host_of_an_agent_is_up():
    ledger = RunRecord(run="test", fence=3)
    assert ledger.begin_timeline(RunWriter(4, "one"), -300.0)
    with pytest.raises(OlderStart):
        ledger.begin_timeline(RunWriter(5, "two"), -400.0)
    assert ledger.begin_timeline(RunWriter(5, "three"), -200.0)


def test_of_two_sessions_on_one_timeline_a_node_hears_one():
    ledger = RunRecord(run="test", fence=3)
    ledger.begin_timeline(RunWriter(4, "one"), 0.0)
    for writer in (RunWriter(4, "two"), RunWriter(3, "one")):
        with pytest.raises(Fenced):
            ledger.admit(writer)
    assert not ledger.admit(RunWriter(4, "one"))
    assert not ledger.admit(RunWriter(4, ""))  # a repair by hand names no session, and is admitted
    with pytest.raises(Fenced):
        ledger.commit(generation(4, 9, "2" * 16))


def test_nothing_is_outdated_while_a_restart_chooses():
    older, newer = generation(1, 8), generation(1, 9)
    ledger = ledger_with(older, newer)
    ledger.begin_timeline(RunWriter(2, "one"), 0.0)
    ledger.committed = newer  # this node hears of it only now
    ledger.noted = ledger.notes
    assert ledger.outdated() == []
    ledger.went_on_from(older)
    assert ledger.outdated() == []
    ledger.went_on_from(newer)
    assert generations_of(ledger.outdated()) == [older]


def test_a_save_tells_what_its_timeline_goes_on_from():
    point, tail, own = generation(1, 300), generation(1, 400), generation(2, 301)
    ledger = ledger_with(point, tail, fence=2)
    ledger.learn_from(header(parent=generation(1, 100), gen=generation(1, 300)))  # protected again
    ledger.learn_from(header(gen=own))
    assert ledger.abandoned() == []
    ledger.learn_from(header(parent=point, gen=own))
    assert generations_of(ledger.abandoned()) == [tail]


def test_a_commit_of_a_fenced_writer_changes_nothing():
    ledger = ledger_with(generation(1, 8), generation(1, 9), generation(2, 7), fence=2)
    with pytest.raises(Fenced):
        ledger.commit(generation(1, 9))
    assert ledger.committed is None


def test_a_late_commit_of_an_older_generation_changes_nothing():
    ledger = ledger_with(generation(1, 9), generation(1, 10))
    ledger.commit(generation(1, 10))
    assert generations_of(commit(ledger, generation(1, 8))) == [generation(1, 9)]
    assert ledger.committed == generation(1, 10)


def test_only_the_tail_beyond_the_restored_point_is_abandoned():
    before, point, tail = (generation(1, step) for step in (200, 300, 5000))
    ledger = ledger_with(
        before, point, tail, generation(2, 301), fence=2, restored=point, restored_by=2
    )
    assert generations_of(ledger.abandoned()) == [tail]
    ledger.committed = tail  # never, whatever else is known of it
    assert ledger.abandoned() == []


def test_nothing_is_abandoned_before_the_restored_point_is_known():
    assert ledger_with(generation(1, 5000), fence=2).abandoned() == []


def test_the_committed_one_is_abandoned_only_by_going_back_before_it_on_purpose():
    point, tail = generation(1, 300), generation(1, 5000)
    ledger = ledger_with(point, tail, fence=2, restored=point, restored_by=2, committed=tail)
    assert ledger.abandoned() == []
    ledger.learn_roll_backs([RollBack(2, point)])
    assert generations_of(ledger.abandoned()) == [tail]
    assert ledger.inventory("n1").roll_backs == (RollBack(2, point),)


def test_what_older_timelines_left_goes_but_not_what_the_run_stands_on():
    committed, failed, point, tail = (generation(1, step) for step in (100, 200, 300, 400))
    own = generation(2, 301)
    ledger = ledger_with(committed, failed, point, tail, own, fence=2, committed=committed)
    assert ledger.leftover() == []  # where the run went back to is not known
    ledger.went_on_from(point)
    assert generations_of(ledger.leftover()) == [failed, tail]
    assert ledger.admit(writer_of(3))
    assert ledger.leftover() == []  # that was another restart


# -- inventory ------------------------------------------------------------------------------------


def test_an_inventory_lists_what_is_sealed():
    ledger = ledger_with(generation(1, 8), fence=4, rejected={"x.region": "cut off"})
    ledger.commit(generation(5, 8))
    enter(ledger, generation(1, 9), sealed=False)
    found = ledger.inventory("n1")
    assert [each.index for each in found.headers] == [HOME, 2]
    assert (found.node, found.fence, found.committed) == ("n1", 4, generation(5, 8))
    assert found.rejected == {"x.region": "cut off"}
    assert ledger.find(next(iter(found.headers)).shard, 2) is not None
    assert ledger.find(next(iter(found.headers)).shard, 1) is None
