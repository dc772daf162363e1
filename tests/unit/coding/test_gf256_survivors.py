"""Any k fragments decode: the matrix of every choice of survivors has an inverse."""

import random
from itertools import combinations

import pytest

from ecckpt.coding import gf256


def minor(parity_rows, parity, lost):
    """Return what the chosen parity fragments know of the lost data fragments."""
    return [bytes(parity_rows[row][column] for column in lost) for row in parity]


# The survivors are all data but `lost` and as many parity fragments. Their matrix, with its unit
# rows cleared away, is that minor; it has an inverse exactly if the minor has.


@pytest.mark.parametrize("n", range(2, 13))
def test_every_set_of_survivors_up_to_12_fragments(n):
    for k in range(1, n + 1):
        parity_rows = gf256.generator_matrix(k, n)[k:]
        for count in range(1, min(k, n - k) + 1):
            for parity in combinations(range(n - k), count):
                for lost in combinations(range(k), count):
                    gf256.inverse(minor(parity_rows, parity, lost))  # raises if there is none


@pytest.mark.parametrize(("k", "m"), [(16, 4), (32, 8), (6, 6), (9, 9), (10, 10)])
def test_sampled_survivors_of_larger_codes(k, m):
    rng = random.Random(f"{k}+{m}")
    parity_rows = gf256.generator_matrix(k, k + m)[k:]
    for _ in range(700):
        count = rng.randint(1, m)
        gf256.inverse(minor(parity_rows, rng.sample(range(m), count), rng.sample(range(k), count)))


def test_the_minor_stands_for_the_whole_matrix():
    generator = gf256.generator_matrix(6, 10)
    for survivors in combinations(range(10), 6):
        gf256.inverse([generator[index] for index in survivors])
    with pytest.raises(ZeroDivisionError):
        gf256.inverse(minor([bytes([1, 2, 3]), bytes([2, 4, 7])], (0, 1), (0, 1)))
