"""Which blocks of a shard to pull from which source, and which to compute from others. Pure.

Losses are counted block by block: a row of blocks decodes as soon as any k of its n blocks are
good, wherever they come from, so fragments that are partly damaged still help. Of each fragment,
each source has rows in these states:

                next()              finish(): it came, good or bad, or there was an error
    untried -------------> in flight ----------------------------------------------------> tried
       ^                       |                                                             |
       +-- behind all others <-+ finish(): too slow                                          |
       +------- once nothing else is left: the second pass, for the source's other copy -----+
                                                                     after it: TooFewFragments

A row asks for its wanted blocks as long as each of them has a source; otherwise for as many
blocks as it lacks of k, data before parity. The caller moves the bytes: threads and sockets in
protocol/gather.py, simulated time in sim/hosts/pulling.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ecckpt.errors import AgentUnreachable, TooFewFragments, TooSlow
from ecckpt.format.block_ranges import Flags, like_rows, span_of, spans
from ecckpt.format.fragment_file import Header

# A pull is given up once it is so much slower than the slowest that is done, and no sooner.
LEAST_PATIENCE_S = 2.0
_LAG_FACTOR = 3.0
# What other sources are taken to bring as long as no pull is done.
_ASSUMED_BYTES_PER_S = 1e6
_REASONS = 8

Places = Mapping[int, Sequence[str]]
"""Index of a fragment -> the sources that have it, in the order in which they are asked."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class BlockPull:
    """One fragment's rows, to be pulled from one source.

    ``again``: the source is asked for the second time, and for the copy that it did not give the
    first time, if it has two: what has rotted in memory may be right on disk. ``patient``: the
    source has lagged before, and no other could be asked.
    """

    index: int
    source: str
    rows: tuple[slice, ...]
    size_bytes: int
    again: bool
    patient: bool


@dataclass(frozen=True, slots=True)
class RowRebuild:
    """Data blocks of neighbouring rows to compute: ``missing`` from the k fragments ``present``."""

    rows: slice
    missing: list[int]
    present: list[int]


