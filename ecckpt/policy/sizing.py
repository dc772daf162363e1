"""Memory that a save needs on a node. Pure. The agent's core and simulations make budgets of it."""

from __future__ import annotations

import mmap

from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header


def parity_region_bytes(header: Header) -> int:
    """Size of the region of a shard's parity.

    The parity lies behind a superblock that stays void, so that an agent never adopts such a
    region.
    """
    return SUPERBLOCK_BYTES + header.m * header.fragment_bytes


def steady_bytes(header: Header, *, local_ranks: int, holders: int) -> int:
    """Bytes that a node needs to go on with saves like this one, as home and as holder.

    For each local rank: two generations of its home copy, two generations of as many peers'
    fragments as it sends out (the committed one is kept until the next is), and the parity of the
    save in progress.
    """
    fragments_bytes = holders * _whole_pages(header.at(0).file_bytes)
    home_bytes = _whole_pages(header.at(HOME).file_bytes)
    parity_bytes = _whole_pages(parity_region_bytes(header))
    return local_ranks * (2 * home_bytes + parity_bytes + 2 * fragments_bytes)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
