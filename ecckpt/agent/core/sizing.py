"""How much memory a save needs. Pure."""

from __future__ import annotations

import mmap

from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header


def parity_region_bytes(header: Header) -> int:
    """Size of a parity region: behind a void superblock, so that no parity is taken for one."""
    return SUPERBLOCK_BYTES + header.m * header.fragment_bytes


def steady_bytes(header: Header, *, local_ranks: int, holders: int) -> int:
    """Bytes that a node needs for saves like this one, as home and as holder.

    Two generations of home copies and of as many peers' fragments as it sends out, and the parity
    of the save in progress.
    """
    fragments_bytes = holders * _whole_pages(header.at(0).file_bytes)
    home_bytes = _whole_pages(header.at(HOME).file_bytes)
    parity_bytes = _whole_pages(parity_region_bytes(header))
    return local_ranks * (2 * home_bytes + parity_bytes + 2 * fragments_bytes)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
