"""A sample of the points at which an agent's life is cut short or disturbed."""

from __future__ import annotations

import shutil

import pytest

from tests.chaos.crashing import run

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

SHARES = 4  # tests of their own, so that several workers take part


@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", range(SHARES))
def test_at_least_200_points(share: int) -> None:
    reached = run(every=4, lines=160, share=share, shares=SHARES)
    assert reached["KILL at a call"] >= 80 / SHARES
    assert reached["KILL at a line"] >= 64 / SHARES
    assert reached["an error"] >= 20 / SHARES
    assert sum(reached.values()) >= 200 / SHARES


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", range(SHARES))
def test_the_calls_between_them_and_every_thirtieth_line(share: int) -> None:
    # With those above, every other call.
    reached = run(every=4, lines=30, first=2, share=share, shares=SHARES)
    assert reached["KILL at a call"] >= 80 / SHARES
    assert reached["KILL at a line"] >= 250 / SHARES
    assert reached["an error"] >= 20 / SHARES
