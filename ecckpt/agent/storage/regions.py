"""Regions: files of a tmpfs, made whole and mapped; and what the memory tier asks of a tmpfs.

A *region* is one file; its name never changes, what it is follows from its own superblock. What is
asked stands behind one type, as ``volume.py`` does for disks, so that the simulator can put memory
that is made up under the real tier.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ecckpt.agent.storage.hugepages import HugePages
from ecckpt.agent.storage.volume import FileSystem, Volume
from ecckpt.errors import TmpfsFull
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.memory.mapping import begin_huge, fault_in, map_file

_ZEROS = bytes(1 << 20)
_USE_BITS = 62
# The sticky bit means nothing for a file: it is what tells the next agent, and changes no access.
_ASSIGNED_MODE = stat.S_IRUSR | stat.S_IWUSR | stat.S_ISVTX


@dataclass(eq=False, slots=True, weakref_slot=True)
class Region:
    """One file of the tier, mapped for as long as the object lives.

    ``use`` is another number each time that somebody takes it, in any process. One that is
    ``assigned`` is what somebody's tensors lie in: nobody writes to it, and it is never recycled.
    """

    path: Path
    size_bytes: int
    view: memoryview = field(repr=False)
    use: int = 0
    assigned: bool = False

    @property
    def name(self) -> str:
        """The region's name for life."""
        return self.path.stem


class Tmpfs(Volume, Protocol):
    """A file system in memory, whose files can be mapped.

    ``uses`` are numbers that no region of it has had before.
    """

    uses: Iterator[int]

    def create(self, folder: Path, size_bytes: int) -> Region:
        """A new region, all of its pages there. Raises ``TmpfsFull`` or ``NotMapped``."""

    def map(self, path: Path) -> Region:
        """A region that is there."""

    def mark_assigned(self, region: Region) -> None:
        """Have the region ``assigned``, and whoever maps it know that."""

    def let_go(self) -> None:
        """On return regions that were removed are mapped by those who asked for them alone."""


class TmpfsFiles(FileSystem):
    """The operating system's."""

    def __init__(self) -> None:
        # What an earlier agent has counted is not known: it began somewhere else.
        self.uses: Iterator[int] = itertools.count(secrets.randbits(_USE_BITS))
        self._huge_pages = HugePages()

    def create(self, folder: Path, size_bytes: int) -> Region:
        """A region of whole pages, huge ones where the kernel has them."""
        free_bytes = self.room(folder)[1]
        if free_bytes < size_bytes:
            raise TmpfsFull(str(folder), need_bytes=size_bytes, free_bytes=free_bytes)
        path = folder / f"{secrets.token_hex(8)}.region"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)
            region = Region(path, size_bytes, map_file(descriptor, size_bytes))
            huge = begin_huge(descriptor, region.view)
            # Past the tmpfs limit the first touch of a page that is not there would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            os.ftruncate(descriptor, 0)  # room now, however long the mapping may be referred to
            path.unlink()  # nobody would find it before the next start
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
            region = Region(path, status.st_size, map_file(file.fileno(), status.st_size))
        region.assigned = bool(status.st_mode & stat.S_ISVTX)
        self._huge_pages.want(region)
        return region

    def mark_assigned(self, region: Region) -> None:
        """By a bit of its mode."""
        region.path.chmod(_ASSIGNED_MODE)
        region.assigned = True

    def let_go(self) -> None:
        """Not even to make its pages huge."""
        self._huge_pages.let_go()


def whole_pages(size_bytes: int) -> int:
    """What a region of that many bytes occupies."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def void(region: Region) -> None:
    """Make the region anonymous: no reader takes it for what it was."""
    region.view[:SUPERBLOCK_BYTES] = bytes(SUPERBLOCK_BYTES)


def _fault_in(region: Region) -> None:
    try:
        fault_in(region.view)
    except OSError:  # before Linux 5.14: writing does the same, slower
        for start in range(0, region.size_bytes, len(_ZEROS)):
            stop = min(start + len(_ZEROS), region.size_bytes)
            region.view[start:stop] = _ZEROS[: stop - start]
