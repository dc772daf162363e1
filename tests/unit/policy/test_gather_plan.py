"""Which blocks are pulled from where, and which are computed: the plan, and its performer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import AgentUnreachable, NotHeld, TooFewFragments, TooSlow
from ecckpt.policy.gather_plan import BlockPull, GatherPlan, whole_shard
from ecckpt.protocol.gather import Gatherer, find_table, rebuild
from tests.support.builders import header

BAD = [(0, 0)]


def plan_for(*sources, wanted=None):
    """Of RS(3, 2), one row; ``sources`` are (index, addresses)."""
    head = header()
    return GatherPlan(head, whole_shard(head) if wanted is None else wanted, dict(sources))


def begin(plan):
    """What is pulled next, as (index, source)."""
    return [(each.index, each.source) for each in plan.next()]


def end(plan, index, *, bad=(), error=None, took_s=0.1):
    """A pull that is in flight has ended."""
    pull = plan._in_flight[index]
    if error is None:
        for rows in pull.rows:
            plan.prove(pull, rows, bad)
    plan.finish(pull, took_s, error)
    return pull


def five(**fields):
    return plan_for(*((index, (f"n{index}",)) for index in range(5)), **fields)


def gone(source):
    return AgentUnreachable(source, "gone")


def slow(source):
    return TooSlow(source, done_bytes=1, size_bytes=2)


def test_the_shards_own_bytes_come_first_and_suffice():
    plan = five()
    assert begin(plan) == [(0, "n0"), (1, "n1"), (2, "n2")]
    for index in range(3):
        end(plan, index)
        assert begin(plan) == []
    assert plan.rebuilds() == []


def test_what_is_damaged_is_replaced_by_as_many_others_at_once():
    plan = five()
    begin(plan)
    end(plan, 1, bad=BAD)
    assert begin(plan) == [(3, "n3")]  # while 0 and 2 are in flight
    for index in (0, 2, 3):
        end(plan, index)
        assert begin(plan) == []
    (made,) = plan.rebuilds()
    assert (made.rows, made.missing, made.present) == (slice(0, 1), [1], [0, 2, 3])
    assert plan.problems == ["block 0 of fragment 1 at n1 is bad"]


def test_another_source_of_a_fragment_comes_before_a_second_try():
    plan = plan_for((0, ("a", "b")), (1, ("c",)), (2, ("d",)))
    begin(plan)
    end(plan, 1)
    end(plan, 2)
    end(plan, 0, bad=BAD)
    assert begin(plan) == [(0, "b")]
    assert not end(plan, 0, bad=BAD).again
    assert begin(plan) == [(0, "a")]
    assert end(plan, 0).again  # what has rotted in memory may be right on disk
    assert begin(plan) == []


def test_after_the_second_try_of_all_it_says_how_many_are_good():
    plan = plan_for((0, ("a",)), (1, ("b",)), (2, ("c",)))
    for _ in range(2):
        for index, _ in begin(plan):
            end(plan, index, bad=BAD if index == 1 else ())
    with pytest.raises(TooFewFragments, match="2 good fragments, 3 needed; block 0 of fragment 1"):
        plan.next()


def test_what_no_source_has_is_not_waited_for():
    assert begin(plan_for((0, ("a",)), (3, ("d",)), (4, ("e",)))) == [(0, "a"), (3, "d"), (4, "e")]
    some = plan_for((0, ("a",)), (2, ("c",)), (3, ("d",)), (4, ("e",)))
    assert begin(some) == [(0, "a"), (2, "c"), (3, "d")]


def test_of_a_range_only_its_own_blocks_are_pulled_and_others_where_one_is_lost():
    wanted = np.array([[False], [True], [False]])
    plan = five(wanted=wanted)
    assert begin(plan) == [(1, "n1")]
    end(plan, 1, error=NotHeld("gone"))
    assert begin(plan) == [(0, "n0"), (2, "n2"), (3, "n3")]
    for index in (0, 2, 3):
        end(plan, index)
    assert begin(plan) == []
    assert [each.missing for each in plan.rebuilds()] == [[1]]


def test_each_row_gets_what_it_lacks():
    head = header(shard_bytes=3 * 4096 * 4, block_bytes=4096)
    plan = GatherPlan(head, whole_shard(head), {index: (f"n{index}",) for index in range(5)})
    assert len(plan.next()) == 3
    end(plan, 0, bad=[(0, 1)])
    assert [(each.index, each.rows) for each in plan.next()] == [(3, (slice(1, 2),))]
    end(plan, 1, bad=[(0, 1), (0, 2)])
    assert [(each.index, each.rows) for each in plan.next()] == [(4, (slice(1, 3),))]


def test_a_source_that_gave_some_rows_may_be_asked_for_others():
    head = header(shard_bytes=8192, block_bytes=1280, k=2, m=1)
    assert head.rows == 4
    wanted = np.array([[True] * 4, [True, True, False, False]])
    plan = GatherPlan(head, wanted, {index: (f"n{index}",) for index in range(3)})
    assert [each.rows for each in plan.next()] == [(slice(0, 4),), (slice(0, 2),)]
    end(plan, 1)
    end(plan, 0, error=slow("n0"))
    pulls = {each.index: each.rows for each in plan.next()}
    assert pulls == {1: (slice(2, 4),), 2: (slice(0, 4),)}


def test_who_does_not_answer_is_asked_after_all_others():
    plan = plan_for((0, ("a", "b")), (1, ("c", "a", "e")), (2, ("d",)))
    assert begin(plan) == [(0, "a"), (1, "c"), (2, "d")]
    end(plan, 0, error=gone("a"))
    assert begin(plan) == [(0, "b")]
    end(plan, 1, error=NotHeld("gone"))
    assert begin(plan) == [(1, "e")]
    end(plan, 1, error=NotHeld("gone"))
    assert begin(plan) == [(1, "a")]


def test_a_laggard_is_given_up_for_another_source_or_where_all_could_be_replaced():
    plan = five()
    first, second, _ = plan.next()
    assert plan.patience_s(first) is None  # three in flight, two others
    end(plan, 2, took_s=0.1)
    assert plan.patience_s(first) == 2.0
    end(plan, 0, error=slow("n0"))
    assert begin(plan) == [(3, "n3")]
    assert plan.patience_s(second) is None
    end(plan, 3, took_s=5.0)
    assert plan.patience_s(second) == 15.0
    end(plan, 1, error=gone("n1"))
    assert begin(plan) == [(4, "n4")]
    end(plan, 4, error=gone("n4"))
    (pull,) = plan.next()
    assert (pull.source, plan.patience_s(pull)) == ("n0", None)  # and now it is waited for

    other = plan_for((0, ("a", "b")), (1, ("a",)), (2, ("a",)))
    first, second, _ = other.next()
    assert other.patience_s(first) == 2.0  # with nothing to compare it with
    assert other.patience_s(second) is None

    wanted = np.array([[True], [False], [False]])
    plan = five(wanted=wanted)
    assert plan.patience_s(*plan.next()) == 2.0
    few = plan_for(*((index, ("a",)) for index in range(3)), wanted=wanted)
    assert few.patience_s(*few.next()) is None  # two others do not decode it


def test_plans_of_one_restore_share_what_they_learn_of_sources():
    head, slow_ones = header(), set()
    places = {index: (f"n{index}",) for index in range(5)}
    plans = [GatherPlan(head, whole_shard(head), places, slow=slow_ones) for _ in range(2)]
    begin(plans[0])
    end(plans[0], 1, error=slow("n1"))
    assert begin(plans[1]) == [(0, "n0"), (2, "n2"), (3, "n3")]


# -- performed ------------------------------------------------------------------------------------

HEAD = header(shard_bytes=2000, block_bytes=256)  # of RS(3, 2), four rows, the last one short
assert HEAD.rows == 4
NOISE = np.random.default_rng(1)
DATA = [bytearray(NOISE.bytes(HEAD.fragment_bytes)) for _ in range(3)]
PARITY = [bytearray(HEAD.fragment_bytes) for _ in range(2)]
TABLE = Codec(3, 2).encode(DATA, PARITY, HEAD.block_bytes)
TRUTH = [bytes(each) for each in (*DATA, *PARITY)]

blocks = st.tuples(st.integers(0, 4), st.integers(0, 3))
faults = st.fixed_dictionaries(
    {
        "rotten": st.frozensets(blocks, max_size=12),  # in the copy that is given first
        "worse": st.frozensets(blocks, max_size=6),  # in both copies
        "flips": st.frozensets(blocks, max_size=2),  # the first time
        "kind": st.sampled_from(["fine", "fine", "dead", "refuses", "slow", "drops"]),
    }
)
places = st.fixed_dictionaries(
    {index: st.lists(st.sampled_from("abcd"), unique=True, max_size=3) for index in range(5)}
)


class Sources:
    """Nodes with all fragments, each with faults of its own; pulls may come from any thread."""

    def __init__(self, faults: dict[str, dict[str, object]], views: list[memoryview]) -> None:
        self._faults, self._views = faults, views
        self._asked: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def pull(
        self, pull: BlockPull, span: slice, connections: int, goes_on: Callable[[], bool]
    ) -> None:
        fault = self._faults[pull.source]
        with self._lock:
            first = (pull.source, pull.index) not in self._asked
            self._asked.add((pull.source, pull.index))
        if fault["kind"] == "dead" or (fault["kind"] == "drops" and first):
            raise gone(pull.source)
        if fault["kind"] == "refuses":
            raise NotHeld("gone")
        if fault["kind"] == "slow" and not pull.patient:
            raise slow(pull.source)
        view = self._views[pull.index][span]
        view[:] = TRUTH[pull.index][span]
        for row in range(span.start // 256, -(-span.stop // 256)):
            block = (pull.index, row)
            flips = first and block in fault["flips"]
            if flips or block in fault["worse"] or (not pull.again and block in fault["rotten"]):
                view[row * 256 - span.start] ^= 1


def can_be_had(wanted, places, faults):
    """Whether k good blocks of each wanted row, or the wanted ones, exist somewhere."""
    there = np.zeros((5, 4), bool)
    for index, nodes in places.items():
        for node in nodes:
            if faults[node]["kind"] not in ("dead", "refuses"):
                there[index] |= [(index, row) not in faults[node]["worse"] for row in range(4)]
    return bool(((there.sum(axis=0) >= 3) | ~(wanted & ~there[:3]).any(axis=0)).all())


@settings(max_examples=200)
@given(
    st.lists(st.booleans(), min_size=12, max_size=12),
    places,
    st.fixed_dictionaries(dict.fromkeys("abcd", faults)),
)
def test_it_ends_with_the_right_bytes_if_and_only_if_enough_good_blocks_exist(
    flags, places, faults
):
    wanted = np.array(flags).reshape(3, 4)
    views = [memoryview(bytearray(HEAD.fragment_bytes)) for _ in range(5)]
    plan = GatherPlan(HEAD, wanted, places)
    try:
        Gatherer(plan, TABLE, views.__getitem__, Sources(faults, views).pull).pull_blocks()
        rebuild(plan, TABLE, views.__getitem__)
    except TooFewFragments:
        assert not can_be_had(wanted, places, faults)
    else:
        assert can_be_had(wanted, places, faults)
        for index, row in np.argwhere(wanted).tolist():
            block = HEAD.block(row)
            assert views[index][block] == TRUTH[index][block]
    for index, row in np.argwhere(plan.good).tolist():
        assert views[index][HEAD.block(row)] == TRUTH[index][HEAD.block(row)]


def test_checksums_are_asked_for_twice_and_those_who_were_silent_last():
    asked: list[str] = []

    def ask(source):
        asked.append(source)
        raise gone(source)

    with pytest.raises(TooFewFragments, match=r"checksums of .*0 good fragments, 1 needed"):
        find_table(HEAD, {0: ("a", "b"), 1: ("c", "a")}, ask, silent={"b"}, problems=[])
    assert asked == ["a", "c", "a", "b", "c"]
