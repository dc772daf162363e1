"""Codec(k, m): fragments and their checksums, into buffers that the caller owns.

A code makes n = k + m fragments of equal length: 0..k-1 are the data, k..n-1 are parity, and any k
of them give back all others. A fragment is checksummed in blocks of ``block_bytes``; a table of
checksums has shape (n, rows), dtype uint32, rows = ceil(length / block_bytes), and holds the CRC32C
of each block of each fragment. The last block may be short.

Encoding, rebuilding, restoring and verifying are one operation with other matrices: outputs are
linear combinations of inputs, and all of them are checksummed, and the inputs copied if wanted, in
the same pass over memory. ``engines.py`` has the ways to do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ecckpt.coding import gf256
from ecckpt.coding.engines import Fragments, Table, Work, engine_named
from ecckpt.errors import InvalidBuffer, InvalidCode
from ecckpt.memory.buffers import Buffer, WritableBuffer, byte_view, check_disjoint, usable_threads
from ecckpt.memory.native import AUTO, engines, resolved

__all__ = ["LARGEST_BLOCK_BYTES", "Codec", "Table", "engines"]

LARGEST_BLOCK_BYTES = 1 << 30


class Codec:
    """A Reed-Solomon code with k data and m parity fragments, byte for byte that of zfec.

    A codec holds no buffers and no state: threads may share it. Arguments of every method are
    checked before the first byte is written; while an engine works, the GIL is released (zfec: for
    the coding, not for checksums without the native module).

    All methods that code take ``threads``: so many may share the columns of the fragments, the
    calling one included (at least 1). Small fragments use fewer, there are never more than CPUs,
    and what comes out is the same for any number. The zfec engine codes in one.

    Buffers that are written, and are large, should start equally far from a multiple of 64 bytes,
    as those of one allocator do: others cost a quarter of the speed. They must not overlap any
    other buffer of the call; those that are only read may overlap each other. All of a call have
    the same length, 0 or more bytes, and are contiguous.

    Args:
        k: number of data fragments, at least 1.
        m: number of parity fragments, at least 0; k + m is at most 256.
        engine: one of ``engines()``, or "auto" for the first of them, unless the process prefers
            another (``native.prefer``).

    Raises:
        InvalidCode: k and m out of range, or an engine that is not usable here.
    """

    def __init__(self, k: int, m: int, *, engine: str = AUTO) -> None:
        if m < 0:
            raise InvalidCode(f"code with k = {k} data and m = {m} parity fragments: m >= 0 needed")
        gf256.check_code(k, k + m)
        name = resolved(engine)
        self._k, self._m = k, m
        self._engine = engine_named(name, k, m)

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
        self,
        data: Sequence[Buffer],
        parity: Sequence[WritableBuffer],
        block_bytes: int,
        *,
        copies: Sequence[WritableBuffer] = (),
        checksums: bool = True,
        threads: int = 1,
    ) -> Table:
        """Fill the parity fragments and return the checksums of all fragments.

        Args:
            data: k buffers; only read.
            parity: m writable buffers; overwritten.
            block_bytes: bytes that one checksum covers, 1 to 2^30.
            copies: none, or k writable buffers: the data are copied there in the same pass.
            checksums: False returns an empty table, shape (n, 0), a little sooner.
            threads: how many may share the work.

        Returns:
            The table of checksums, shape (n, rows); the caller owns it.

        Raises:
            InvalidBuffer: wrong numbers, lengths or kinds of buffers, or ones that overlap; nothing
                was written.
            InvalidConfig: ``threads`` is less than 1.
        """
        if len(data) != self.k or len(parity) != self.m or len(copies) not in (0, self.k):
            copied = f" and {len(copies)} copies" if copies else ""
            raise InvalidBuffer(
                f"{len(data)} data and {len(parity)} parity buffers{copied} "
                f"for a code with k = {self.k} and m = {self.m}"
            )
        present, missing = dict(enumerate(data)), dict(enumerate(parity, self.k))
        return self._run(
            present,
            missing,
            dict(enumerate(copies)),
            block_bytes,
            checksums=checksums,
            threads=usable_threads(threads),
        )

    def rebuild(
        self,
        present: Mapping[int, Buffer],
        missing: Mapping[int, WritableBuffer],
        block_bytes: int,
        *,
        copies: Mapping[int, WritableBuffer] | None = None,
        checksums: bool = True,
        threads: int = 1,
    ) -> Table:
        """Fill missing fragments from k present ones; return the checksums of all of these.

        Of the present fragments the k with the lowest indices are used, so data before parity; all
        are checksummed. The result is only as right as they are: compare their checksums.

        Args:
            present: buffers by fragment index; only read. At least k of them, unless nothing is
                missing.
            missing: writable buffers by fragment index (data, parity, or both); overwritten. May be
                empty.
            block_bytes: bytes that one checksum covers, 1 to 2^30.
            copies: writable buffers by index of a present fragment: that one is copied there in the
                same pass. So a restore copies the data that are there and rebuilds the others.
            checksums: False returns an empty table, shape (n, 0), a little sooner.
            threads: how many may share the work.

        Returns:
            The table of checksums, shape (n, rows), with zeros in the rows of fragments that are
            neither present nor missing; the caller owns it.

        Raises:
            InvalidBuffer: wrong indices, lengths or kinds of buffers, or ones that overlap; nothing
                was written.
            InvalidConfig: ``threads`` is less than 1.
        """
        copies = copies or {}
        if both := sorted(present.keys() & missing.keys()):
            raise InvalidBuffer(f"fragments {both} are given both as present and as missing")
        if absent := sorted(copies.keys() - present.keys()):
            raise InvalidBuffer(f"fragments {absent} are to be copied and not present")
        if missing and len(present) < self.k:
            raise InvalidBuffer(
                f"{len(present)} fragments present, {self.k} needed to rebuild {sorted(missing)}"
            )
        return self._run(
            present,
            missing,
            copies,
            block_bytes,
            checksums=checksums,
            threads=usable_threads(threads),
        )

    def verify(
        self,
        fragments: Mapping[int, Buffer],
        checksums: Table,
        block_bytes: int,
        *,
        threads: int = 1,
    ) -> list[tuple[int, int]]:
        """Return (fragment index, row) of every block that does not match its checksum, in order.

        Args:
            fragments: buffers by fragment index; only read.
            checksums: what they should be, uint32 of shape (n, rows); rows of other fragments are
                ignored.
            block_bytes: bytes that one checksum covers, 1 to 2^30.
            threads: how many may share the work.

        Raises:
            InvalidBuffer: wrong index, lengths, ``block_bytes``, or shape or type of the table.
            InvalidConfig: ``threads`` is less than 1.
        """
        table = self._run(
            fragments, {}, {}, block_bytes, checksums=True, threads=usable_threads(threads)
        )
        if checksums.shape != table.shape or checksums.dtype != np.uint32:
            raise InvalidBuffer(
                f"checksums are {checksums.dtype} of shape {checksums.shape}, "
                f"these fragments need uint32 of shape {table.shape}"
            )
        indices = sorted(fragments)
        bad = np.argwhere(table[indices] != checksums[indices])
        return [(indices[position], row) for position, row in bad.tolist()]

    def _run(
        self,
        present: Mapping[int, Buffer],
        missing: Mapping[int, WritableBuffer],
        copies: Mapping[int, WritableBuffer],
        block_bytes: int,
        *,
        checksums: bool,
        threads: int,
    ) -> Table:
        """Check everything, have the engine do the work, return the table."""
        if not 1 <= block_bytes <= LARGEST_BLOCK_BYTES:
            raise InvalidBuffer(
                f"block_bytes is {block_bytes:,}, it must be 1 to {LARGEST_BLOCK_BYTES:,}"
            )
        for index in (*present, *missing):
            if not 0 <= index < self.n:
                raise InvalidBuffer(f"fragment {index} of a code with fragments 0..{self.n - 1}")
        sources = _views(present, "fragment {}")
        targets = _views(missing, "fragment {}", writable=True)
        copied = _views(copies, "the copy of fragment {}", writable=True)
        length = _common_length(sources | targets, copied)
        check_disjoint(
            ((f"fragment {index}", view) for index, view in sources.items()),
            (
                *((f"fragment {index}", view) for index, view in targets.items()),
                *((f"the copy of fragment {index}", view) for index, view in copied.items()),
            ),
        )
        rows = -(-length // block_bytes) if checksums else 0
        table = np.zeros((self.n, rows), np.uint32)
        if sources:
            ordered = dict(sorted(sources.items()))  # those with the lowest indices are coded
            coded = self.k if targets else len(sources)
            wanted = table if checksums else None
            self._engine.run(Work(ordered, coded, copied, targets, block_bytes, wanted, threads))
        return table


def _views(buffers: Mapping[int, Buffer], name: str, *, writable: bool = False) -> Fragments:
    return {
        index: byte_view(buffer, name.format(index), writable=writable)
        for index, buffer in buffers.items()
    }


def _common_length(fragments: Fragments, copies: Fragments) -> int:
    named = {f"fragment {index}": view.size for index, view in fragments.items()}
    named |= {f"the copy of fragment {index}": view.size for index, view in copies.items()}
    first, length = next(iter(named.items()), ("", 0))
    for name, other in named.items():
        if other != length:
            raise InvalidBuffer(
                f"{name} has {other:,} bytes, {first} has {length:,}: all must be equal"
            )
    return length
