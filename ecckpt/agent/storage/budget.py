"""How much memory each run occupies, and which regions are spare: the rules of a budget. Pure.

Regions in use and regions kept for recycling both count toward their run's budget, so what a run
occupies is bounded by its budget at every moment.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Generic, Protocol, TypeVar

from ecckpt.errors import MemoryBudgetTooSmall

_SLACK = 1.25


class Sized(Protocol):
    """Something that occupies memory."""

    size_bytes: int


R = TypeVar("R", bound=Sized)


class Accounts(Generic[R]):
    """The books of one node's memory; whoever keeps them makes and frees what they say."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._used_bytes: dict[str, int] = defaultdict(int)
        self._spare: dict[str, list[R]] = defaultdict(list)

    def used_bytes(self, run: str) -> int:
        """Bytes of the run's regions, spare ones included."""
        return self._used_bytes[run]

    def take(self, run: str, size_bytes: int) -> R | None:
        """A spare region that fits, the smallest; None if there is none."""
        spare = self._spare[run]
        limit_bytes = size_bytes * _SLACK + (1 << 20)
        fitting = [region for region in spare if size_bytes <= region.size_bytes <= limit_bytes]
        if not fitting:
            return None
        region = min(fitting, key=lambda each: each.size_bytes)
        spare.remove(region)
        return region

    def reserve(self, run: str, size_bytes: int, *, budget_bytes: int, what: str) -> list[R]:
        """Count a new region in; returns the spare ones that must be freed for it.

        Raises ``MemoryBudgetTooSmall``, and nothing has changed then.
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
            region = spare.pop(0)
            self.release(run, region.size_bytes)
            freed.append(region)
        self._used_bytes[run] += size_bytes
        return freed

    def adopt(self, run: str, region: R) -> None:
        """Count a region in that is there already."""
        self._used_bytes[run] += region.size_bytes

    def keep(self, run: str, region: R) -> None:
        """A region in use becomes a spare one."""
        self._spare[run].append(region)

    def release(self, run: str, size_bytes: int) -> None:
        """Count a region out."""
        self._used_bytes[run] -= size_bytes

    def spares(self, only: str | None = None) -> list[tuple[str, R]]:
        """Count all spare regions out, of every run or of one; returns them."""
        runs = list(self._spare) if only is None else [only]
        found = [(run, region) for run in runs for region in self._spare.pop(run, [])]
        for run, region in found:
            self.release(run, region.size_bytes)
        return found
