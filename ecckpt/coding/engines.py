"""The ways to do the one operation that a codec has: native code, or zfec.

``Work`` says what is to be done: make targets as linear combinations of sources, copy sources, and
checksum both, block by block. The native engines in ``native/`` differ in speed only; zfec takes
over where they cannot be built. Everything in a ``Work`` has been checked.
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


@dataclass(frozen=True, slots=True)
class Work:
    """One pass over fragments of equal length, at least one of them a source.

    The first ``coded`` sources make the targets; if there are targets, these are k. ``copies`` are
    where some sources go as well, by the same index. ``table`` has a row for each fragment of the
    code, to be filled for sources and targets; None: no checksums are wanted.
    """

    sources: Fragments
    coded: int
    copies: Fragments
    targets: Fragments
    block_bytes: int
    table: Table | None
    threads: int


class Engine(Protocol):
    """A way to do such work."""

    name: str

    def run(self, work: Work) -> None:
        """Do all of it."""


def engine_named(name: str, k: int, m: int) -> Engine:
    """Return the engine of that name, one of ``engines()``, for a code."""
    return ZfecEngine(k, m) if name == "zfec" else NativeEngine(k, m, name)


@lru_cache(maxsize=64)
def _coefficients(k: int, n: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> bytes:
    return b"".join(gf256.decode_matrix(k, n, sources, targets))


class NativeEngine:
    """Any of the native ones: everything in one pass, without the GIL."""

    def __init__(self, k: int, m: int, name: str) -> None:
        self.name = name
        self._k, self._n = k, k + m

    def run(self, work: Work) -> None:
        """Do all of it."""
        sources, targets, table = work.sources, work.targets, work.table
        coefficients = b""
        if targets:
            coded = tuple(sources)[: work.coded]
            coefficients = _coefficients(self._k, self._n, coded, tuple(targets))
        rows = 0 if table is None else table.shape[1]
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
    """The independent codec, in one thread; what it does not do itself is done around it."""

    name = "zfec"

    # zfec allocates what it returns: pieces bound that, and fit the cache that it works in.
    PIECE_BYTES = 1 << 18

    def __init__(self, k: int, m: int) -> None:
        self._k = k
        self._encoder = zfec.Encoder(k, k + m)
        self._decoder = zfec.Decoder(k, k + m)
        self._native_checksums = NativeEngine(k, m, engines()[0]) if HAVE_NATIVE else None

    def run(self, work: Work) -> None:
        """Do all of it."""
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
            whole = Work(fragments, 1, {}, {}, work.block_bytes, work.table, work.threads)
            self._native_checksums.run(whole)
            return
        for index, view in fragments.items():
            work.table[index] = _checksums(view, work.block_bytes)

    def _code(self, sources: Fragments, targets: Fragments, piece: slice) -> None:
        data = [view[piece] for view in sources.values()]
        if list(sources) != list(range(self._k)):
            data = self._decoder.decode(data, list(sources))
        for index in targets.keys() & range(self._k):
            targets[index][piece] = np.frombuffer(data[index], np.uint8)
        parity = [index for index in targets if index >= self._k]
        if parity:
            for index, made in zip(parity, self._encoder.encode(data, parity), strict=True):
                targets[index][piece] = np.frombuffer(made, np.uint8)


# -- checksums without the native module ----------------------------------------------------------

_LANES = 1024


def _checksums(view: Bytes, block_bytes: int) -> Table:
    blocks = (view[at : at + block_bytes] for at in range(0, view.size, block_bytes))
    return np.array([_crc32c(block) for block in blocks], np.uint32)


def _crc32c(block: Bytes) -> int:
    """Return the CRC32C of a block: 1024 lanes side by side, then joined in pairs."""
    lane_bytes = block.size // _LANES
    if lane_bytes == 0:
        return gf256.crc32c(block.tobytes())
    body = lane_bytes * _LANES
    columns = np.ascontiguousarray(block[:body].reshape(_LANES, lane_bytes).T)
    table = np.array(gf256.crc32c_table(), np.uint32)
    registers = np.zeros(_LANES, np.uint32)
    registers[0] = 0xFFFFFFFF  # the start value belongs to the first lane only
    for column in columns:
        registers = registers >> 8 ^ table[(registers ^ column) & 0xFF]
    return gf256.crc32c(block[body:].tobytes(), _joined(registers, lane_bytes) ^ 0xFFFFFFFF)


def _joined(registers: Table, lane_bytes: int) -> int:
    """Return the register after all lanes, from the register that each lane alone leaves."""
    # What appending zero bytes does is linear: 32 columns, one for each bit of the register.
    zeros = np.uint32(1) << np.arange(32, dtype=np.uint32)
    table = np.array(gf256.crc32c_table(), np.uint32)
    for _ in range(lane_bytes):
        zeros = zeros >> 8 ^ table[zeros & 0xFF]
    while registers.size > 1:
        registers = _applied(zeros, registers[0::2]) ^ registers[1::2]
        zeros = _applied(zeros, zeros)
    return int(registers[0])


def _applied(columns: Table, registers: Table) -> Table:
    """Return a linear map of registers, given what it makes of each of the 32 bits."""
    bits = np.arange(32, dtype=np.uint32)
    chosen = np.where(registers[:, None] >> bits & 1, columns, np.uint32(0))
    joined: Table = np.bitwise_xor.reduce(chosen, axis=1)
    return joined
