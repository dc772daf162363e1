"""What the memory tier asks of a tmpfs: regions, allocated up front and mapped.

``Tmpfs`` is the interface to the file system, as ``Volume`` is for disks, so that the
simulator runs the real memory tier on simulated memory. Used by memory_tier.py.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ecckpt.agent.storage.hugepages import HugePages
from ecckpt.agent.storage.notes_room import FULL, give_room, keep_room
from ecckpt.agent.storage.region import Region
from ecckpt.agent.storage.volume import Draft, FileSystem, Volume
from ecckpt.errors import TmpfsFull
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.memory.mapping import begin_huge, fault_in, map_file

_ZEROS = bytes(1 << 20)
_USE_BITS = 62
# The sticky bit has no effect on a regular file. It tells the next agent that a region is assigned.
_ASSIGNED_MODE = stat.S_IRUSR | stat.S_IWUSR | stat.S_ISVTX


class Tmpfs(Volume, Protocol):
    """A file system in memory, whose files can be mapped.

    ``uses`` are numbers that no region of it has had before.
    """

    uses: Iterator[int]

    def create(self, folder: Path, size_bytes: int, *, run: str) -> Region:
        """A new region of a run, all of its pages there. Raises ``TmpfsFull`` or ``NotMapped``."""

    def map(self, path: Path) -> Region:
        """A region that is there."""

    def mark_assigned(self, region: Region) -> None:
        """Mark a region as assigned, in its file too, for an agent that maps it later."""

    def keep_room(self, folder: Path) -> None:
        """Reserve room for notes in the folder, as far as there is any."""

    def draft_notes(self, path: Path, size_bytes: int) -> Draft:
        """As ``draft``, in the reserved room where there is no other."""

    def let_go(self) -> None:
        """On return, removed regions are mapped only by the processes that asked for them."""


class TmpfsFiles(FileSystem):
    """The operating system's."""

    def __init__(self) -> None:
        # What an earlier agent has counted is not known: it began somewhere else.
        self.uses: Iterator[int] = itertools.count(secrets.randbits(_USE_BITS))
        self._huge_pages = HugePages()

    def create(self, folder: Path, size_bytes: int, *, run: str) -> Region:
        """A region of whole pages, huge ones where the kernel has them.

        The run in its name is read only where the superblock cannot be: such a file must not block
        other runs.
        """
        free_bytes = self.room(folder)[1]
        if free_bytes < size_bytes:
            raise TmpfsFull(str(folder), need_bytes=size_bytes, free_bytes=free_bytes)
        path = folder / f"{run}@{secrets.token_hex(8)}.region"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)
            region = Region(path=path, size_bytes=size_bytes, view=map_file(descriptor, size_bytes))
            # Before all pages are allocated: huge pages are made out of an empty file.
            huge = begin_huge(descriptor, region.view)
            # Without this, the first touch of a page beyond the tmpfs limit would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            os.ftruncate(descriptor, 0)  # frees the room even while the mapping exists
            path.unlink()  # else it would stay until the next start of the agent
            if error.errno != errno.ENOSPC:
                raise
            raise TmpfsFull(
                str(folder), need_bytes=size_bytes, free_bytes=self.room(folder)[1]
            ) from error
        finally:
            os.close(descriptor)
        _fault_in(region)
        if not huge:
            self._huge_pages.want(region)
        return region

    def map(self, path: Path) -> Region:
        """As it lies there, on huge pages before long."""
        status = path.stat()
        with path.open("r+b") as file:
            region = Region(
                path=path, size_bytes=status.st_size, view=map_file(file.fileno(), status.st_size)
            )
        region.assigned = bool(status.st_mode & stat.S_ISVTX)
        self._huge_pages.want(region)
        return region

    def mark_assigned(self, region: Region) -> None:
        """By a bit of its mode."""
        region.path.chmod(_ASSIGNED_MODE)
        region.assigned = True

    def keep_room(self, folder: Path) -> None:
        """A few small files (notes_room.py)."""
        keep_room(folder)

    def draft_notes(self, path: Path, size_bytes: int) -> Draft:
        """All of its pages are allocated here, so that writing needs no more."""
        while True:
            try:
                return self.draft(path, size_bytes)
            except OSError as error:
                if error.errno not in FULL or not give_room(path.parent):
                    raise

    def let_go(self) -> None:
        """Not even to make its pages huge."""
        self._huge_pages.let_go()


def whole_pages(size_bytes: int) -> int:
    """Bytes that a region of that size occupies."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def void(region: Region) -> None:
    """Clear the superblock: no reader takes the region for what it held before."""
    region.view[:SUPERBLOCK_BYTES] = bytes(SUPERBLOCK_BYTES)


def _fault_in(region: Region) -> None:
    try:
        fault_in(region.view)
    except OSError:  # before Linux 5.14: writing zeros does the same, slower
        for start in range(0, region.size_bytes, len(_ZEROS)):
            stop = min(start + len(_ZEROS), region.size_bytes)
            region.view[start:stop] = _ZEROS[: stop - start]
