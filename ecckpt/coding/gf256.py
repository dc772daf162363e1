"""The field GF(2^8), its Reed-Solomon codes and CRC32C in plain Python: the reference.

``reed_solomon`` and ``engines`` take the matrices of a code from here. Tests compare all faster
engines with ``encode``, ``rebuild`` and ``crc32c``.

Field elements are polynomials over GF(2) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11D); the element 2
generates the multiplicative group. A matrix is a list of rows and a row is ``bytes``: scaling a row
is one ``bytes.translate``, adding two rows one XOR of big integers. A 255 x 255 matrix is inverted
in less than a second.

The code is the systematic Vandermonde code of L. Rizzo, "Effective erasure codes for reliable
computer communication protocols" (ACM SIGCOMM CCR 27(2), 1997), as zfec implements it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from ecckpt.errors import InvalidBuffer, InvalidCode

Matrix = list[bytes]

POLYNOMIAL = 0x11D
CRC32C_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reflected: bit 31 is the coefficient of x^0

# -- the field ------------------------------------------------------------------------------------


def mul(a: int, b: int) -> int:
    """Return the product of two field elements (0..255)."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a & 0x100:
            a ^= POLYNOMIAL
        b >>= 1
    return product


def power(a: int, exponent: int) -> int:
    """Return ``a`` to a non-negative power; every element to the power 0 is 1."""
    result = 1
    while exponent:
        if exponent & 1:
            result = mul(result, a)
        a = mul(a, a)
        exponent >>= 1
    return result


def inv(a: int) -> int:
    """Return the inverse of ``a``: their product is 1. Raise ZeroDivisionError for 0."""
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    return power(a, 254)  # the multiplicative group has 255 elements: a^255 = 1


@cache
def products(a: int) -> bytes:
    """Return ``a * x`` for x = 0..255, as a table for ``bytes.translate``."""
    table, term = [0], a
    for _ in range(8):  # the products are linear in the bits of x
        table += [product ^ term for product in table]
        term = mul(term, 2)
    return bytes(table)


def scaled(row: bytes, factor: int) -> bytes:
    """Return every element of ``row`` times ``factor``."""
    return row.translate(products(factor))


def added(a: bytes, b: bytes) -> bytes:
    """Return the element-wise sum (XOR) of two rows of equal length."""
    total = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    return total.to_bytes(len(a), "little")


# -- matrices -------------------------------------------------------------------------------------


def identity(size: int) -> Matrix:
    """Return the identity matrix of ``size`` rows."""
    return [bytes(int(row == column) for column in range(size)) for row in range(size)]


def combination(factors: bytes, rows: Sequence[bytes]) -> bytes:
    """Return the sum of ``factors[i] * rows[i]``; all rows have the same length."""
    total = 0
    for factor, row in zip(factors, rows, strict=True):
        if factor:
            total ^= int.from_bytes(scaled(row, factor), "little")
    return total.to_bytes(len(rows[0]), "little")


def matmul(a: Matrix, b: Matrix) -> Matrix:
    """Return the product of an (r, s) and an (s, t) matrix."""
    return [combination(row, b) for row in a]


def inverse(matrix: Matrix) -> Matrix:
    """Return the inverse of a square matrix by Gauss-Jordan elimination.

    Raises:
        ZeroDivisionError: the matrix is singular.
    """
    size = len(matrix)
    # The matrix and the identity side by side, so that one row operation applies to both.
    work = [row + unit for row, unit in zip(matrix, identity(size), strict=True)]
    for column in range(size):
        pivot = next((row for row in range(column, size) if work[row][column]), None)
        if pivot is None:
            raise ZeroDivisionError(f"singular {size} x {size} matrix: no pivot in column {column}")
        work[column], work[pivot] = work[pivot], work[column]
        work[column] = scaled(work[column], inv(work[column][column]))
        for row in range(size):
            factor = work[row][column]
            if factor and row != column:
                work[row] = added(work[row], scaled(work[column], factor))
    return [row[size:] for row in work]


# -- the code -------------------------------------------------------------------------------------


