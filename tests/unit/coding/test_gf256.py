"""The oracle against first principles and against zfec."""

from itertools import combinations

import pytest
import zfec
from hypothesis import given
from hypothesis import strategies as st

from ecckpt.coding import gf256
from ecckpt.errors import InvalidBuffer, InvalidCode

elements = st.integers(0, 255)


@given(elements, elements, elements)
def test_field_laws(a, b, c):
    assert gf256.mul(a, b) == gf256.mul(b, a)
    assert gf256.mul(a, gf256.mul(b, c)) == gf256.mul(gf256.mul(a, b), c)
    assert gf256.mul(a, b ^ c) == gf256.mul(a, b) ^ gf256.mul(a, c)
    assert gf256.mul(a, 1) == a
    assert gf256.mul(a, 0) == 0


def test_two_generates_the_field():
    assert {gf256.power(2, exponent) for exponent in range(255)} == set(range(1, 256))
    assert gf256.mul(0x80, 2) == 0x1D
    assert gf256.power(0, 0) == 1


def test_inverse_of_elements():
    assert all(gf256.mul(a, gf256.inv(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        gf256.inv(0)


@given(elements, st.binary(max_size=40))
def test_scaled_and_added_rows(factor, row):
    assert gf256.scaled(row, factor) == bytes(gf256.mul(factor, x) for x in row)
    assert gf256.added(row, row) == bytes(len(row))


def test_inverse_of_matrices():
    # A zero pivot first, so that rows must be swapped.
    matrix = [bytes([0, 1, 2]), bytes([3, 4, 5]), bytes([6, 7, 9])]
    assert gf256.matmul(matrix, gf256.inverse(matrix)) == gf256.identity(3)
    assert gf256.matmul(gf256.inverse(matrix), matrix) == gf256.identity(3)
    with pytest.raises(ZeroDivisionError, match="singular 2 x 2"):
        gf256.inverse([bytes([1, 2]), bytes([2, 4])])


CODES = [
    (1, 1),
    (1, 2),
    (1, 256),
    (2, 3),
    (3, 5),
    (8, 10),
    (10, 14),
    (16, 20),
    (32, 40),
    (255, 256),
]


@pytest.mark.parametrize(("k", "n"), CODES)
def test_generator_is_that_of_zfec(k, n):
    parity = range(k, n)
    columns = [zfec.Encoder(k, n).encode(unit, list(parity)) for unit in unit_blocks(k)]
    rows = [bytes(columns[c][r][0] for c in range(k)) for r in range(n - k)]
    assert gf256.generator_matrix(k, n) == [*gf256.identity(k), *rows]


def unit_blocks(k):
    return ([bytes([int(i == j)]) for j in range(k)] for i in range(k))


@pytest.mark.parametrize(("k", "n"), [(1, 4), (2, 5), (3, 6), (4, 8)])
def test_decode_matrix_of_every_subset(k, n):
    generator = gf256.generator_matrix(k, n)
    for present in combinations(range(n), k):
        rows = gf256.decode_matrix(k, n, present, range(n))
        assert gf256.matmul(rows, [generator[index] for index in present]) == generator


def test_decode_matrix_keeps_the_given_order():
    rows = gf256.decode_matrix(2, 4, [3, 1], [1, 3])
    assert rows == [bytes([0, 1]), bytes([1, 0])]


def test_rebuild_inverts_encode():
    data = [b"abcd", b"efgh", b"ijkl"]
    parity = gf256.encode(3, 2, data)
    assert parity == zfec.Encoder(3, 5).encode(data, [3, 4])
    present = {4: parity[1], 1: data[1], 3: parity[0]}
    assert gf256.rebuild(3, 2, present, [2, 0]) == {2: data[2], 0: data[0]}


@pytest.mark.parametrize(("k", "n"), [(0, 1), (-1, 3), (5, 4), (200, 257)])
def test_impossible_codes(k, n):
    with pytest.raises(InvalidCode, match=f"k = {k}"):
        gf256.generator_matrix(k, n)


@pytest.mark.parametrize(
    ("present", "wanted", "message"),
    [
        ([0], [1], "2 different"),
        ([0, 0], [1], "2 different"),
        ([0, 1, 2], [1], "2 different"),
        ([0, 4], [1], "fragment 4"),
        ([0, 1], [-1], "fragment -1"),
    ],
)
def test_impossible_decoding(present, wanted, message):
    with pytest.raises(InvalidBuffer, match=message):
        gf256.decode_matrix(2, 4, present, wanted)


def test_encode_counts_its_data():
    with pytest.raises(InvalidBuffer, match="1 data fragments"):
        gf256.encode(2, 1, [b"x"])


def test_crc32c_vectors():
    # RFC 3720, B.4, and the customary check value.
    assert gf256.crc32c(b"") == 0
    assert gf256.crc32c(b"123456789") == 0xE3069283
    assert gf256.crc32c(bytes(32)) == 0x8A9136AA
    assert gf256.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert gf256.crc32c(bytes(range(32))) == 0x46DD794E


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_crc32c_goes_on(first, second):
    assert gf256.crc32c(second, gf256.crc32c(first)) == gf256.crc32c(first + second)
