"""Codec(k, m): fragments and their checksums, into buffers that the caller owns.

A code makes n = k + m fragments of equal length: 0..k-1 are the data, k..n-1 are parity, and any k
of them give back all others. A fragment is checksummed in blocks of ``block_bytes``; a table of
checksums has shape (n, rows), dtype uint32, rows = ceil(length / block_bytes), and holds the CRC32C
of each block of each fragment. The last block may be short.

Encoding, rebuilding and verifying are one operation with other matrices: outputs are linear
combinations of inputs, and all of them are checksummed in the same pass over memory. An engine
provides that operation; the native ones in ``native/`` differ in speed only, and zfec takes over
where they cannot be built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import zfec
from numpy.typing import NDArray

from ecckpt import gf256
from ecckpt.copying import (
    HAVE_NATIVE,
    Buffer,
    Bytes,
    WritableBuffer,
    byte_view,
    check_disjoint,
)
from ecckpt.errors import InvalidBuffer, InvalidCode

if HAVE_NATIVE:
    from ecckpt import _native

Table = NDArray[np.uint32]
Fragments = dict[int, Bytes]

LARGEST_BLOCK_BYTES = 1 << 30


def engines() -> tuple[str, ...]:
    """Return the names of the engines usable here, best first; "zfec" is always the last."""
    return (*_native.engine_names(), "zfec") if HAVE_NATIVE else ("zfec",)


# -- the codec ------------------------------------------------------------------------------------


class Codec:
    """A Reed-Solomon code with k data and m parity fragments, byte for byte that of zfec.

    A codec holds no buffers and no state: threads may share it. Arguments of every method are
    checked before the first byte is written; while an engine works, the GIL is released (zfec: for
    the coding, not for checksums without the native module).

    Args:
        k: number of data fragments, at least 1.
        m: number of parity fragments, at least 0; k + m is at most 256.
        engine: one of ``engines()``, or "auto" for the first of them.

    Raises:
        InvalidCode: k and m out of range, or an engine that is not usable here.
    """

    def __init__(self, k: int, m: int, *, engine: str = "auto") -> None:
        if m < 0:
            raise InvalidCode(f"code with k = {k} data and m = {m} parity fragments: m >= 0 needed")
        gf256.check_code(k, k + m)
        usable = engines()
        if engine != "auto" and engine not in usable:
            raise InvalidCode(
                f"engine {engine!r} is not usable here", hint=f"auto, {', '.join(usable)} are"
            )
        self._k, self._m = k, m
        name = usable[0] if engine == "auto" else engine
        self._engine: _Engine = _ZfecEngine(k, m) if name == "zfec" else _NativeEngine(k, m, name)

    def __repr__(self) -> str:
        return f"Codec({self.k}, {self.m}, engine={self.engine!r})"

    @property
    def k(self) -> int:
        """Number of data fragments."""
        return self._k

    @property
    def m(self) -> int:
        """Number of parity fragments."""
        return self._m

    @property
    def n(self) -> int:
        """Number of all fragments."""
        return self._k + self._m

    @property
    def engine(self) -> str:
        """Name of the engine in use, never "auto"."""
        return self._engine.name

    def encode(
        self, data: Sequence[Buffer], parity: Sequence[WritableBuffer], block_bytes: int
    ) -> Table:
        """Fill the parity fragments and return the checksums of all fragments.

        Args:
            data: k contiguous buffers of equal length (0 or more bytes); only read; they may
                overlap each other.
            parity: m writable contiguous buffers of that length; overwritten. They must not overlap
                the data or each other. Large ones should start on a multiple of 64 bytes: others
                cost a fifth of the speed.
            block_bytes: bytes that one checksum covers, 1 to 2^30.

        Returns:
            The table of checksums, shape (n, rows); the caller owns it.

        Raises:
            InvalidBuffer: anything else than the above; nothing was written.
        """
        if len(data) != self.k or len(parity) != self.m:
            raise InvalidBuffer(
                f"{len(data)} data and {len(parity)} parity buffers "
                f"for a code with k = {self.k} and m = {self.m}"
            )
        table, sources, targets = self._checked(
            dict(enumerate(data)), dict(enumerate(parity, self.k)), block_bytes
        )
        self._engine.run(sources, targets, block_bytes, table)
        return table

    def rebuild(
        self,
        present: Mapping[int, Buffer],
        missing: Mapping[int, WritableBuffer],
        block_bytes: int,
    ) -> Table:
        """Fill missing fragments from k present ones; return the checksums of all of these.

        Of the present fragments the k with the lowest indices are used, so data before parity; all
        are checksummed. The result is only as right as they are: compare their checksums.

        Args:
            present: contiguous buffers of equal length, by fragment index; only read; they may
                overlap each other. At least k of them, unless nothing is missing.
            missing: writable contiguous buffers of that length, by fragment index (data, parity, or
                both); overwritten. They must not overlap any other buffer. May be empty.
            block_bytes: bytes that one checksum covers, 1 to 2^30.

        Returns:
            The table of checksums, shape (n, rows), with zeros in the rows of fragments that are
            neither present nor missing; the caller owns it.

        Raises:
            InvalidBuffer: anything else than the above; nothing was written.
        """
        if both := sorted(present.keys() & missing.keys()):
            raise InvalidBuffer(f"fragments {both} are given both as present and as missing")
        if missing and len(present) < self.k:
            raise InvalidBuffer(
                f"{len(present)} fragments present, {self.k} needed to rebuild {sorted(missing)}"
            )
        table, sources, targets = self._checked(present, missing, block_bytes)
        used = sorted(sources)[: self.k] if targets else []
        if targets:
            chosen = {index: sources[index] for index in used}
            self._engine.run(chosen, targets, block_bytes, table)
        others = {index: sources[index] for index in sorted(sources.keys() - set(used))}
        if others:
            self._engine.run(others, {}, block_bytes, table)
        return table

    def verify(
        self, fragments: Mapping[int, Buffer], checksums: Table, block_bytes: int
    ) -> list[tuple[int, int]]:
        """Return (fragment index, row) of every block that does not match its checksum, in order.

        Args:
            fragments: contiguous buffers of equal length, by fragment index; only read.
            checksums: what they should be, uint32 of shape (n, rows); rows of other fragments are
                ignored.
            block_bytes: bytes that one checksum covers, 1 to 2^30.

        Raises:
            InvalidBuffer: wrong index, lengths, ``block_bytes``, or shape or type of the table.
        """
        table, sources, _ = self._checked(fragments, {}, block_bytes)
        if checksums.shape != table.shape or checksums.dtype != np.uint32:
            raise InvalidBuffer(
                f"checksums are {checksums.dtype} of shape {checksums.shape}, "
                f"these fragments need uint32 of shape {table.shape}"
            )
        if sources:
            self._engine.run(sources, {}, block_bytes, table)
        indices = sorted(sources)
        bad = np.argwhere(table[indices] != checksums[indices])
        return [(indices[position], row) for position, row in bad.tolist()]

    def _checked(
        self, sources: Mapping[int, Buffer], targets: Mapping[int, WritableBuffer], block_bytes: int
    ) -> tuple[Table, Fragments, Fragments]:
        """Return an empty table and the views of all buffers, or raise InvalidBuffer."""
        if not 1 <= block_bytes <= LARGEST_BLOCK_BYTES:
            raise InvalidBuffer(
                f"block_bytes is {block_bytes:,}, it must be 1 to {LARGEST_BLOCK_BYTES:,}"
            )
        for index in (*sources, *targets):
            if not 0 <= index < self.n:
                raise InvalidBuffer(f"fragment {index} of a code with fragments 0..{self.n - 1}")
        source_views = {i: byte_view(b, f"fragment {i}") for i, b in sources.items()}
        target_views = {i: byte_view(b, f"fragment {i}", writable=True) for i, b in targets.items()}
        lengths = {i: view.size for i, view in (source_views | target_views).items()}
        length = next(iter(lengths.values()), 0)
        for index, other in lengths.items():
            if other != length:
                raise InvalidBuffer(
                    f"fragment {index} has {other:,} bytes, "
                    f"fragment {next(iter(lengths))} has {length:,}: all must be equal"
                )
        check_disjoint(
            ((f"fragment {i}", view) for i, view in source_views.items()),
            ((f"fragment {i}", view) for i, view in target_views.items()),
        )
        rows = -(-length // block_bytes)
        return np.zeros((self.n, rows), np.uint32), source_views, target_views


# -- engines --------------------------------------------------------------------------------------


class _Engine(Protocol):
    """How the one operation is done."""

    name: str

    def run(self, sources: Fragments, targets: Fragments, block_bytes: int, table: Table) -> None:
        """Make targets from sources, and fill the rows of both in the table of checksums.

        Everything is checked. There is at least one source, and exactly k when there are targets.
        """


@lru_cache(maxsize=64)
def _coefficients(k: int, n: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> bytes:
    return b"".join(gf256.decode_matrix(k, n, sources, targets))


class _NativeEngine:
    def __init__(self, k: int, m: int, name: str) -> None:
        self.name = name
        self._k, self._n = k, k + m

    def run(self, sources: Fragments, targets: Fragments, block_bytes: int, table: Table) -> None:
        coefficients = b""
        if targets:
            coefficients = _coefficients(self._k, self._n, tuple(sources), tuple(targets))
        rows = table.shape[1]
        source_checksums = np.empty((len(sources), rows), np.uint32)
        target_checksums = np.empty((len(targets), rows), np.uint32)
        _native.code(
            self.name,
            coefficients,
            list(sources.values()),
            list(targets.values()),
            block_bytes,
            source_checksums,
            target_checksums,
        )
        table[list(sources)] = source_checksums
        table[list(targets)] = target_checksums


class _ZfecEngine:
    name = "zfec"

    # zfec allocates what it returns: pieces bound that, and fit the cache that it works in.
    PIECE_BYTES = 1 << 18

    def __init__(self, k: int, m: int) -> None:
        self._k = k
        self._encoder = zfec.Encoder(k, k + m)
        self._decoder = zfec.Decoder(k, k + m)
        self._native_checksums = _NativeEngine(k, m, engines()[0]) if HAVE_NATIVE else None

    def run(self, sources: Fragments, targets: Fragments, block_bytes: int, table: Table) -> None:
        length = next(iter(sources.values())).size
        if targets:
            for start in range(0, length, self.PIECE_BYTES):
                self._code(sources, targets, slice(start, start + self.PIECE_BYTES))
        fragments = sources | targets
        if self._native_checksums is not None:
            self._native_checksums.run(fragments, {}, block_bytes, table)
            return
        for index, view in fragments.items():
            table[index] = _checksums(view, block_bytes)

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