def check_code(k: int, n: int) -> None:
    """Raise InvalidCode unless 1 <= k <= n <= 256."""
    if not 1 <= k <= n <= 256:
        raise InvalidCode(
            f"code with k = {k} data and m = {n - k} parity fragments: "
            f"k >= 1, m >= 0 and k + m <= 256 are needed, k + m is {n}"
        )


@lru_cache(maxsize=64)
def _generator_rows(k: int, n: int) -> tuple[bytes, ...]:
    # The Vandermonde matrix of the points 0, 1, 2, 4, 8, ... (powers of 2). The points differ, so
    # any k of the n rows are independent. Multiplying with the inverse of the top k rows makes
    # these the identity and keeps the independence.
    points = [bytes([1]) + bytes(k - 1)]
    points += [bytes(power(2, row * column % 255) for column in range(k)) for row in range(n - 1)]
    top = inverse(points[:k])
    return (*identity(k), *matmul(points[k:], top))


def generator_matrix(k: int, n: int) -> Matrix:
    """Return the n x k generator matrix: row i gives fragment i as a sum of the k data fragments.

    The first k rows are the identity. The matrix equals zfec's, so fragments equal zfec's too.

    Raises:
        InvalidCode: not 1 <= k <= n <= 256.
    """
    check_code(k, n)
    return list(_generator_rows(k, n))


def decode_matrix(k: int, n: int, present: Sequence[int], wanted: Sequence[int]) -> Matrix:
    """Return the matrix that computes wanted fragments from k present ones.

    Args:
        k: number of data fragments.
        n: number of all fragments.
        present: indices of exactly k different fragments.
        wanted: indices of any fragments, data or parity, in any order.

    Returns:
        A matrix of shape (len(wanted), k): row r computes ``wanted[r]``, column c is the factor of
        ``present[c]``.

    Raises:
        InvalidCode: not 1 <= k <= n <= 256.
        InvalidBuffer: ``present`` has not k different indices, or an index is outside 0..n-1.
    """
    generator = generator_matrix(k, n)
    for index in (*present, *wanted):
        if not 0 <= index < n:
            raise InvalidBuffer(f"fragment {index} of a code with fragments 0..{n - 1}")
    if len(present) != k or len(set(present)) != k:
        raise InvalidBuffer(f"{k} different fragments are needed to decode, got {list(present)}")
    to_data = inverse([generator[index] for index in present])
    return matmul([generator[index] for index in wanted], to_data)


def encode(k: int, m: int, data: Sequence[bytes]) -> list[bytes]:
    """Return the m parity fragments of k data fragments of equal length."""
    generator = generator_matrix(k, k + m)
    if len(data) != k:
        raise InvalidBuffer(f"{len(data)} data fragments for a code with k = {k}")
    return [combination(row, data) for row in generator[k:]]


def rebuild(
    k: int, m: int, present: Mapping[int, bytes], wanted: Sequence[int]
) -> dict[int, bytes]:
    """Return the wanted fragments by index, computed from at least k present ones of equal length.

    It uses the k present fragments with the lowest indices.
    """
    chosen = sorted(present)[:k]
    rows = decode_matrix(k, k + m, chosen, wanted)
    sources = [present[index] for index in chosen]
    return {index: combination(row, sources) for index, row in zip(wanted, rows, strict=True)}


# -- the checksum ---------------------------------------------------------------------------------


@cache
def crc32c_table() -> tuple[int, ...]:
    """Return the byte-wise CRC32C table: entry b is the register b after 8 shifts, reflected."""
    table = []
    for value in range(256):
        register = value
        for _ in range(8):
            register = register >> 1 ^ (CRC32C_POLYNOMIAL if register & 1 else 0)
        table.append(register)
    return tuple(table)


def crc32c(data: bytes, value: int = 0) -> int:
    """Return the CRC32C of ``data``, or of A + ``data`` if ``value`` is the CRC32C of A."""
    table = crc32c_table()
    register = value ^ 0xFFFFFFFF
    for byte in data:
        register = register >> 8 ^ table[(register ^ byte) & 0xFF]
    return register ^ 0xFFFFFFFF
