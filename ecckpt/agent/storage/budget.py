"""The memory that each run occupies, and its spare regions: the rules of a budget. Pure.

Regions in use and spare regions both count toward their run's budget, so the memory that a run
occupies never exceeds its budget. Used by regions.py, and by the simulated memory.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Generic, Protocol, TypeVar

from ecckpt.errors import MemoryBudgetTooSmall

# A spare region may be larger than asked by this factor and 1 MiB. Successive shards differ a
# little in size, and a new region costs several times a copy.
_SLACK = 1.25


class Sized(Protocol):
    """Something that occupies memory."""

    size_bytes: int


R = TypeVar("R", bound=Sized)


class Accounts(Generic[R]):
    """The accounts of one node's memory. The caller creates and frees regions as they say.

    Not thread-safe: the caller holds a lock.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._used_bytes: dict[str, int] = defaultdict(int)
        self._spare: dict[str, list[R]] = defaultdict(list)

    def used_bytes(self, run: str) -> int:
        """Bytes of the run's regions, spare ones included."""
        return self._used_bytes[run]

    def take(self, run: str, size_bytes: int) -> R | None:
        """The smallest spare region that fits, no longer spare; None if none fits."""
        spare = self._spare[run]
        limit_bytes = size_bytes * _SLACK + (1 << 20)
        fitting = [region for region in spare if size_bytes <= region.size_bytes <= limit_bytes]
        if not fitting:
            return None
        region = min(fitting, key=lambda each: each.size_bytes)
        spare.remove(region)
        return region

    def reserve(self, run: str, size_bytes: int, *, budget_bytes: int, what: str) -> list[R]:
        """Count a new region in; returns the spare regions that the caller must free for it.

        Raises ``MemoryBudgetTooSmall``, and has changed nothing then.
        """
        spare = self._spare[run]
        busy_bytes = self._used_bytes[run] - sum(region.size_bytes for region in spare)
        if busy_bytes + size_bytes > budget_bytes:
            need_bytes = busy_bytes + size_bytes
            raise MemoryBudgetTooSmall(
                self._node, need_bytes=need_bytes, have_bytes=budget_bytes, what=what
            )
        freed = []
        while self._used_bytes[run] + size_bytes > budget_bytes:
            region = spare.pop(0)  # the one that has been spare for longest
            self.release(run, region.size_bytes)
            freed.append(region)
        self._used_bytes[run] += size_bytes
        return freed

    def adopt(self, run: str, region: R) -> None:
        """Count an existing region in."""
        self._used_bytes[run] += region.size_bytes

    def keep(self, run: str, region: R) -> None:
        """Make a region in use a spare one."""
        self._spare[run].append(region)

    def release(self, run: str, size_bytes: int) -> None:
        """Count a region out."""
        self._used_bytes[run] -= size_bytes

    def spares(self, only: str | None = None) -> list[tuple[str, R]]:
        """Count all spare regions out, of one run or of every run, and return them."""
        runs = list(self._spare) if only is None else [only]
        found = [(run, region) for run in runs for region in self._spare.pop(run, [])]
        for run, region in found:
            self.release(run, region.size_bytes)
        return found
