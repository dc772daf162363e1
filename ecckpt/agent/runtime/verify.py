"""Verification of this node's files, block by block, in memory and on disk.

Used for ``verify`` requests (service.py) and for scrubbing (driver.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ecckpt.agent.runtime.shard_bytes import bad_blocks
from ecckpt.errors import CorruptFragment, EcckptError, VersionMismatch
from ecckpt.format.block_ranges import span_of
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header, pack_table, parse_superblock
from ecckpt.protocol.http import Pace

if TYPE_CHECKING:
    from ecckpt.agent.records.entry import Entry
    from ecckpt.agent.storage.disk import DiskFile

_WINDOW_BYTES = 4 << 20

Blocks = list[tuple[int, int]]


def check_entry(entry: Entry, pace: Pace) -> Blocks:
    """(index, row) of the blocks of a pinned entry that fail their CRC32C.

    Raises ``CorruptFragment`` if the superblock, the table or the end mark has changed: the next
    agent would not adopt the file.
    """
    assert entry.table is not None
    header, view, bad = entry.header, entry.region.view, Blocks()
    superblock = bytes(view[:SUPERBLOCK_BYTES])
    trailer = view[header.trailer_offset : header.trailer_offset + header.trailer_bytes]
    _check_ends(header, superblock, bytes(trailer), pack_table(entry.table), entry.region.name)
    for index, rows, offset, length in windows(entry.header, _WINDOW_BYTES):
        start = SUPERBLOCK_BYTES + offset
        view = entry.region.view[start : start + length]
        bad += _shifted(bad_blocks(entry.header, index, view, entry.table, rows), rows)
        pace(length)
    return bad


def check_file(file: DiskFile, pace: Pace) -> Blocks:
    """(index, row) of the blocks on disk that fail their CRC32C.

    Raises ``CorruptFragment`` if the superblock or the table has changed, ``OSError`` if the file
    cannot be read.
    """
    header, bad = file.header, Blocks()
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        superblock = os.pread(descriptor, SUPERBLOCK_BYTES, 0)
        trailer = os.pread(descriptor, header.trailer_bytes, header.trailer_offset)
        name = file.path.name
        _check_ends(header, superblock, trailer, pack_table(file.table), name)
        buffer = memoryview(bytearray(min(_WINDOW_BYTES + header.block_bytes, header.file_bytes)))
        for index, rows, offset, length in windows(header, _WINDOW_BYTES):
            view = buffer[:length]
            got = os.preadv(descriptor, [view], SUPERBLOCK_BYTES + offset)
            if got != length:
                raise CorruptFragment(f"{name}: {got} of {length} bytes could be read")
            bad += _shifted(bad_blocks(header, index, view, file.table, rows), rows)
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
            pace(length)
    finally:
        os.close(descriptor)
    return bad


def verdict_on(file: DiskFile, pace: Pace) -> str:
    """What is wrong with a file on disk; empty if nothing is.

    A file that is not there is wrong too. If this agent has removed it, the core does not know it
    any more and ignores the verdict.
    """
    try:
        bad = check_file(file, pace)
    except FileNotFoundError:
        return f"{file.path.name} is not there any more"
    except (EcckptError, OSError) as error:
        return str(error)
    return f"{len(bad)} of {_block_count(file.header)} blocks fail their CRC32C" if bad else ""


def _check_ends(
    header: Header, superblock: bytes, trailer: bytes, packed: bytes, name: str
) -> None:
    """Check what lies before and behind the payload; the superblock's CRC covers its padding."""
    changed = f"{name}: the superblock has changed since it was written"
    try:
        found = parse_superblock(superblock, name)
    except VersionMismatch as error:  # this process wrote or read another version there
        raise CorruptFragment(changed) from error
    if found != header:
        raise CorruptFragment(changed)
    if trailer != packed:
        raise CorruptFragment(f"{name}: the table or end mark has changed since it was written")


def _block_count(header: Header) -> int:
    return header.rows * (header.k if header.index == HOME else 1)


def windows(header: Header, window_bytes: int) -> Iterator[tuple[int, slice, int, int]]:
    """Fragment, rows, offset in the payload and length of each window of a file, in order.

    A window has about ``window_bytes``, and at least one block.
    """
    step = max(1, window_bytes // header.block_bytes)
    for place, index in enumerate(range(header.k) if header.index == HOME else [header.index]):
        for first in range(0, header.rows, step):
            rows = slice(first, min(first + step, header.rows))
            span = span_of(header, rows)
            yield index, rows, place * header.fragment_bytes + span.start, span.stop - span.start


def _shifted(bad: Blocks, rows: slice) -> Blocks:
    return [(index, rows.start + row) for index, row in bad]
