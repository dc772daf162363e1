"""The memory tier: files in tmpfs, allocated up front, faulted in once, then recycled.

Regions lie under ``<root>/regions``. Fresh pages cost several times a copy, so a region that is
given up is kept for the next taker instead of being freed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

from ecckpt.agent.storage.budget import Accounts
from ecckpt.agent.storage.region import Region
from ecckpt.agent.storage.regions import Tmpfs, TmpfsFiles, void, whole_pages
from ecckpt.errors import NotMapped, TmpfsFull


class MemoryTier:
    """All regions of one agent, by run, within budgets (budget.py). Thread-safe."""

    def __init__(self, root: Path, *, node: str, files: Tmpfs | None = None) -> None:
        self._folder = root / "regions"
        self._files = files or TmpfsFiles()
        self._files.make_folder(self._folder)
        self._lock = threading.Lock()
        self._accounts: Accounts[Region] = Accounts(node)
        self._mapped: WeakSet[Region] = WeakSet()

    def default_budget_bytes(self) -> int:
        """Half of the tmpfs: what a run may use unless told otherwise."""
        return self._files.room(self._folder)[0] // 2

    def used_bytes(self, run: str) -> int:
        """Bytes of the run's regions, spare ones included."""
        with self._lock:
            return self._accounts.used_bytes(run)

    def allocate(self, run: str, size_bytes: int, *, budget_bytes: int, what: str) -> Region:
        """A region of at least that size whose superblock is void; its other bytes are garbage.

        Takes a spare region that fits, else makes one, giving spare ones back to the system where
        the budget asks for it. Raises ``MemoryBudgetTooSmall``, ``TmpfsFull`` or ``NotMapped``;
        the tier is then as before.
        """
        size_bytes = whole_pages(size_bytes)
        with self._lock:
            region = self._take(run, size_bytes)
            if region is not None:
                return region
            self._make_room(run, size_bytes, budget_bytes, what)
        try:
            region = self._create_at_any_price(run, size_bytes)
        except BaseException:
            with self._lock:
                self._accounts.release(run, size_bytes)
            raise
        return self._enter(region)

    def take_spare(self, run: str, size_bytes: int) -> Region | None:
        """As ``allocate``, but only a region that is spare; None if none fits."""
        with self._lock:
            return self._take(run, whole_pages(size_bytes))

    def recycle(self, run: str, region: Region) -> None:
        """Make a region spare. The caller guarantees that no process reads or writes it.

        A region without a name is discarded: whatever is put into it could not be found again.
        """
        assert not region.assigned, region
        if not self._files.is_file(region.path):
            self.discard(run, region)
            return
        void(region)
        with self._lock:
            self._accounts.keep(run, region)

    def discard(self, run: str, region: Region) -> None:
        """Unlink a region: another process may still have it mapped."""
        region.removed = True
        self._files.remove(region.path)
        with self._lock:
            self._accounts.release(run, region.size_bytes)

    def find_removed(self) -> bool:
        """Mark the regions whose files were removed behind this tier; True if there are new ones.

        One listing of the folder: cheap enough to be made before every decision.
        """
        with self._lock:
            mapped = [region for region in self._mapped if not region.removed]
        # After the list of regions: each of them had its name by then.
        names = self._files.names(self._folder)
        gone = [region for region in mapped if region.path.name not in names]
        for region in gone:
            region.removed = True
        return bool(gone)

    def assign(self, region: Region) -> None:
        """Mark a region in use as assigned, in its file too, for an agent that adopts it."""
        self._files.mark_assigned(region)

    def release(self, run: str) -> None:
        """Give the spare regions of a run back to the system."""
        with self._lock:
            spares = self._accounts.spares(run)
        for _, region in spares:
            self._files.remove(region.path)

    def found(self) -> Iterator[Path]:
        """Region files that lie in the tier's folder, known or not."""
        return iter(self._files.found(self._folder, ".region"))

    def adopt(self, run: str, path: Path) -> Region:
        """Take over a region that an earlier agent left."""
        region = self._enter(self._files.map(path))
        with self._lock:
            self._accounts.adopt(run, region)
        return region

    def _enter(self, region: Region) -> Region:
        region.use = next(self._files.uses)
        with self._lock:
            self._mapped.add(region)
        return region

    def _take(self, run: str, size_bytes: int) -> Region | None:
        """A spare region that fits and still has its name. The caller holds the lock."""
        while (region := self._accounts.take(run, size_bytes)) is not None:
            if self._files.is_file(region.path):
                region.use = next(self._files.uses)
                return region
            region.removed = True
            self._accounts.release(run, region.size_bytes)
        return None

    def _make_room(self, run: str, size_bytes: int, budget_bytes: int, what: str) -> None:
        """Count a new region in. What is freed for it is unmapped, and so free, on return."""
        for freed in self._accounts.reserve(run, size_bytes, budget_bytes=budget_bytes, what=what):
            self._files.remove(freed.path)

    def _create_at_any_price(self, run: str, size_bytes: int) -> Region:
        """A new region; where memory is full of spare ones, of any run, they go first."""
        self._files.remake_folder(self._folder)
        try:
            return self._files.create(self._folder, size_bytes, run=run)
        except (TmpfsFull, NotMapped):
            if not self._drop_spares():
                raise
            return self._files.create(self._folder, size_bytes, run=run)

    def _drop_spares(self) -> int:
        """Give all spare regions back; returns how many. Unmapped, and so free, on return."""
        with self._lock:
            spares = self._accounts.spares()
        count = len(spares)
        while spares:
            _, region = spares.pop()
            self._files.remove(region.path)
            del region
        self._files.let_go()
        return count
