"""Which fragments are pulled when a shard is brought home, and from where."""

import pytest

from ecckpt.agent.core.gather_plan import Gathering
from ecckpt.errors import TooFewFragments
from ecckpt.protocol.messages.restore import Fetch, Sources
from tests.support.builders import header

BAD = [(0, 0)]


def gathering(*sources):
    """Of RS(3, 2), one row; ``sources`` are (index, addresses)."""
    found = tuple(Sources(index, addresses) for index, addresses in sources)
    return Gathering.of(Fetch(header(), 1, found, 0, 30.0))


def pull(found, index, *, bad=()):
    """One pull; where it went."""
    address, rows = found.take(index)
    for each in rows:
        found.prove(index, each, bad)
    found.judge(index, address)
    return address


def test_the_shards_own_bytes_come_first_and_suffice():
    found = gathering(*((index, (f"n{index}",)) for index in range(5)))
    assert found.first() == [0, 1, 2]
    for index in found.first():
        pull(found, index)
    assert found.next() == []
    assert list(found.lost()) == []


def test_what_is_damaged_is_replaced_by_as_many_others():
    found = gathering(*((index, (f"n{index}",)) for index in range(5)))
    pull(found, 0)
    pull(found, 1, bad=BAD)
    pull(found, 2)
    assert found.next() == [3]
    pull(found, 3)
    assert found.next() == []
    assert list(found.lost()) == [(slice(0, 1), [1], [0, 2, 3])]


def test_another_source_of_a_fragment_comes_before_a_second_try():
    found = gathering((0, ("a", "b")), (1, ("c",)), (2, ("d",)))
    pull(found, 1)
    pull(found, 2)
    assert pull(found, 0, bad=BAD) == "a"
    assert found.next() == [0]
    assert pull(found, 0, bad=BAD) == "b"
    assert not found.last
    assert found.next() == [0]
    assert found.last  # what has rotted in memory may be right on disk
    assert pull(found, 0) == "a"
    assert found.next() == []


def test_after_the_second_try_of_all_it_says_how_many_are_good():
    found = gathering((0, ("a",)), (1, ("b",)), (2, ("c",)))
    for _ in range(2):
        for index in found.next():
            pull(found, index, bad=BAD if index == 1 else ())
    with pytest.raises(TooFewFragments, match="2 good fragments, 3 needed"):
        found.next()


def test_what_is_good_is_not_pulled_again():
    found = gathering((0, ("a", "b")), (1, ("c", "d")), (2, ("e",)))
    pull(found, 0)
    pull(found, 2, bad=BAD)
    assert found.next() == [1]
    pull(found, 1)
    assert found.next() == [2]


def test_others_are_asked_at_once_instead_of_what_nobody_has():
    found = gathering((0, ("a",)), (3, ("d",)), (4, ("e",)))
    assert found.first() == [0, 3, 4]
    found = gathering((0, ("a",)), (2, ("c",)), (3, ("d",)), (4, ("e",)))
    assert found.first() == [0, 2, 3]
