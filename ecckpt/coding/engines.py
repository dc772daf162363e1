"""The engines behind ``reed_solomon.Codec``: native code, or the zfec library.

A ``CodingPass`` describes the one operation that engines have: compute targets as linear
combinations of sources, copy sources, and checksum both block by block. The native engines in
``native/`` differ in speed only. Without the native module the zfec engine does the same work.
``Codec`` has checked all lengths, indices and overlaps before an engine sees a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import zfec
from numpy.typing import NDArray

from ecckpt.coding import gf256
from ecckpt.memory.buffers import Bytes
from ecckpt.memory.native import HAVE_NATIVE, engines

if HAVE_NATIVE:
    from ecckpt.memory import _native

Table = NDArray[np.uint32]
Fragments = dict[int, Bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingPass:
    """One pass over fragments of equal length.

    The caller of the codec owns all buffers; views of them are valid until the pass has ended.

    Attributes:
        sources: the fragments to read, by index in the code; at least one.
        coded: how many of the sources, from the first, are combined into targets. It is k if there
            are targets.
        copies: buffers that receive the bytes of a source, by the index of that source.
        targets: the fragments to compute, by index in the code; overwritten.
        block_bytes: bytes that one checksum covers.
        table: shape (n, rows), uint32. The engine fills the rows of sources and targets. None: no
            checksums are wanted.
        threads: the largest number of threads to use.
    """

    sources: Fragments
    coded: int
    copies: Fragments
    targets: Fragments
    block_bytes: int
    table: Table | None
    threads: int


class Engine(Protocol):
    """An implementation of the coding pass for one code (k, m)."""

    name: str

    def execute(self, work: CodingPass) -> None:
        """Fill the targets, the copies and the table of a pass."""


def engine_named(name: str, k: int, m: int) -> Engine:
    """Return the engine with a name out of ``engines()`` for a code."""
    return ZfecEngine(k, m) if name == "zfec" else NativeEngine(k, m, name)


@lru_cache(maxsize=64)
def _coefficients(k: int, n: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> bytes:
    return b"".join(gf256.decode_matrix(k, n, sources, targets))


class NativeEngine:
    """An engine of the native module: one pass over memory does everything, without the GIL."""

    def __init__(self, k: int, m: int, name: str) -> None:
        self.name = name
        self._k, self._n = k, k + m

    def execute(self, work: CodingPass) -> None:
        """Fill the targets, the copies and the table of a pass."""
        sources, targets, table = work.sources, work.targets, work.table
        coefficients = b""
        if targets:
            coded = tuple(sources)[: work.coded]
            coefficients = _coefficients(self._k, self._n, coded, tuple(targets))
        rows = 0 if table is None else table.shape[1]
        # The native code numbers sources and targets from 0; `table` is indexed by fragment.
        source_sums = np.empty((len(sources), rows), np.uint32)
        target_sums = np.empty((len(targets), rows), np.uint32)
        _native.code(
            self.name,
            coefficients,
            list(sources.values()),
            work.coded,
            [work.copies.get(index) for index in sources] if work.copies else [],
            list(targets.values()),
            work.block_bytes,
            None if table is None else source_sums,
            None if table is None else target_sums,
            work.threads,
        )
        if table is not None:
            table[list(sources)] = source_sums
            table[list(targets)] = target_sums


class ZfecEngine:
    """The zfec library, in one thread; copies and checksums are separate passes over memory.

    zfec is an independent implementation of the same code: tests compare the native engines with
    it, and it replaces them where they cannot be built.
    """

    name = "zfec"

    # zfec allocates the fragments that it returns. Coding 256 KiB at a time bounds that memory and
    # keeps it in the CPU's cache.
    PIECE_BYTES = 1 << 18

    def __init__(self, k: int, m: int) -> None:
        self._k = k
        self._encoder = zfec.Encoder(k, k + m)
        self._decoder = zfec.Decoder(k, k + m)
        self._native_checksums = NativeEngine(k, m, engines()[0]) if HAVE_NATIVE else None

    def execute(self, work: CodingPass) -> None:
        """Fill the targets, the copies and the table of a pass."""
        length = next(iter(work.sources.values())).size
        if work.targets:
            coded = dict(list(work.sources.items())[: work.coded])
            for start in range(0, length, self.PIECE_BYTES):
                self._code(coded, work.targets, slice(start, start + self.PIECE_BYTES))
        for index, copy in work.copies.items():
            copy[:] = work.sources[index]
        if work.table is None:
            return
        fragments = work.sources | work.targets
        if self._native_checksums is not None:
            self._native_checksums.execute(
                CodingPass(
                    sources=fragments,
                    coded=1,
                    copies={},
                    targets={},
                    block_bytes=work.block_bytes,
                    table=work.table,
                    threads=work.threads,
                )
            )
            return
        for index, view in fragments.items():
            work.table[index] = _checksums(view, work.block_bytes)

    def _code(self, sources: Fragments, targets: Fragments, piece: slice) -> None:
        # zfec rebuilds data fragments only. Wanted parity fragments are encoded from these again.
        data = [view[piece] for view in sources.values()]
        if list(sources) != list(range(self._k)):
            data = self._decoder.decode(data, list(sources))
        for index in targets.keys() & range(self._k):
            targets[index][piece] = np.frombuffer(data[index], np.uint8)
        parity = [index for index in targets if index >= self._k]
        if parity:
            for index, encoded in zip(parity, self._encoder.encode(data, parity), strict=True):
                targets[index][piece] = np.frombuffer(encoded, np.uint8)


# -- checksums without the native module ----------------------------------------------------------

# A block is cut into this many lanes, whose CRC registers numpy advances side by side. It is a
# power of two, because `_joined` joins the registers in pairs.
_LANES = 1024


def _checksums(view: Bytes, block_bytes: int) -> Table:
    blocks = (view[at : at + block_bytes] for at in range(0, view.size, block_bytes))
    return np.array([_crc32c(block) for block in blocks], np.uint32)


def _crc32c(block: Bytes) -> int:
    """Return the CRC32C of a block: one register per lane, joined afterwards, then the tail."""
    lane_bytes = block.size // _LANES
    if lane_bytes == 0:
        return gf256.crc32c(block.tobytes())
    body = lane_bytes * _LANES
    columns = np.ascontiguousarray(block[:body].reshape(_LANES, lane_bytes).T)
    table = np.array(gf256.crc32c_table(), np.uint32)
    registers = np.zeros(_LANES, np.uint32)
    registers[0] = 0xFFFFFFFF  # CRC32C starts with all ones; only the first lane is at the start
    for column in columns:
        registers = registers >> 8 ^ table[(registers ^ column) & 0xFF]
    return gf256.crc32c(block[body:].tobytes(), _joined(registers, lane_bytes) ^ 0xFFFFFFFF)


def _joined(registers: Table, lane_bytes: int) -> int:
    """Return the register after all lanes, given the register after each lane on its own.

    A CRC is linear over GF(2): the register after lanes A and B is the register of A advanced by
    the length of B in zero bytes, XOR the register of B alone (as zlib's ``crc32_combine``).
    """
    # `zeros` is the 32 x 32 matrix of "advance by one lane of zero bytes": a column for each bit.
    zeros = np.uint32(1) << np.arange(32, dtype=np.uint32)
    table = np.array(gf256.crc32c_table(), np.uint32)
    for _ in range(lane_bytes):
        zeros = zeros >> 8 ^ table[zeros & 0xFF]
    while registers.size > 1:
        registers = _applied(zeros, registers[0::2]) ^ registers[1::2]
        zeros = _applied(zeros, zeros)
    return int(registers[0])


def _applied(columns: Table, registers: Table) -> Table:
    """Apply a linear map to registers, shape (N,); ``columns`` has its value for each bit."""
    bits = np.arange(32, dtype=np.uint32)
    chosen = np.where(registers[:, None] >> bits & 1, columns, np.uint32(0))
    joined: Table = np.bitwise_xor.reduce(chosen, axis=1)
    return joined
