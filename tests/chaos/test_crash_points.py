"""A sample of the points at which an agent's life is cut short or disturbed."""

from __future__ import annotations

import shutil

import pytest

from tests.chaos.crashing import run

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


@pytest.mark.timeout(300)
def test_at_least_200_points() -> None:
    reached = run(every=4, lines=80)
    assert reached["KILL at a call"] >= 80
    assert reached["KILL at a line"] >= 70
    assert reached["an error"] >= 20
    assert sum(reached.values()) >= 200


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_calls_between_them_and_every_thirtieth_line() -> None:
    reached = run(every=4, lines=30, first=2)  # with those above, every other call
    assert reached["KILL at a call"] >= 80
    assert reached["KILL at a line"] >= 250
    assert reached["an error"] >= 20
