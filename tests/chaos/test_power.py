"""A sample of cutting the power at any moment."""

from __future__ import annotations

import logging

import pytest

from tests.chaos.power import run

pytestmark = pytest.mark.long


def test_power_cuts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        run(1, rounds=5, say=print)
