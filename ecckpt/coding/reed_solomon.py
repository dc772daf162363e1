"""``Codec(k, m)``: computes fragments and their checksums into buffers of the caller.

The agent encodes, rebuilds and verifies with it; ``client/read`` and ``client/restore`` decode.

A code has n = k + m fragments of equal length: 0..k-1 are data, k..n-1 are parity. Any k of them
determine all others. Each fragment is checksummed in blocks of ``block_bytes``; the last block may
be shorter. A table of checksums has shape (n, rows), dtype uint32, rows = ceil(length /
block_bytes), and holds the CRC32C of each block of each fragment.

Encoding, rebuilding, restoring and verifying are the same operation with different matrices: each
output is a linear combination of inputs. One pass over memory computes the outputs, checksums
inputs and outputs, and copies the inputs if asked to. ``engines.py`` has its implementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ecckpt.coding import gf256
from ecckpt.coding.engines import CodingPass, Fragments, Table, engine_named
from ecckpt.errors import InvalidBuffer, InvalidCode
from ecckpt.memory.buffers import Buffer, WritableBuffer, byte_view, check_disjoint, usable_threads
from ecckpt.memory.native import AUTO, engines, resolved

__all__ = ["LARGEST_BLOCK_BYTES", "Codec", "Table", "engines"]

LARGEST_BLOCK_BYTES = 1 << 30


class Codec:
    """A systematic Reed-Solomon code over GF(2^8); its fragments equal zfec's byte for byte.

    The code is the one of ``gf256`` (Rizzo, 1997).

    A codec keeps no buffers and no state between calls, so threads may share it. Each method checks
    its arguments before the first byte is written. The GIL is released while an engine works; the
    zfec engine holds it for checksums if the native module is missing.

    ``threads`` is the largest number of threads to use, the calling thread included (at least 1).
    The threads share the columns of the fragments. Small fragments use fewer; the number never
    exceeds the number of CPUs. The result does not depend on it. The zfec engine codes in one
    thread.

    All buffers of one call are contiguous and have the same length, 0 or more bytes. A buffer that
    is written must not overlap any other one; buffers that are only read may overlap each other.
    Large buffers that are written should have the same address modulo 64 bytes, as those of one
    allocator do: with others coding is a quarter slower.

    Args:
        k: number of data fragments, at least 1.
        m: number of parity fragments, at least 0; k + m is at most 256.
        engine: one of ``engines()``, or "auto". "auto" is the first of them, unless
            ``native.prefer`` chose another for the process.

    Raises:
        InvalidCode: k or m is out of range, or this machine cannot run the engine.
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
        """Name of the engine in use; never "auto"."""
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
        """Compute the parity fragments, and return the checksums of all fragments.

        The caller owns all buffers.

        Args:
            data: k buffers; only read.
            parity: m writable buffers; overwritten.
            block_bytes: bytes that one checksum covers, 1 to 2^30.
            copies: empty, or k writable buffers that receive the data in the same pass.
            checksums: False skips the checksums, which is a little faster, and returns an empty
                table, shape (n, 0).
            threads: the largest number of threads to use.

        Returns:
            The table of checksums, shape (n, rows), dtype uint32; the caller owns it.

        Raises:
            InvalidBuffer: the number, length or type of buffers is wrong, or they overlap. Nothing
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
        return self._check_and_execute(
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
        """Compute missing fragments from k present ones, and return the checksums of all of them.

        The k present fragments with the lowest indices are combined, so data before parity; all
        present fragments are checksummed. A wrong byte in a present fragment makes wrong bytes in
        the missing ones: the caller compares the returned checksums with those it has stored.

        The caller owns all buffers.

        Args:
            present: buffers by fragment index; only read. At least k of them, unless ``missing`` is
                empty.
            missing: writable buffers by fragment index (data, parity, or both); overwritten. May be
                empty.
            block_bytes: bytes that one checksum covers, 1 to 2^30.
            copies: writable buffers by index of a present fragment, which receive its bytes in the
                same pass. A restore copies the data fragments that exist and rebuilds the others.
            checksums: False skips the checksums, which is a little faster, and returns an empty
                table, shape (n, 0).
            threads: the largest number of threads to use.

        Returns:
            The table of checksums, shape (n, rows), dtype uint32. Rows of fragments that are
            neither present nor missing are zero. The caller owns it.

        Raises:
            InvalidBuffer: an index, a length or a type of buffer is wrong, or they overlap. Nothing
                was written.
            InvalidConfig: ``threads`` is less than 1.
        """
        copies = copies or {}
        if both := sorted(present.keys() & missing.keys()):
            raise InvalidBuffer(f"fragments {both} are given both as present and as missing")
        if absent := sorted(copies.keys() - present.keys()):
            raise InvalidBuffer(f"fragments {absent} have a copy buffer but are not present")
        if missing and len(present) < self.k:
            raise InvalidBuffer(
                f"{len(present)} fragments present, {self.k} needed to rebuild {sorted(missing)}"
            )
        return self._check_and_execute(
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
        """Return every block that does not match its checksum.

        Args:
            fragments: buffers by fragment index; only read, owned by the caller.
            checksums: the expected table, uint32 of shape (n, rows). Rows of fragments that are not
                given are ignored.
            block_bytes: bytes that one checksum covers, 1 to 2^30.
            threads: the largest number of threads to use.

        Returns:
            Pairs (fragment index, row) in ascending order.

        Raises:
            InvalidBuffer: an index, a length, ``block_bytes``, or the shape or dtype of the table
                is wrong.
            InvalidConfig: ``threads`` is less than 1.
        """
        table = self._check_and_execute(
            fragments, {}, {}, block_bytes, checksums=True, threads=usable_threads(threads)
        )
        if checksums.shape != table.shape or checksums.dtype != np.uint32:
            raise InvalidBuffer(
                f"the checksums are {checksums.dtype} of shape {checksums.shape}, "
                f"but these fragments need uint32 of shape {table.shape}"
            )
        indices = sorted(fragments)
        bad = np.argwhere(table[indices] != checksums[indices])
        return [(indices[position], row) for position, row in bad.tolist()]

    def _check_and_execute(
        self,
        present: Mapping[int, Buffer],
        missing: Mapping[int, WritableBuffer],
        copies: Mapping[int, WritableBuffer],
        block_bytes: int,
        *,
        checksums: bool,
        threads: int,
    ) -> Table:
        """Check all arguments, have the engine execute the pass, and return the table."""
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
            self._engine.execute(
                CodingPass(
                    # In order of the index: data fragments cost nothing to decode, so that they
                    # are combined before parity.
                    sources=dict(sorted(sources.items())),
                    coded=self.k if targets else len(sources),
                    copies=copied,
                    targets=targets,
                    block_bytes=block_bytes,
                    table=table if checksums else None,
                    threads=threads,
                )
            )
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
