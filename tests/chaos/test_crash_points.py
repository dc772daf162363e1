"""A sample of the points at which an agent's life is cut short or disturbed."""

from __future__ import annotations

import shutil

import pytest
from chaos.crashing import run

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


def test_some_points() -> None:
    reached = run(every=25, lines=600)
    assert reached["KILL at a call"] >= 8
    assert reached["KILL at a line"] >= 5
    assert reached["an error"] >= 3


@pytest.mark.long
def test_at_least_200_points() -> None:
    reached = run(every=3, lines=70)
    assert reached["KILL at a call"] + reached["KILL at a line"] >= 200
    assert reached["an error"] >= 30
