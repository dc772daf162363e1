"""What stays on disk: the last ones, every nth, never what was left, always the newest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecckpt.errors import InvalidConfig
from ecckpt.format.fragment_file import HOME
from ecckpt.policy.retention import Keep, ranks_short
from ecckpt.policy.rollbacks import RollBack, in_force
from tests.support.builders import generation

STEPS = [8, 9, 10, 99, 100, 999_999, 1_000_000, 10_000_000]
GENERATIONS = [generation(1, step) for step in STEPS]


def steps(kept):
    return [each.step for each in kept]


@pytest.mark.parametrize("last", [1, 2, 3, 8, 20])
def test_the_last_ones_by_number_not_by_name(last):
    for stored in (GENERATIONS, GENERATIONS[::-1], GENERATIONS * 2):
        assert Keep(last).kept_of(stored, ()) == tuple(GENERATIONS[-last:])


def test_every_nth_step_stays_too():
    stored = [generation(1, step) for step in range(0, 50, 7)]
    assert steps(Keep(1, 14).kept_of(stored, ())) == [0, 14, 28, 42, 49]
    assert steps(Keep(2, 35).kept_of(stored, ())) == [0, 35, 42, 49]


def test_a_newer_timeline_counts_as_newer():
    stored = [generation(1, 300), generation(1, 5000), generation(2, 301)]
    assert Keep(2).kept_of(stored, ()) == (stored[1], stored[2])


def test_what_was_left_on_purpose_takes_no_place():
    stored = [generation(1, 200), generation(1, 300), generation(1, 5000), generation(2, 301)]
    roll_backs = [RollBack(2, stored[1])]
    assert Keep(2).kept_of(stored, roll_backs) == (stored[1], stored[3])
    assert Keep(1, 5000).kept_of(stored, roll_backs) == (stored[3],)


@pytest.mark.parametrize("options", [{"last": 0}, {"last": -1}, {"every_steps": -5}])
def test_keeping_nothing_is_no_setting(options):
    with pytest.raises(InvalidConfig, match="keep"):
        Keep(**options)


generations = st.builds(generation, st.integers(1, 4), st.integers(0, 40))


@given(
    st.sets(generations, min_size=1),
    st.integers(1, 5),
    st.integers(0, 9),
    st.lists(st.builds(RollBack, st.integers(1, 5), generations), max_size=3),
)
def test_the_newest_that_counts_always_stays_and_keeping_twice_changes_nothing(
    stored, last, every_steps, roll_backs
):
    keep, roll_backs = Keep(last, every_steps), in_force(roll_backs)
    kept = keep.kept_of(stored, roll_backs)
    counting = [g for g in stored if not any(each.abandons(g) for each in roll_backs)]
    assert set(kept) <= set(counting)
    assert kept[-1:] == tuple(sorted(counting)[-1:])
    assert keep.kept_of(kept, roll_backs) == kept


def test_a_shard_is_on_disk_with_enough_different_fragments():
    def short(*pieces, least=3):
        return ranks_short(pieces, ranks=2, least=least)

    whole = [(rank, index) for rank in (0, 1) for index in (0, 2, 4)]
    assert short(*whole) == ()
    assert short(*whole[:-1]) == (1,)
    assert short(*whole[:-1], (1, 0), (1, HOME)) == (1,)
    assert short() == (0, 1)
    assert short(*whole, least=4) == (0, 1)
    assert short((0, HOME), least=0) == (1,)
    assert short((0, HOME), (1, HOME), least=0) == ()
