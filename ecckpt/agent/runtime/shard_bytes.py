"""The bytes of a shard in its regions: encode, verify, seal. No files, no network.

Used by the driver and its helpers, and by simulations with the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ecckpt.agent.records.entry import Entry
from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import CorruptFragment
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES, Header, pack_superblock, pack_table

if TYPE_CHECKING:
    from ecckpt.agent.storage.region import Region


def data_views(header: Header, region: Region) -> list[memoryview]:
    """The k data fragments of a home copy, as views of its region."""
    return _pieces(region.view[SUPERBLOCK_BYTES:], header.fragment_bytes, header.k)


def parity_views(header: Header, region: Region | None) -> list[memoryview]:
    """The m parity fragments in a parity region, as views of it; none without a region."""
    if region is None:
        return []
    return _pieces(region.view[SUPERBLOCK_BYTES:], header.fragment_bytes, header.m)


def fragment_view(header: Header, region: Region) -> memoryview:
    """The fragment in a region of its own."""
    return region.view[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + header.fragment_bytes]


def encode_home(header: Header, home: Region, parity: Region | None) -> np.ndarray:
    """Fill ``parity`` from a home copy; returns the checksum table, uint32 (n, rows).

    Raises ``CorruptFragment`` if what lies behind the shard is not zeros: it would be coded, too.
    """
    payload = home.view[SUPERBLOCK_BYTES:][: header.k * header.fragment_bytes]
    if np.frombuffer(payload[header.shard_bytes :], np.uint8).any():
        raise CorruptFragment(f"{header.shard}: the padding behind the shard is not zeros")
    return Codec(header.k, header.m).encode(
        data_views(header, home), parity_views(header, parity), header.block_bytes
    )


def seal(entry: Entry) -> None:
    """Complete a file: table and end mark first, superblock last.

    If the process is killed in between, the superblock is still void, and the next agent does not
    take the file for a complete one.
    """
    header, view, table = entry.header, entry.region.view, entry.table
    assert table is not None
    trailer = pack_table(table)
    view[header.trailer_offset : header.trailer_offset + len(trailer)] = trailer
    view[:SUPERBLOCK_BYTES] = pack_superblock(header)


def sums_of(header: Header, view: memoryview) -> np.ndarray:
    """The CRC32C of each block of a fragment, uint32 (rows,). ``view`` begins with a block."""
    table = Codec(header.k, header.m).rebuild({0: view}, {}, header.block_bytes)
    return np.asarray(table[0])


def bad_blocks(
    header: Header, index: int, view: memoryview, table: np.ndarray, rows: slice | None = None
) -> list[tuple[int, int]]:
    """(index, row) of the blocks that fail their CRC32C.

    ``view`` is the whole fragment, or only these ``rows`` of it; rows are counted from the first of
    them.
    """
    sums = table if rows is None else table[:, rows]
    return Codec(header.k, header.m).verify({index: view}, sums, header.block_bytes)


def _pieces(view: memoryview, piece_bytes: int, count: int) -> list[memoryview]:
    return [view[at * piece_bytes : (at + 1) * piece_bytes] for at in range(count)]
