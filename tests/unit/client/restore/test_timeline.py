"""The number of a new timeline, question by question."""

import pytest
from ecckpt.client.restore.timeline import first_free

from ecckpt.errors import Fenced


def test_it_is_above_all_that_anybody_knows():
    numbers = first_free([4, 0, 7])
    assert next(numbers) == 8
    with pytest.raises(StopIteration) as end:
        numbers.send([])
    assert end.value.value == 8
    assert next(first_free([])) == 1


def test_whoever_has_seen_a_newer_one_is_believed():
    numbers = first_free([0])
    assert next(numbers) == 1
    assert numbers.send([5, 9, 9]) == 10
    assert numbers.send([10]) == 11


def test_it_ends_where_others_are_faster():
    numbers = first_free([0])
    asked = [next(numbers)]
    with pytest.raises(Fenced, match="timeline 8 has started"):
        asked += iter(lambda: numbers.send(asked[-1:]), None)
