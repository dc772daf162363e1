"""A sample of kills while DCP saves."""

import pytest

from tests.chaos.dcp_kills import run

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", [3, 7])  # a rank while it saves; an agent, in the background
def test_kills(seed, tmp_path):
    run(seed, tmp_path, print)