class GatherPlan:
    """The wanted blocks of one shard, on their way. Not thread-safe.

    ``wanted`` has shape (k, rows). ``good``, shape (n, rows), says which blocks are proven; it is
    the caller's and is updated. ``slow`` and ``silent`` are sources that lagged or did not answer:
    plans that read from the same sources may share them. They are asked after all others; a slow
    one is then waited for.
    """

    def __init__(
        self,
        header: Header,
        wanted: Flags,
        sources: Places,
        *,
        good: Flags | None = None,
        slow: set[str] | None = None,
        silent: set[str] | None = None,
    ) -> None:
        self.header = header
        self.good: Flags = np.zeros((header.n, header.rows), bool) if good is None else good
        self.touched: Flags = np.zeros((header.n, header.rows), bool)  # perhaps written to
        self.pulled_bytes = 0
        self.problems: list[str] = []
        self.computed: set[int] = set()  # data fragments of which blocks were rebuilt
        self._wanted, self._sources = wanted, sources
        self._slow: set[str] = set() if slow is None else slow
        self._silent: set[str] = set() if silent is None else silent
        self._coming: Flags = np.zeros((header.n, header.rows), bool)
        self._in_flight: dict[int, BlockPull] = {}
        self._took_s, self._took_bytes = 0.0, 0
        self._begin_pass(again=False)

    # -- what to pull -----------------------------------------------------------------------------

    def next(self) -> list[BlockPull]:
        """Pulls to begin now, beside those in flight; none of either: ``rebuilds`` does the rest.

        Raises ``TooFewFragments`` when no source is left that could help.
        """
        k, expected = self.header.k, self.good | self._coming
        count = expected.sum(axis=0)
        missing = self._wanted & ~expected[:k]
        short = missing.any(axis=0) & (count < k)
        if not short.any():
            return []
        offers = [self._offers(reluctance) for reluctance in range(3)]
        own = short & ~(missing & ~offers[0][:k]).any(axis=0)
        lack = np.where(short & ~own, k - count, 0)
        begun = []
        for index in (index for offer in offers for index in np.flatnonzero(offer.any(axis=1))):
            rows = (lack > 0) & ~expected[index]
            if index < k:
                rows |= own & missing[index]
            if index not in self._in_flight and (pull := self._begin(int(index), rows)):
                begun.append(pull)
                lack -= (lack > 0) & self._coming[index]
        if begun or self._in_flight:
            return begun
        if self._again:
            have, shard = int(count[short].min()), self.header.shard
            raise TooFewFragments(
                str(shard), rank=shard.rank, have=have, need=k, reasons=self.problems[:_REASONS]
            )
        self._begin_pass(again=True)
        return self.next()

    def patience_s(self, pull: BlockPull) -> float | None:
        """How long a pull in flight may take; None: as long as it wants to.

        It is given up for another source of the same fragment; or if its rows would decode even
        without all pulls in flight.
        """
        if pull.patient:
            return None
        elsewhere = any(
            left.any() and not self._reluctance(source)
            for source, left in self._left[pull.index].items()
        )
        without = (self.good | self._offers(0))[:, self._coming[pull.index]]
        if not elsewhere and (without.sum(axis=0) < self.header.k).any():
            return None
        if self._took_s:
            others_s = self._took_s * max(1.0, pull.size_bytes / self._took_bytes)
        else:
            others_s = pull.size_bytes / _ASSUMED_BYTES_PER_S
        return max(LEAST_PATIENCE_S, _LAG_FACTOR * others_s)

    def _begin_pass(self, *, again: bool) -> None:
        self._again = again
        every = np.ones(self.header.rows, bool)
        # The rows that each source of a fragment may still be asked for.
        self._left: list[dict[str, Flags]] = [
            dict.fromkeys(self._sources.get(index, ()), every) for index in range(self.header.n)
        ]

    def _reluctance(self, source: str) -> int:
        """0: to be asked; 1: after those, since it is slow; 2: last, since it did not answer."""
        return 2 if source in self._silent else int(source in self._slow)

    def _offers(self, reluctance: int) -> Flags:
        """The blocks, shape (n, rows), of fragments not in flight that such sources may have."""
        offers = np.zeros_like(self.good)
        for index, places in enumerate(self._left):
            if index not in self._in_flight:
                for source, rows in places.items():
                    if self._reluctance(source) == reluctance:
                        offers[index] |= rows
        return offers

    def _begin(self, index: int, rows: Flags) -> BlockPull | None:
        """Pull some of these rows from the best source that may have any."""
        places = self._left[index]
        able = [source for source, left in places.items() if (left & rows).any()]
        if not able:
            return None
        source = min(able, key=self._reluctance)
        rows = rows & places[source]
        places[source] = places[source] & ~rows
        self._coming[index] = rows
        self.touched[index] |= rows
        runs = tuple(spans(rows))
        self._in_flight[index] = pull = BlockPull(
            index=index,
            source=source,
            rows=runs,
            size_bytes=sum(map(self._bytes_of, runs)),
            again=self._again,
            patient=source in self._slow,
        )
        return pull

    def _bytes_of(self, rows: slice) -> int:
        span = span_of(self.header, rows)
        return int(span.stop - span.start)

    # -- what came of it --------------------------------------------------------------------------

    def prove(self, pull: BlockPull, rows: slice, bad: Iterable[tuple[int, int]]) -> None:
        """Some rows of a pull are here; ``bad`` (index, row from the first) fail their CRC32C."""
        self.pulled_bytes += self._bytes_of(rows)
        self.good[pull.index, rows] = True
        failed = [rows.start + row for _, row in bad]
        self.good[pull.index, failed] = False
        if failed:
            more = f" and {len(failed) - 1} more" if failed[1:] else ""
            place = f"block {failed[0]}{more} of fragment {pull.index} at {pull.source}"
            self.problems.append(f"{place} {'are' if more else 'is'} bad")

    def finish(self, pull: BlockPull, took_s: float, error: Exception | None = None) -> None:
        """A pull has ended; without an ``error`` the time that it took is a measure for others."""
        del self._in_flight[pull.index]
        places = self._left[pull.index]
        if error is None:
            if took_s > self._took_s:
                self._took_s, self._took_bytes = took_s, pull.size_bytes
        else:
            self.problems.append(f"fragment {pull.index} at {pull.source}: {error}")
            if isinstance(error, TooSlow):
                self._slow.add(pull.source)
                places[pull.source] = places[pull.source] | self._coming[pull.index]
            else:
                del places[pull.source]
            if isinstance(error, AgentUnreachable):
                self._silent.add(pull.source)
        self._coming[pull.index] = False

    # -- what to compute --------------------------------------------------------------------------

    def rebuilds(self) -> list[RowRebuild]:
        """What is wanted and has not been pulled."""
        k = self.header.k
        missing = self._wanted & ~self.good[:k]
        return [
            RowRebuild(
                rows,
                np.flatnonzero(missing[:, rows.start]).tolist(),
                np.flatnonzero(self.good[:, rows.start])[:k].tolist(),
            )
            for rows in like_rows(np.vstack((self.good, missing)))
            if missing[:, rows.start].any()
        ]

    def rebuilt(self, rebuild: RowRebuild) -> None:
        """Those blocks are here and proven."""
        self.good[rebuild.missing, rebuild.rows] = True
        self.computed.update(rebuild.missing)


def whole_shard(header: Header) -> Flags:
    """All data blocks, as what is wanted."""
    return np.ones((header.k, header.rows), bool)


def table_sources(sources: Places) -> list[str]:
    """Whom to ask for the checksums, in order: every source twice, for one answer may be lost."""
    once = dict.fromkeys(source for places in sources.values() for source in places)
    return [*once, *once]


def no_table(header: Header, problems: Sequence[str]) -> TooFewFragments:
    """The error for a shard of which no source gave the checksums."""
    what, rank = f"checksums of {header.shard}", header.shard.rank
    return TooFewFragments(what, rank=rank, have=0, need=1, reasons=problems[:_REASONS])
