"""How a save is seen through, step by step: the rule alone, without store, agent or thread."""

import pytest

from ecckpt.client.save.commit_protocol import (
    Await,
    Count,
    Ended,
    GiveUp,
    Look,
    Pause,
    Protected,
    Share,
    Start,
    Tell,
    Wake,
    give_up,
    see_through,
)
from ecckpt.errors import AgentUnreachable, Fenced, SaveFailed, SaveTimedOut
from ecckpt.protocol.messages.save import Progress
from tests.support.builders import header

SHARD = header().shard
STALE = Fenced(timeline=1, current=2)
GONE = AgentUnreachable("n0", "gone")
LATE = SaveTimedOut("late")
NO_STORE = SaveFailed("the store is gone")


def progress(state):
    return Progress(state, 3, (), 0.0, 0.0)


def play(*script, ranks=2, counted=True, steps=None):
    """Go through (expected step, what comes of it); returns what the save ended with."""
    steps = steps or see_through(SHARD, ranks, counted=counted)
    step, ended = next(steps), "not ended"
    for at, (expected, result) in enumerate(script):
        if expected is Ended:
            assert isinstance(step, Ended)
            ended = step.error
        else:
            assert step == expected
        try:
            step = steps.throw(result) if isinstance(result, Exception) else steps.send(result)
        except StopIteration:
            assert at == len(script) - 1
            return ended
    raise AssertionError(f"not ended, but wants {step}")


def added(counter, value):
    return Count(counter, 1), value


def seen(counter, value):
    return Count(counter, 0), value


PROTECTED = (
    (Start(), None),
    (Look("encoding"), progress("scattering")),
    seen("count", 0),
    (Look("scattering"), progress("protected")),
    (Protected(progress("protected")), None),
)
LAST = (added("count", 2), (Wake("count"), None))
FIRST = (added("count", 1), (Await("count"), None))
TOLD = (Tell(), None)
ENDED = (Ended, None)
SHARED = (Share(), None)
LEFT = (added("left", 2), (Wake("left"), None))
GIVEN_UP = ((GiveUp(), True), (Wake("count"), None), ENDED)
COMPLETE = ((GiveUp(), False), ENDED)


def test_whoever_completes_the_count_wakes_the_others_and_tells_its_own_agent():
    assert play(*PROTECTED, *LAST, TOLD, ENDED, SHARED, *LEFT) is None


def test_the_others_are_woken_and_tell_their_own():
    assert play(*PROTECTED, *FIRST, seen("count", 2), TOLD, ENDED, SHARED, *LEFT) is None


def test_who_is_woken_by_nobody_finds_the_count_complete():
    again = (seen("count", 1), (Await("count"), None), seen("count", 2))
    assert play(*PROTECTED, *FIRST, *again, TOLD, ENDED, SHARED, *LEFT) is None


def test_who_leaves_first_waits_for_the_others():
    waiting = (added("left", 1), (Await("left"), None), seen("left", 1), (Await("left"), None))
    assert play(*PROTECTED, *LAST, TOLD, ENDED, SHARED, *waiting, seen("left", 2)) is None


@pytest.mark.parametrize("error", [LATE, NO_STORE])
def test_a_rank_that_cannot_wait_for_the_others_goes_on(error):
    waiting = (added("left", 1), (Await("left"), error))
    assert play(*PROTECTED, *LAST, TOLD, ENDED, SHARED, *waiting) is None


def test_what_is_not_counted_ends_protected():
    steps = (*(each for each in PROTECTED if each != seen("count", 0)), ENDED)
    assert play(*steps, counted=False) is None


@pytest.mark.parametrize("state", ["failed", "unknown"])
def test_a_shard_that_is_not_protected_is_given_up(state):
    ended = play((Start(), None), (Look("encoding"), progress(state)), *GIVEN_UP, *LEFT)
    assert isinstance(ended, SaveFailed)


def test_a_save_that_another_rank_gave_up_is_given_up_at_once_or_when_woken():
    at_once = (*PROTECTED[:2], seen("count", -5))
    assert "another rank" in str(play(*at_once, *GIVEN_UP, *LEFT))
    counting = (*PROTECTED, added("count", -5))
    assert "another rank" in str(play(*counting, *GIVEN_UP, *LEFT))
    woken = (*PROTECTED, *FIRST, seen("count", -5))
    assert "another rank" in str(play(*woken, *GIVEN_UP, *LEFT))


@pytest.mark.parametrize("error", [NO_STORE, LATE])
def test_an_error_gives_the_save_up_unless_all_have_counted(error):
    failing = (*PROTECTED, added("count", 1), (Await("count"), error))
    assert play(*failing, *GIVEN_UP, *LEFT) is error
    assert play(*failing, *COMPLETE, TOLD, SHARED, *LEFT) is None


def test_an_agent_that_is_away_is_told_before_the_next_save_begins():
    away = ((Tell(), GONE), ENDED, (Tell(), GONE), (Pause(), None), TOLD)
    assert play(*PROTECTED, *LAST, *away, SHARED, *LEFT) is None
    gone = ((Tell(), GONE), ENDED, (Tell(), GONE), (Pause(), LATE))
    assert play(*PROTECTED, *LAST, *gone, SHARED, *LEFT) is None


def test_a_writer_that_was_fenced_off_never_calls_a_save_committed():
    told = ((Tell(), STALE), *COMPLETE)
    assert play(*PROTECTED, *LAST, *told, *LEFT) is STALE


def test_an_error_without_counting_is_the_end_of_it():
    assert play((Start(), GONE), ENDED, counted=False) is GONE


def test_a_shard_that_will_not_come_wakes_the_others_and_is_left():
    script = ((GiveUp(), True), (Wake("count"), None), *LEFT)
    assert play(*script, steps=give_up(2)) == "not ended"
