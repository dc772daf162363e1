"""The memory tier: files in tmpfs, allocated up front, faulted in once, then recycled.

A *region* is one file under ``<root>/regions``. Its name never changes; its superblock says what it
holds now. Fresh pages cost several times a copy, so a region that is given up is kept spare for the
next allocation instead of being freed.

    allocate --> in use --recycle: superblock void--> spare --allocate--> in use, with a new ``use``
                   |                                    |
                   +-- discard: unlinked                +-- release, or room needed: unlinked

Used by runtime/region_store.py.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from ecckpt.agent.storage.budget import Accounts
from ecckpt.agent.storage.hugepages import HugePages
from ecckpt.errors import NotMapped, TmpfsFull
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.memory.mapping import begin_huge, fault_in, map_file

_ZEROS = bytes(1 << 20)
_USE_BITS = 62
# The sticky bit has no effect on a regular file. It tells the next agent that a region is assigned.
_ASSIGNED_MODE = stat.S_IRUSR | stat.S_IWUSR | stat.S_ISVTX


@dataclass(eq=False, slots=True, weakref_slot=True)
class Region:
    """One file of the tier, mapped as long as the object lives.

    ``use`` is drawn anew each time that the region is allocated, also by later processes: a trainer
    that has mapped the region compares it to learn whether the content is still the one it knew.
    The tensors of some process lie in an ``assigned`` region: it is never written to again, and
    never recycled.
    """

    path: Path
    size_bytes: int
    view: memoryview = field(repr=False)
    _: KW_ONLY
    use: int = 0
    assigned: bool = False

    @property
    def name(self) -> str:
        """The name of the region, which never changes."""
        return self.path.stem


class MemoryTier:
    """All regions of one agent, by run, within budgets (budget.py). Thread-safe."""

    def __init__(self, root: Path, *, node: str) -> None:
        self._folder = root / "regions"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._accounts: Accounts[Region] = Accounts(node)
        self._huge_pages = HugePages()
        # Starts at a random number, so that it repeats no ``use`` that an earlier agent gave out.
        self._uses = itertools.count(secrets.randbits(_USE_BITS))

    def default_budget_bytes(self) -> int:
        """Half of the tmpfs: what a run may use unless it says otherwise."""
        size = os.statvfs(self._folder)
        return size.f_frsize * size.f_blocks // 2

    def used_bytes(self, run: str) -> int:
        """Bytes of the run's regions, spare ones included."""
        with self._lock:
            return self._accounts.used_bytes(run)

    def allocate(self, run: str, size_bytes: int, *, budget_bytes: int, what: str) -> Region:
        """A region of at least that size, its superblock void and its other bytes undefined.

        Takes a spare region that fits, or creates one and frees spare ones where the budget
        requires it. Raises ``MemoryBudgetTooSmall``, ``TmpfsFull`` or ``NotMapped``; the tier is
        then as before.
        """
        size_bytes = whole_pages(size_bytes)
        with self._lock:
            region = self._accounts.take(run, size_bytes)
            if region is not None:
                region.use = next(self._uses)
                return region
            self._make_room(run, size_bytes, budget_bytes, what)
        try:
            region = self._create_at_any_price(size_bytes)
        except BaseException:
            with self._lock:
                self._accounts.release(run, size_bytes)
            raise
        region.use = next(self._uses)
        return region

    def take_spare(self, run: str, size_bytes: int) -> Region | None:
        """As ``allocate``, but only a spare region; None if none fits."""
        with self._lock:
            region = self._accounts.take(run, whole_pages(size_bytes))
            if region is not None:
                region.use = next(self._uses)
            return region

    def recycle(self, run: str, region: Region) -> None:
        """Make a region spare. The caller guarantees that no process reads or writes it."""
        assert not region.assigned, region
        void(region)  # before it is spare: it may be allocated again at once
        with self._lock:
            self._accounts.keep(run, region)

    def discard(self, run: str, region: Region) -> None:
        """Unlink a region: another process may still have it mapped."""
        region.path.unlink(missing_ok=True)
        with self._lock:
            self._accounts.release(run, region.size_bytes)

    def assign(self, region: Region) -> None:
        """Mark a region in use as assigned, in its file too, for an agent that adopts it."""
        region.path.chmod(_ASSIGNED_MODE)
        region.assigned = True

    def release(self, run: str) -> None:
        """Give the spare regions of a run back to the system."""
        with self._lock:
            spares = self._accounts.spares(run)
        for _, region in spares:
            region.path.unlink(missing_ok=True)

    def found(self) -> Iterator[Path]:
        """Region files in the tier's folder, whether this process knows them or not."""
        return iter(sorted(self._folder.glob("*.region")))

    def adopt(self, run: str, path: Path) -> Region:
        """Take over a region that an earlier agent left."""
        status = path.stat()
        region = _map(path, status.st_size)
        region.use = next(self._uses)
        region.assigned = bool(status.st_mode & stat.S_ISVTX)
        self._huge_pages.want(region)
        with self._lock:
            self._accounts.adopt(run, region)
        return region

    def _make_room(self, run: str, size_bytes: int, budget_bytes: int, what: str) -> None:
        """Count a new region in. Spare regions freed for it are unmapped on return."""
        for freed in self._accounts.reserve(run, size_bytes, budget_bytes=budget_bytes, what=what):
            freed.path.unlink(missing_ok=True)

    def _create_at_any_price(self, size_bytes: int) -> Region:
        """A new region. If memory is full, the spare regions of all runs are freed first."""
        try:
            return self._create(size_bytes)
        except (TmpfsFull, NotMapped):
            if not self._drop_spares():
                raise
            return self._create(size_bytes)

    def _drop_spares(self) -> int:
        """Free all spare regions and return their number. They are unmapped on return."""
        with self._lock:
            spares = self._accounts.spares()
        count = len(spares)
        while spares:
            _, region = spares.pop()
            region.path.unlink(missing_ok=True)
            del region
        self._huge_pages.let_go()
        return count

    def _free_bytes(self) -> int:
        size = os.statvfs(self._folder)
        return size.f_frsize * size.f_bavail

    def _create(self, size_bytes: int) -> Region:
        free_bytes = self._free_bytes()
        if free_bytes < size_bytes:
            raise TmpfsFull(str(self._folder), need_bytes=size_bytes, free_bytes=free_bytes)
        path = self._folder / f"{secrets.token_hex(8)}.region"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)
            region = Region(path, size_bytes, map_file(descriptor, size_bytes))
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
                str(self._folder), need_bytes=size_bytes, free_bytes=self._free_bytes()
            ) from error
        finally:
            os.close(descriptor)
        _fault_in(region)
        if not huge:
            self._huge_pages.want(region)
        return region


def whole_pages(size_bytes: int) -> int:
    """Bytes that a region of that size occupies."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def void(region: Region) -> None:
    """Clear the superblock: no reader takes the region for what it held before."""
    region.view[:SUPERBLOCK_BYTES] = bytes(SUPERBLOCK_BYTES)


def _map(path: Path, size_bytes: int) -> Region:
    with path.open("r+b") as file:
        return Region(path, size_bytes, map_file(file.fileno(), size_bytes))


def _fault_in(region: Region) -> None:
    try:
        fault_in(region.view)
    except OSError:  # before Linux 5.14: writing zeros does the same, slower
        for start in range(0, region.size_bytes, len(_ZEROS)):
            stop = min(start + len(_ZEROS), region.size_bytes)
            region.view[start:stop] = _ZEROS[: stop - start]
