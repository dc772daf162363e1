"""How a save is seen through, step by step: the rule alone, without store, agent or thread."""

import pytest
from builders import header

from ecckpt import wire
from ecckpt.counting import Count, GiveUp, Look, Protected, Start, Tell, see_through
from ecckpt.errors import AgentUnreachable, Fenced, SaveFailed, SaveTimedOut

SHARD = header().shard
STALE = Fenced(timeline=1, current=2)
GONE = AgentUnreachable("n0", "gone")
LATE = SaveTimedOut("late")


def progress(state, *, committed=False):
    return wire.Progress(state, 3, (), committed, 0.0, 0.0)


def play(*script, ranks=2, counted=True):
    """Go through (expected step, what comes of it); returns what the save ended with."""
    steps = see_through(SHARD, ranks, counted=counted)
    step = next(steps)
    for expected, result in script:
        assert step == expected
        try:
            step = steps.throw(result) if isinstance(result, Exception) else steps.send(result)
        except StopIteration as end:
            return end.value
    raise AssertionError(f"not ended, but wants {step}")


PROTECTED = (
    (Start(), None),
    (Look("encoding"), progress("scattering")),
    (Look("scattering"), progress("protected")),
    (Protected(progress("protected")), None),
)
COMMITTED = (Look("protected"), progress("protected", committed=True))
WAITING = (Look("protected"), progress("protected"))


def test_whoever_completes_the_count_tells_everybody():
    assert play(*PROTECTED, (Count(1), 2), (Tell(everybody=True), None), COMMITTED) is None


def test_the_others_wait_to_be_told():
    assert play(*PROTECTED, (Count(1), 1), WAITING, (Count(0), 1), COMMITTED) is None


def test_who_finds_the_count_complete_tells_its_own_agent():
    told = (Tell(everybody=False), None)
    assert play(*PROTECTED, (Count(1), 1), WAITING, (Count(0), 2), told, COMMITTED) is None


def test_what_is_not_counted_ends_protected():
    assert play(*PROTECTED, counted=False) is None


@pytest.mark.parametrize("state", ["failed", "unknown"])
def test_a_shard_that_is_not_protected_is_given_up(state):
    ended = play((Start(), None), (Look("encoding"), progress(state)), (GiveUp(), True))
    assert isinstance(ended, SaveFailed)


def test_a_save_that_another_rank_gave_up_is_given_up():
    ended = play(*PROTECTED, (Count(1), 1), WAITING, (Count(0), -5), (GiveUp(), True))
    assert "another rank" in str(ended)


@pytest.mark.parametrize("error", [GONE, LATE])
def test_an_error_gives_the_save_up_unless_all_have_counted(error):
    assert play(*PROTECTED, (Count(1), 1), (Look("protected"), error), (GiveUp(), True)) is error
    assert play(*PROTECTED, (Count(1), 1), (Look("protected"), error), (GiveUp(), False)) is None


def test_a_writer_that_was_fenced_off_never_calls_a_save_committed():
    told = (Tell(everybody=False), STALE)
    script = (*PROTECTED, (Count(1), 1), WAITING, (Count(0), 2), told, (GiveUp(), False))
    assert play(*script) is STALE


def test_an_error_without_counting_is_the_end_of_it():
    assert play((Start(), GONE), counted=False) is GONE
