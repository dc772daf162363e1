"""Ranges of bytes of a shard that lies on other nodes, every byte proven before it is given out.

What is pulled are whole blocks, each checked against the shard's table: from the home copies
first, then from the fragment's holders. A block that nobody has right is decoded from any k others
of its row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ecckpt.client import AgentClient
from ecckpt.codec import Codec
from ecckpt.errors import AgentUnreachable, CorruptFragment, EcckptError, TooFewFragments
from ecckpt.recovery import ShardReport

_PIECE_BLOCKS = 16  # pulled by one request
_KEPT_BLOCKS = 64


@dataclass(eq=False, slots=True)
class Sources:
    """The agents that are read from, and what all readers of one generation share.

    ``silent`` are nodes that once did not answer in time: they are not asked again, so that each
    costs one deadline at most. ``kept`` has blocks of which neighbouring tensors are made.
    """

    clients: Mapping[str, AgentClient]
    timeout_s: float
    silent: dict[str, str] = field(default_factory=dict)
    kept: OrderedDict[tuple[int, int, int], bytes] = field(default_factory=OrderedDict)
    pulled_bytes: int = 0

    def keep(self, key: tuple[int, int, int], block: memoryview) -> None:
        """Remember a proven block; the oldest goes."""
        self.kept[key] = bytes(block)
        while len(self.kept) > _KEPT_BLOCKS:
            self.kept.popitem(last=False)


class RangeReader:
    """Reads one shard; for one thread at a time.

    Raises ``TooFewFragments`` when its checksum table cannot be had.
    """

    def __init__(self, report: ShardReport, sources: Sources) -> None:
        assert report.header is not None, "a lost shard has nothing to read"
        self._header = report.header
        self._report = report
        self._sources = sources
        self._codec = Codec(self._header.k, self._header.m)
        self._problems: OrderedDict[str, None] = OrderedDict()
        self._table = self._find_table()

    @property
    def shard_bytes(self) -> int:
        """Length of the shard."""
        return self._header.shard_bytes

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the shard's bytes from ``start`` on, all of them proven.

        Raises ``TooFewFragments`` if they cannot be had; ``target`` is then undefined.
        """
        size_bytes, block_bytes = self._header.fragment_bytes, self._header.block_bytes
        done = 0
        while done < len(target):
            index, offset = divmod(start + done, size_bytes)
            stop = min(offset + len(target) - done, size_bytes)
            first = offset // block_bytes
            last = min(first + _PIECE_BLOCKS, -(-stop // block_bytes))
            piece = self._blocks(index, slice(first, last))
            begin = offset - first * block_bytes
            part = piece[begin : stop - first * block_bytes]
            target[done : done + len(part)] = part
            done += len(part)

    def _blocks(self, index: int, rows: slice) -> memoryview:
        """Blocks of a data fragment, proven."""
        rank = self._header.shard.rank
        if rows.stop - rows.start == 1 and (rank, index, rows.start) in self._sources.kept:
            return memoryview(self._sources.kept[rank, index, rows.start])
        span = self._span(rows)
        piece = memoryview(bytearray(span.stop - span.start))
        good = np.zeros(rows.stop - rows.start, dtype=bool)
        for row in range(rows.start, rows.stop):
            kept = self._sources.kept.get((rank, index, row))
            if kept is not None:
                piece[self._within(rows, row)] = kept
                good[row - rows.start] = True
        self._pull(index, rows, piece, good)
        step = max(1, 4 * _PIECE_BLOCKS // self._header.k)  # k pieces of this many at a time
        for lack in _spans(~good):
            for start in range(lack.start, lack.stop, step):
                part = slice(rows.start + start, rows.start + min(start + step, lack.stop))
                self._decode(index, part, piece[self._within(rows, part)])
        for row in {rows.start, rows.stop - 1}:  # the others are used up by whoever asked
            self._sources.keep((rank, index, row), piece[self._within(rows, row)])
        return piece

    def _pull(self, index: int, rows: slice, target: memoryview, good: np.ndarray) -> None:
        """Fill in what ``good`` lacks from whoever has this fragment, and set it there."""
        copies = self._report.homes if index < self._header.k else ()
        for node in dict.fromkeys((*copies, *self._report.fragments.get(index, ()))):
            if good.all():
                return
            if node in self._sources.silent or node not in self._sources.clients:
                continue
            try:
                for lack in _spans(~good):
                    part = slice(rows.start + lack.start, rows.start + lack.stop)
                    view = target[self._within(rows, part)]
                    self._pull_span(node, index, part, view)
                    good[lack] = True
                    for _, row in self._prove(index, part, view):
                        good[lack.start + row] = False
                        self._problem(f"block {part.start + row} of fragment {index} at {node}")
            except (EcckptError, OSError) as error:
                if isinstance(error, AgentUnreachable):
                    self._sources.silent[node] = str(error)
                self._problem(str(error))

    def _pull_span(self, node: str, index: int, rows: slice, target: memoryview) -> None:
        self._sources.clients[node].pull_fragment(
            self._header.shard,
            index,
            target,
            offset=self._span(rows).start,
            timeout_s=self._sources.timeout_s,
        )
        self._sources.pulled_bytes += len(target)

    def _prove(self, index: int, rows: slice, view: memoryview) -> list[tuple[int, int]]:
        return self._codec.verify({index: view}, self._table[:, rows], self._header.block_bytes)

    def _decode(self, index: int, rows: slice, target: memoryview) -> None:
        """Compute blocks from k others of their rows, all rows at once or else one by one."""
        present: dict[int, memoryview] = {}
        for other in self._others(index):
            view = memoryview(bytearray(len(target)))
            good = np.zeros(rows.stop - rows.start, dtype=bool)
            self._pull(other, rows, view, good)
            if good.all():
                present[other] = view
            if len(present) == self._header.k:
                break
        else:
            if rows.stop - rows.start > 1:  # damage that lies elsewhere in each fragment
                for row in range(rows.start, rows.stop):
                    self._decode(index, slice(row, row + 1), target[self._within(rows, row)])
                return
            raise TooFewFragments(
                f"block {rows.start} of fragment {index} of {self._header.shard}",
                have=len(present),
                need=self._header.k,
                reasons=list(self._problems)[-8:],
            )
        sums = self._codec.rebuild(present, {index: target}, self._header.block_bytes)
        if not np.array_equal(sums[index], self._table[index, rows]):
            raise CorruptFragment(f"{self._header.shard}: rebuilt blocks fail their CRC32C")

    def _others(self, index: int) -> Iterator[int]:
        """Fragments to decode from: those that somebody has, data first."""
        for other in range(self._header.n):
            homes = self._report.homes if other < self._header.k else ()
            if other != index and (homes or self._report.fragments.get(other)):
                yield other

    def _find_table(self) -> np.ndarray:
        fragments = self._report.fragments.values()
        for node in dict.fromkeys((*self._report.homes, *(n for at in fragments for n in at))):
            client = self._sources.clients.get(node)
            if client is None or node in self._sources.silent:
                continue
            try:
                return client.table(self._header)
            except (EcckptError, OSError) as error:
                if isinstance(error, AgentUnreachable):
                    self._sources.silent[node] = str(error)
                self._problem(str(error))
        reasons = list(self._problems)[:8]
        raise TooFewFragments(f"checksums of {self._header.shard}", have=0, need=1, reasons=reasons)

    def _problem(self, text: str) -> None:
        self._problems[text] = None
        while len(self._problems) > 4 * _KEPT_BLOCKS:
            self._problems.popitem(last=False)

    def _span(self, rows: slice) -> slice:
        """Where blocks lie in a fragment."""
        last = self._header.block(rows.stop - 1)
        return slice(self._header.block(rows.start).start, last.stop)

    def _within(self, rows: slice, part: slice | int) -> slice:
        """Where some of ``rows`` lie in a buffer that has just these."""
        part = slice(part, part + 1) if isinstance(part, int) else part
        span, start = self._span(part), self._header.block(rows.start).start
        return slice(span.start - start, span.stop - start)


def _spans(wanted: np.ndarray) -> list[slice]:
    """Runs of True, as slices."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False]))))
    return [
        slice(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]
