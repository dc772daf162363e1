"""When the training program hears of saves that fail in a row."""

from __future__ import annotations

import math

import pytest

from ecckpt.client.save.unsaved import Unsaved
from ecckpt.errors import SaveFailed


def failing(unsaved: Unsaved, *times_s: float) -> Unsaved:
    for now_s in times_s:
        unsaved.note_failure(SaveFailed("no room"), now_s)
    return unsaved


def test_failures_in_a_row_raise_once_they_last_too_long() -> None:
    unsaved = failing(Unsaved(60.0), 100.0, 120.0, 130.0)
    unsaved.require_hope(159.0)
    with pytest.raises(SaveFailed, match=r"60 s, 3 in a row have failed; the last.* no room"):
        unsaved.require_hope(160.0)


def test_a_commit_begins_anew() -> None:
    unsaved = failing(Unsaved(60.0), 100.0, 120.0, 130.0)
    unsaved.note_commit()
    unsaved.require_hope(1000.0)
    failing(unsaved, 1000.0, 1001.0)
    unsaved.require_hope(1100.0)  # two saves are too few to say


def test_without_a_bound_nothing_raises() -> None:
    failing(Unsaved(math.inf), 1.0, 2.0, 3.0).require_hope(1e12)
