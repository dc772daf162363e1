"""Which fragments to pull when a shard is brought home, and what to rebuild. Pure.

Losses are counted block by block: a row of blocks decodes as soon as any k of its n blocks are
good, wherever they come from, so fragments that are partly damaged still help.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ecckpt.errors import TooFewFragments
from ecckpt.format.block_ranges import like_rows, spans
from ecckpt.format.fragment_file import Header
from ecckpt.protocol.messages.restore import Fetch


@dataclass(eq=False, slots=True)
class Gathering:
    """Fragments on their way into place: ``good[i, row]`` says which blocks are proven.

    Every source is tried, and once more when there is no other: what was late, or flipped on the
    way, may be right the second time. Then it is asked for its ``last`` copy: what has rotted in
    memory may be right on disk.
    """

    header: Header
    good: np.ndarray
    untried: dict[int, list[str]]
    again: dict[int, list[str]]
    last: bool = False
    pulled_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, message: Fetch) -> Gathering:
        """Nothing proven, nothing tried."""
        header = message.header
        good = np.zeros((header.n, header.rows), dtype=bool)
        untried, again = (
            {sources.index: list(sources.addresses) for sources in message.sources} for _ in "12"
        )
        return cls(header, good, untried, again)

    def first(self) -> list[int]:
        """The fragments to begin with: the shard's own, and others in place of those lost."""
        had = [index for index in range(self.header.n) if self.untried.get(index)]
        return had[: self.header.k]

    def next(self) -> list[int]:
        """The fragments to try now, as many as some row still lacks; empty when all can be had.

        Raises ``TooFewFragments`` when there is nothing left to try.
        """
        k, good = self.header.k, self.good
        lacking = ~good[:k].all(axis=0) & (good.sum(axis=0) < k)
        if not lacking.any():
            return []
        have = int(good[:, lacking].sum(axis=0).min())
        wanted = self._left()
        if not wanted:
            self.untried, self.again, self.last = self.again, {}, True
            wanted = self._left()
        if not wanted:
            shard = str(self.header.shard)
            raise TooFewFragments(shard, have=have, need=k, reasons=self.problems[:8])
        return wanted[: k - have]

    def _left(self) -> list[int]:
        return [i for i, left in self.untried.items() if left and not self.good[i].all()]

    def take(self, index: int) -> tuple[str, list[slice]]:
        """One more source of a fragment, and the rows of it that are not proven yet."""
        return self.untried[index].pop(0), list(spans(~self.good[index]))

    def spare(self, wanted: Collection[int]) -> int:
        """How many fragments could be asked for instead of some of the ``wanted``."""
        return sum(bool(left) for index, left in self.untried.items() if index not in wanted)

    def postpone(self, index: int, address: str) -> None:
        """A source that lags: to be tried again after all others."""
        self.untried[index] = [*self.untried.pop(index), address]

    def prove(self, index: int, rows: slice, bad: Iterable[tuple[int, int]]) -> None:
        """Rows of a fragment are here; ``bad`` of them, counted from the first, are not right."""
        self.good[index, rows] = True
        for _, row in bad:
            self.good[index, rows.start + row] = False

    def judge(self, index: int, address: str) -> None:
        """One source of a fragment has been tried."""
        bad = int((~self.good[index]).sum())
        rows = self.header.rows
        if bad:
            self.problems.append(
                f"fragment {index} from {address}: {bad} of {rows} blocks not proven"
            )

    def lost(self) -> Iterator[tuple[slice, list[int], list[int]]]:
        """Rows to rebuild: which, the fragments there that are missing, and those to use."""
        k, n = self.header.k, self.header.n
        for rows in like_rows(self.good):
            missing = [index for index in range(k) if not self.good[index, rows.start]]
            if missing:
                yield rows, missing, [i for i in range(n) if self.good[i, rows.start]]
