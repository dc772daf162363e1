"""Errors: what they say, what they are, and how much of them crosses to another process."""

import inspect
from multiprocessing.reduction import ForkingPickler

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecckpt import errors
from ecckpt.errors import EcckptError, facts, revive

EXAMPLES = [
    errors.InvalidCode("k=0", hint="more"),
    errors.TooFewNodes(have=3, need=6, code="RS(3, 2)"),
    errors.DuplicateNode("n1", ["10.0.0.1:1", "10.0.0.2:1"]),
    errors.VersionMismatch("here", found=2, known=1),
    errors.TooFewFragments("shard", rank=1, have=2, need=3, reasons=["one", "two"]),
    errors.AgentUnreachable("10.0.0.1:1", "silent", hint="look there"),
    errors.TooSlow("10.0.0.1:1", done_bytes=10, size_bytes=100),
    errors.RequestRefused("10.0.0.1:1", 503, "busy"),
    errors.Fenced(timeline=1, current=2),
    errors.NotHeld("nothing"),
    errors.MemoryBudgetTooSmall("n1", need_bytes=5_000_000, have_bytes=1_000, what="a slot"),
    errors.TmpfsFull("/dev/shm", need_bytes=5_000_000, free_bytes=1_000),
    errors.NotMapped("a file", need_bytes=5_000_000, limit_bytes=-1),
    errors.DiskBudgetTooSmall("n1", need_bytes=5_000_000, have_bytes=1_000, what="a file"),
    errors.DiskFull("/nvme", need_bytes=5_000_000, free_bytes=1_000),
    errors.UnsupportedState("a/b", "a lambda", hint="leave it out"),
    errors.StateMismatch(["a", "b"]),
    errors.SaveFailed("no"),
    errors.SaveTimedOut("late"),
    errors.SaveSkipped(7, "waiting for rank 3", unfinished=6, age_s=1.5),
    errors.NothingToRestore("run", {"1.5": "lost"}),
    errors.NoRoomToRestore("generation 1.5: rank 3: none"),
    errors.RankTimeout("the vote", [3, 4], timeout_s=2.5),
]
LEAVES = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, EcckptError) and kind is not EcckptError
]
every_example = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_is_a_leaf_with_a_docstring(kind):
    # But for one: who handles saves that failed handles those that were skipped.
    parent = errors.SaveFailed if kind is errors.SaveSkipped else EcckptError
    assert kind.__bases__[0] is parent
    assert kind.__doc__


@every_example
def test_numbers_that_another_process_left_out_are_minus_one(error):
    again = revive(type(error).__name__, str(error), {})
    assert facts(again).keys() <= facts(error).keys()
    assert set(facts(again).values()) <= {-1}


def test_a_refusal_without_its_facts_is_one_nevertheless():
    assert revive("Fenced", "fenced", {}).current == -1
    assert revive("TooFewFragments", "too few", {"need": 3}).rank == -1


@every_example
def test_an_error_comes_back_with_its_text_and_numbers(error):
    again = revive(type(error).__name__, str(error), facts(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert facts(again) == facts(error)
    assert again.hint == ""


@every_example
def test_an_error_goes_to_another_process_of_the_program(error):
    again = ForkingPickler.loads(ForkingPickler.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@every_example
def test_the_hint_is_part_of_the_text(error):
    assert error.hint in str(error)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InvalidCode("x"), ValueError),
        (errors.InvalidMessage("x"), ValueError),
        (errors.InvalidFolder("x"), ValueError),
        (errors.TooFewNodes(have=1, need=2, code="x"), ValueError),
        (errors.WrongOrder("x"), RuntimeError),
        (errors.AgentUnreachable("a", "b"), ConnectionError),
        (errors.NotHeld("x"), LookupError),
        (errors.TmpfsFull("x", need_bytes=1, free_bytes=0), OSError),
        (errors.NotMapped("x", need_bytes=1, limit_bytes=2), OSError),
        (errors.DiskFull("x", need_bytes=1, free_bytes=0), OSError),
        (errors.UnsupportedState("a", "b", hint="c"), TypeError),
        (errors.SaveTimedOut("x"), TimeoutError),
        (errors.RankTimeout("x", [1], timeout_s=1.0), TimeoutError),
    ],
)
def test_callers_find_the_built_in_they_expect(error, builtin):
    assert isinstance(error, builtin)


def test_numbers_are_written_out():
    text = str(errors.MemoryBudgetTooSmall("n1", need_bytes=5_000_000, have_bytes=1, what="it"))
    assert "5,000,000 bytes" in text
    assert "budget is 1 " in text
    assert "rank 3, 4 within 2.5 s" in str(errors.RankTimeout("vote", [3, 4], timeout_s=2.5))
    assert "3 good fragments, 5 needed; bad block" in str(
        errors.TooFewFragments("it", rank=1, have=3, need=5, reasons=["bad block"])
    )


def test_long_lists_are_cut():
    assert "and 80 more" in str(errors.StateMismatch([f"p{at}" for at in range(100)]))
    assert len(str(errors.RankTimeout("vote", range(5000), timeout_s=1))) < 200


@pytest.mark.parametrize(
    "name",
    ["", "ValueError", "Exception", "Mapping", "facts", "revive", "EcckptError.x", "FromTheFuture"],
)
def test_only_errors_of_ecckpt_come_back(name):
    assert revive(name, "text", {}) is None


@given(
    st.sampled_from(LEAVES),
    st.text(),
    st.dictionaries(
        st.sampled_from(dir(errors.TmpfsFull)) | st.text(max_size=12), st.integers(-9, 9)
    ),
)
def test_no_numbers_from_outside_bend_an_error(kind, text, numbers):
    error = revive(kind.__name__, text, numbers)
    assert type(error) is kind
    assert str(error) == text
    assert error.args == (text,)
    assert error.hint == ""
    given = {name: number for name, number in facts(error).items() if name in numbers}
    assert given.items() <= numbers.items()
    assert set(facts(error).values()) <= {-1, *numbers.values()}
