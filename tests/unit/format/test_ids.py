"""Identity and order: what parses is what was spelled, and newer means later in this history."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.errors import InvalidConfig, InvalidMessage
from ecckpt.format.ids import Generation, ShardId, check_name
from tests.support.builders import SESSION, generations, names

BAD_GENERATIONS = [
    "",
    "1",
    "1.2",
    f"1.2.{SESSION}.3",
    f"-1.2.{SESSION}",
    f"1.-2.{SESSION}",
    f"01.2.{SESSION}",
    f"1.007.{SESSION}",
    f"\u0661.2.{SESSION}",
    f"1.{'9' * 19}.{SESSION}",
    f"1.2.{SESSION.upper()}",
    f"1.2.{SESSION[:-1]}",
    f" 1.2.{SESSION}",
    f"1.2.{SESSION}\n",
    f"1.2.../{SESSION}",
    "x" * 100_000,
]
BAD_NAMES = ["", ".", "..", "-x", "_x", "a/b", "a b", "a\n", "\u00e4", "x" * 65, "a\0b", "%2e"]


@given(generations)
def test_a_generation_parses_to_itself(generation):
    assert Generation.parse(str(generation)) == generation


@settings(max_examples=200)
@given(st.text(max_size=40) | st.from_regex(r"\d+\.\d+\.[0-9a-f]{16}", fullmatch=True))
def test_what_parses_is_spelled_one_way(text):
    try:
        parsed = Generation.parse(text)
    except InvalidMessage:
        return
    assert str(parsed) == text


@pytest.mark.parametrize("text", BAD_GENERATIONS)
def test_what_is_no_generation_is_refused_shortly(text):
    with pytest.raises(InvalidMessage, match=r"timeline\.step\.session") as caught:
        Generation.parse(text)
    assert len(str(caught.value)) < 200


def test_timeline_comes_before_step():
    assert Generation(2, 400, SESSION) > Generation(1, 5000, SESSION)


def test_steps_are_compared_as_numbers():
    steps = [8, 9, 10, 99, 100, 999_999, 1_000_000, 10_000_000]
    ordered = [Generation(1, step, SESSION) for step in steps]
    for shuffled in (reversed(ordered), sorted(ordered, key=str)):
        assert sorted(shuffled) == ordered


def test_two_sessions_never_make_one_generation():
    assert Generation(1, 5, "0" * 16) != Generation(1, 5, "f" * 16)


@given(generations, generations, names, st.integers(0, 9), st.integers(0, 9))
def test_shards_are_told_apart_by_all_they_are(first, second, run, rank, other):
    shards = {ShardId(run, *each) for each in itertools.product((first, second), (rank, other))}
    assert len(shards) == len({first, second}) * len({rank, other})


@given(names)
def test_names_that_paths_and_urls_can_carry(name):
    assert check_name("run", name) is name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_other_names_are_refused_with_a_hint(name):
    with pytest.raises(InvalidConfig, match=r"node .* is not a usable name") as caught:
        check_name("node", name)
    assert "1 to 64 letters" in caught.value.hint
    assert caught.value.hint in str(caught.value)
