"""A sample of the campaign of random faults."""

from __future__ import annotations

import logging

import pytest

from tests.chaos.campaign import run

pytestmark = pytest.mark.long


# 3: an agent came back under another node's name when the library started it again.
@pytest.mark.parametrize("seed", [3, 20])
def test_campaign(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        run(seed, rounds=3, say=print)
