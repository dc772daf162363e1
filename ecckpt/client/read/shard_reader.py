"""Some bytes of a shard that lies on other nodes: blocks by range, each proven before it is seen.

Whole blocks are pulled, since a block is what has a checksum: from a home copy or from whoever
holds the fragment. Where a holder is gone or a block is bad, its row is decoded from k others.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import AgentUnreachable, CorruptFragment, EcckptError, TooFewFragments, TooSlow
from ecckpt.format.block_ranges import Flags, Offsets, covering, like_rows, span_of, spans
from ecckpt.format.fragment_file import Header
from ecckpt.memory.buffers import COPY_THREADS, copy_bytes
from ecckpt.memory.mapping import lazy_bytes
from ecckpt.policy.survival import ShardSources
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.http import patience
from ecckpt.protocol.parallel_ranges import connections_for
from ecckpt.protocol.stragglers import Field, Runner

_PARALLEL_PULLS = 8
_PROBLEMS_KEPT = 8
_PIECE_BYTES = 8 << 20
_KEPT_BYTES = 64 << 20
# Of a shard, so much that the memory for it is made in large pieces.
_MOST = 0.5
# What a peer is taken to manage, as long as there is none to compare it with.
_ASSUMED_BYTES_PER_S = 1e6


@dataclass(eq=False, slots=True)
class Peers:
    """The agents that are read from, shared by all readers of one restore.

    ``near`` is this node, which is asked first, and whose home copies are read where they lie if
    ``home`` maps them; ``spread`` differs from rank to rank, so that not all begin with the same
    peer. A node that once did not answer is not asked again; one that once
    lagged far behind others is, where nothing else is left. Each request may take ``request_s``,
    all of them until ``deadline_s``.
    """

    clients: Mapping[str, AgentClient]
    near: str = ""
    home: Callable[[Header], memoryview] | None = None
    spread: int = 0
    deadline_s: float = math.inf
    request_s: float = math.inf
    silent: set[str] = field(default_factory=set)
    lagging: set[str] = field(default_factory=set)

    def order(self, nodes: tuple[str, ...], *, patient: bool = True) -> list[str]:
        """The nodes to ask, in this order: those that lag last, or not at all."""
        usable = [n for n in dict.fromkeys(nodes) if n in self.clients and self.asks(n, patient)]
        turn = self.spread % len(usable) if usable else 0
        turned = usable[turn:] + usable[:turn]
        return sorted(turned, key=lambda node: (node in self.lagging, node != self.near))

    def asks(self, node: str, patient: bool) -> bool:
        """Whether a node is still asked: one that lags only by who is ``patient``."""
        return node not in self.silent and (patient or node not in self.lagging)

    def left_s(self) -> float:
        """Time for the next request, at least a moment."""
        return max(0.001, min(self.request_s, self.deadline_s - time.monotonic()))


class ShardReader:
    """One shard, of which ``require`` brings the parts that are wanted. For one thread at a time.

    ``data`` is as long as the shard; only bytes that were required are there, all others are
    zeros. It takes memory for what was brought, not for its length, and lives as long as anybody
    has a view of it. ``pulled_bytes`` counts whole blocks, this node's own included.

    Raises ``TooFewFragments`` if nobody has its checksum table.
    """

    def __init__(self, sources: ShardSources, peers: Peers) -> None:
        header = self._header = sources.header
        self._sources, self._peers = sources, peers
        self._codec = Codec(header.k, header.m)
        self._good = np.zeros((header.n, header.rows), dtype=bool)
        self._problems: list[str] = []
        self._table = self._find_table()
        self._home: memoryview | None = None
        self._asked_home = False
        self._last = False  # whether nodes are asked for another copy than the first
        self._connections = 1  # for each of the fragments that are being pulled
        self._lock = threading.Lock()
        self._memory = lazy_bytes(header.k * header.fragment_bytes)
        payload = memoryview(self._memory)
        size_bytes = header.fragment_bytes
        self._views = {
            index: payload[index * size_bytes : (index + 1) * size_bytes]
            for index in range(header.k)
        }
        self.data = payload[: header.shard_bytes]
        self.pulled_bytes = 0
        self._computed: set[int] = set()

    @property
    def is_near(self) -> bool:
        """Whether this node has the whole shard."""
        return self._peers.near in self._sources.homes

    @property
    def rebuilt_fragments(self) -> int:
        """Data fragments of which blocks were computed."""
        return len(self._computed)

    def require(self, starts: Offsets, ends: Offsets) -> None:
        """Bring the byte ranges [start, end) of the shard into ``data``.

        Raises ``TooFewFragments`` if they cannot be had, ``CorruptFragment`` for a range that is
        not within the shard.
        """
        try:
            wanted = covering(self._header, starts, ends)
        except ValueError as error:
            raise CorruptFragment(str(error)) from error
        if wanted.sum() > _MOST * wanted.size:
            with contextlib.suppress(OSError):  # where the kernel has none
                self._memory.madvise(mmap.MADV_HUGEPAGE)  # far fewer faults
        self._pull({index: wanted[index] for index in range(self._header.k)}, patient=False)
        lacking = wanted & ~self._good[: self._header.k]
        if lacking.any():
            self._decode(lacking)

    def whole(self) -> memoryview:
        """All of the shard, as ``require`` brings it: ``data``."""
        self.require(np.array([0]), np.array([self._header.shard_bytes]))
        return self.data

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the shard's bytes from ``start`` on, as ``require`` brings them.

        However much is read, no more than some pieces stay in memory.
        """
        piece_bytes = max(_PIECE_BYTES, self._header.block_bytes)
        for at in range(0, len(target), piece_bytes):
            if int(self._good.sum()) * self._header.block_bytes > _KEPT_BYTES:
                self.release()
            begin, end = start + at, start + min(at + piece_bytes, len(target))
            self.require(np.array([begin]), np.array([end]))
            target[at : at + piece_bytes] = self.data[begin:end]

    def digest(self, start: int, end: int) -> bytes:
        """Equal for the same range of two shards: these bytes are equal; else nothing is said.

        Made of checksums of whole blocks, so it costs no reading.
        """
        header = self._header
        blocks = covering(header, np.array([start]), np.array([end]))
        place = f"{start} {end} {header.fragment_bytes} {header.block_bytes} "
        return place.encode() + self._table[: header.k][blocks].tobytes()

    def release(self) -> None:
        """Give back the memory of what was brought: ``data`` is zeros again."""
        self._good[:] = False
        self._home, self._asked_home = None, False
        self._memory.madvise(mmap.MADV_DONTNEED)
        for index in range(self._header.k, self._header.n):
            self._views.pop(index, None)

    # -- pulling ----------------------------------------------------------------------------------

    def _pull(self, wanted: Mapping[int, Flags], *, patient: bool) -> None:
        """Try the sources of these fragments for the blocks that are not there yet.

        Those that lag are left where others can be asked, unless ``patient``.
        """
        todo = {i: rows for i, rows in wanted.items() if (rows & ~self._good[i]).any()}
        race = None if patient else self._race(len(todo))
        self._connections = connections_for(len(todo))

        def pull(item: tuple[int, Flags]) -> int:
            pulled_bytes = self._pull_fragment(*item, race)
            if race is not None:
                race.ended()
            return pulled_bytes

        if len(todo) < 2:
            self.pulled_bytes += sum(map(pull, todo.items()))
            return
        with ThreadPoolExecutor(_PARALLEL_PULLS, thread_name_prefix="read") as pool:
            self.pulled_bytes += sum(pool.map(pull, todo.items()))

    def _race(self, running: int) -> Field:
        usable = sum(bool(self._nodes(index, patient=False)) for index in range(self._header.n))
        spare = usable - self._header.k
        return Field(running, spare, assumed_bytes_per_s=_ASSUMED_BYTES_PER_S)

    def _nodes(self, index: int, *, patient: bool) -> list[str]:
        homes = self._sources.homes if index < self._header.k else ()
        held = self._sources.fragments.get(index, ())
        return self._peers.order((*homes, *held), patient=patient)

    def _pull_fragment(self, index: int, wanted: Flags, race: Field | None) -> int:
        pulled_bytes = 0
        nodes = self._nodes(index, patient=race is None)
        while nodes and (missing := wanted & ~self._good[index]).any():
            node = nodes.pop(0)
            if not self._peers.asks(node, patient=race is None):
                continue
            size_bytes = int(missing.sum()) * self._header.block_bytes
            runner = race.start(size_bytes, elsewhere=bool(nodes)) if race else None
            try:
                for rows in spans(missing):
                    pulled_bytes += self._pull_rows(node, index, rows, runner)
                if runner is not None:
                    runner.arrived()
            except (EcckptError, OSError) as error:
                if isinstance(error, AgentUnreachable):
                    self._peers.silent.add(node)
                if isinstance(error, TooSlow):
                    self._peers.lagging.add(node)
                self._problems.append(f"fragment {index} at {node}: {error}")
        return pulled_bytes

    def _pull_rows(self, node: str, index: int, rows: slice, runner: Runner | None) -> int:
        header, span = self._header, span_of(self._header, rows)
        view = self._views[index][span]
        mapped = node == self._peers.near and index < header.k and not self._last
        home = self._near_home() if mapped else None
        try:
            if home is None:
                self._pull_span(node, index, span, runner)
            else:
                # Copied before it is proven: whoever goes on saving may have its memory taken anew.
                start = index * header.fragment_bytes
                copy_bytes(home[start + span.start : start + span.stop], view, threads=COPY_THREADS)
        except (EcckptError, OSError):
            np.frombuffer(view, np.uint8).fill(0)  # unproven bytes do not stay
            raise
        bad = self._codec.verify({index: view}, self._table[:, rows], header.block_bytes)
        fine = np.ones(rows.stop - rows.start, dtype=bool)
        for _, row in bad:
            fine[row] = False
            # Nobody may take them for what they are not: unproven bytes do not stay.
            block = header.block(rows.start + row)
            self._views[index][block] = bytes(block.stop - block.start)
            self._problems.append(f"block {rows.start + row} of fragment {index} at {node} is bad")
        self._good[index, rows] |= fine
        return len(view)

    def _pull_span(self, node: str, index: int, span: slice, runner: Runner | None) -> None:
        left_s = self._peers.left_s()
        self._peers.clients[node].pull_fragment(
            self._header.shard,
            index,
            self._views[index][span],
            offset=span.start,
            timeout_s=left_s,
            patience_s=patience(left_s),
            wanted=runner.waits if runner else None,
            last=self._last,
            connections=self._connections,
        )

    def _near_home(self) -> memoryview | None:
        """This node's own copy, mapped, if it is in memory."""
        with self._lock:
            if not self._asked_home and self._peers.home is not None and self.is_near:
                self._asked_home = True
                try:
                    self._home = self._peers.home(self._header)
                except (EcckptError, OSError) as error:  # on disk only, or gone: it is pulled
                    self._problems.append(f"home copy: {error}")
        return self._home

    # -- decoding ---------------------------------------------------------------------------------

    def _decode(self, lacking: Flags) -> None:
        """Compute data blocks that no source has right, from k others of their rows."""
        header = self._header
        rows: Flags = np.asarray(lacking.any(axis=0))
        self._bring(rows, patient=False)
        if self._peers.lagging:
            self._bring(rows, patient=True)
        self._last = True  # what has rotted in a node's memory may be right on its disk
        self._bring(rows, patient=True)
        self._last = False
        have = int(self._good[:, rows].sum(axis=0).min())
        if have < header.k:
            reasons = self._problems[-_PROBLEMS_KEPT:]
            raise TooFewFragments(str(header.shard), have=have, need=header.k, reasons=reasons)
        # What k good blocks of the row may have brought meanwhile needs no computing.
        lacking = lacking & ~self._good[: header.k]
        for alike in like_rows(np.vstack((self._good, lacking))):
            missing = np.flatnonzero(lacking[:, alike.start]).tolist()
            if missing:
                self._rebuild(missing, alike)

    def _bring(self, rows: Flags, *, patient: bool) -> None:
        """Pull as many fragments of these rows as they still lack, until none is left to try."""
        header, untried = self._header, list(range(self._header.n))
        while untried and (short := rows & (self._good.sum(axis=0) < header.k)).any():
            lack = header.k - int(self._good[:, short].sum(axis=0).min())
            batch, untried = untried[:lack], untried[lack:]
            for index in batch:
                if index not in self._views:
                    self._views[index] = memoryview(lazy_bytes(header.fragment_bytes))
            self._pull(dict.fromkeys(batch, short), patient=patient)

    def _rebuild(self, missing: list[int], rows: slice) -> None:
        span = span_of(self._header, rows)
        present = np.flatnonzero(self._good[:, rows.start]).tolist()
        # Into memory of its own: what is wrong must not be seen in ``data``.
        made = {index: bytearray(span.stop - span.start) for index in missing}
        sums = self._codec.rebuild(
            {index: self._views[index][span] for index in present}, made, self._header.block_bytes
        )
        if not np.array_equal(sums[missing], self._table[missing, rows]):
            raise CorruptFragment(f"{self._header.shard}: rebuilt blocks fail their CRC32C")
        for index, block in made.items():
            self._views[index][span] = block
            self._good[index, rows] = True
        self._computed.update(missing)

    def _find_table(self) -> np.ndarray:
        held = (node for nodes in self._sources.fragments.values() for node in nodes)
        for node in self._peers.order((*self._sources.homes, *held)):
            if node in self._peers.silent:
                continue
            try:
                return self._peers.clients[node].table(self._header)
            except (EcckptError, OSError) as error:
                if isinstance(error, AgentUnreachable):
                    self._peers.silent.add(node)
                self._problems.append(str(error))
        reasons = self._problems[:_PROBLEMS_KEPT]
        what = f"checksums of {self._header.shard}"
        raise TooFewFragments(what, have=0, need=1, reasons=reasons)
