"""The made-up tmpfs of one host, under the real memory tier."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random

from ecckpt.agent.storage.region import Region
from ecckpt.agent.storage.volume import Draft
from ecckpt.errors import TmpfsFull
from ecckpt.sim.hosts.platter import Platter


class SimulatedTmpfs(Platter):
    """A ``Tmpfs``: what lies in a host's memory. It outlives the agent, and goes with the host.

    ``files`` are the regions by path; each stays the same object for every process that maps it.
    """

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.files: dict[str, Region] = {}
        self.runs: dict[str, str] = {}  # path of a region -> the run that it was made for
        self.uses: Iterator[int] = itertools.count(1)
        self._assigned: set[Path] = set()
        self._made = itertools.count(1)

    def create(self, folder: Path, size_bytes: int, *, run: str) -> Region:
        """Its name tells when it was made: names in order are adopted in that order."""
        if self.full:
            raise TmpfsFull(str(folder), need_bytes=size_bytes, free_bytes=0)
        path = folder / f"{next(self._made):08}.region"
        view = self.put(path, bytearray(size_bytes))
        self.files[str(path)] = region = Region(path=path, size_bytes=size_bytes, view=view)
        return region

    def map(self, path: Path) -> Region:
        """The same region."""
        region = self.files[str(path)]
        region.assigned = path in self._assigned
        return region

    def mark_assigned(self, region: Region) -> None:
        """By its path."""
        self._assigned.add(region.path)
        region.assigned = True

    def keep_room(self, folder: Path) -> None:
        """Only regions need room here."""

    def draft_notes(self, path: Path, size_bytes: int) -> Draft:
        """As any draft."""
        return self.draft(path)

    def let_go(self) -> None:
        """No region is referred to from here."""

    def remove(self, path: Path) -> None:
        """A process that has it mapped keeps it."""
        super().remove(path)
        self.files.pop(str(path), None)

    def named(self, name: str) -> Region | None:
        """The region of that name, if it is there."""
        return next((each for each in self.files.values() if each.name == name), None)

    def region_view(self, name: str) -> memoryview:
        """The bytes of a region that is there."""
        region = self.named(name)
        assert region is not None, name
        return region.view

    def used_bytes(self, run: str) -> int:
        """Bytes that lie there of a run, independent of what its agent counts."""
        there = (each for path, each in self.files.items() if self.runs.get(path) == run)
        return sum(each.size_bytes for each in there)
