"""Every set of up to m + 1 lost nodes, for several codes."""

from __future__ import annotations

import math

import pytest

from tests.chaos.kill_matrix import run


@pytest.mark.parametrize(
    ("k", "m"),
    [
        (2, 1),
        (3, 2),
        pytest.param(4, 2, marks=pytest.mark.long),
        pytest.param(8, 2, marks=pytest.mark.long),
    ],
)
def test_every_set_of_lost_nodes(k: int, m: int) -> None:
    nodes = k + m + 1
    tried = run(k, m)
    assert tried["sets survived"] == sum(math.comb(nodes, lost) for lost in range(1, m + 2))
    assert tried["sets told to be lost"] == math.comb(nodes, m + 2)
    assert tried["shards decoded"] == sum(lost * math.comb(nodes, lost) for lost in range(1, m + 2))
