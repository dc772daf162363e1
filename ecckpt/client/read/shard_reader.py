"""Some bytes of a shard that lies on other nodes: blocks by range, each proven before it is seen.

Whole blocks are pulled, since a block is what has a checksum: from a home copy or from a holder of
the fragment. Where a holder is gone or a block is bad, its row is decoded from k others, as
``GatherPlan`` says.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ecckpt.errors import CorruptFragment, EcckptError
from ecckpt.format.block_ranges import Flags, Offsets, covering, span_of, spans
from ecckpt.format.fragment_file import Header
from ecckpt.memory.buffers import COPY_THREADS, copy_bytes
from ecckpt.memory.mapping import lazy_bytes
from ecckpt.policy.gather_plan import BlockPull, GatherPlan
from ecckpt.policy.survival import ShardSources
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.gather import Gatherer, find_table, rebuild
from ecckpt.protocol.http import patience

_PIECE_BYTES = 8 << 20
_KEPT_BYTES = 64 << 20
# Of a shard, so much that the memory for it is made in large pieces.
_MOST = 0.5


@dataclass(eq=False, slots=True, kw_only=True)
class Peers:
    """The agents that are read from, shared by all readers of one restore.

    ``near`` is this node, which is asked first, and whose home copies are read where they lie if
    ``home`` maps them; ``spread`` differs from rank to rank, so that not all begin with the same
    peer. Nodes that did not answer (``silent``) or lagged far behind others (``lagging``) are asked
    again only where the others do not suffice. Each request may take ``request_s``, all of them
    until ``deadline_s``.
    """

    clients: Mapping[str, AgentClient]
    near: str = ""
    home: Callable[[Header], memoryview] | None = None
    spread: int = 0
    deadline_s: float = math.inf
    request_s: float = math.inf
    silent: set[str] = field(default_factory=set)
    lagging: set[str] = field(default_factory=set)

    def order(self, nodes: tuple[str, ...]) -> list[str]:
        """The nodes to ask, in this order."""
        usable = [node for node in dict.fromkeys(nodes) if node in self.clients]
        turn = self.spread % len(usable) if usable else 0
        return sorted(usable[turn:] + usable[:turn], key=lambda node: node != self.near)

    def left_s(self) -> float:
        """Time for the next request, at least a moment."""
        return max(0.001, min(self.request_s, self.deadline_s - time.monotonic()))


class ShardReader:
    """One shard, of which ``require`` brings the parts that are wanted. For one thread at a time.

    ``data`` is as long as the shard; only bytes that were required are there, all others are
    zeros. It takes memory for what was brought, not for its length, and lives as long as anybody
    has a view of it. ``pulled_bytes`` counts whole blocks, this node's own included.

    Raises ``TooFewFragments`` if no agent has its checksum table.
    """

    def __init__(self, sources: ShardSources, peers: Peers) -> None:
        header = self._header = sources.header
        self._peers = peers
        self._is_near = peers.near in sources.homes
        self._places = {
            index: peers.order((*homes, *sources.fragments.get(index, ())))
            for index in range(header.n)
            for homes in (sources.homes if index < header.k else (),)
        }
        self._table = find_table(
            header,
            self._places,
            lambda node: peers.clients[node].table(header),
            silent=peers.silent,
            problems=[],
        )
        self._good = np.zeros((header.n, header.rows), dtype=bool)
        self._problems: list[str] = []  # of the newest ``require``
        self._home: memoryview | None = None
        self._asked_home = False
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
        return self._is_near

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
        if not (wanted & ~self._good[: self._header.k]).any():
            return
        plan = GatherPlan(
            self._header,
            wanted,
            self._places,
            good=self._good,
            slow=self._peers.lagging,
            silent=self._peers.silent,
        )
        self._problems = plan.problems
        try:
            Gatherer(plan, self._table, self._view, self._pull).pull_blocks()
            rebuild(plan, self._table, self._view)
        finally:
            self._wipe(plan.touched & ~self._good)
            self.pulled_bytes += plan.pulled_bytes
            self._computed |= plan.computed

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

    def prove(self) -> None:
        """Bring all of the shard, as ``require`` does, and keep none of it."""
        for start in range(0, len(self.data), _KEPT_BYTES):
            end = min(start + _KEPT_BYTES, len(self.data))
            self.require(np.array([start]), np.array([end]))
            self.release()

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

    def _view(self, index: int) -> memoryview:
        with self._lock:
            if index not in self._views:
                self._views[index] = memoryview(lazy_bytes(self._header.fragment_bytes))
            return self._views[index]

    def _pull(
        self, pull: BlockPull, span: slice, connections: int, goes_on: Callable[[], bool]
    ) -> None:
        header, index, view = self._header, pull.index, self._view(pull.index)[span]
        mapped = pull.source == self._peers.near and index < header.k and not pull.again
        home = self._near_home() if mapped else None
        if home is not None:
            # Copied before it is proven: a rank that goes on saving may have its memory taken anew.
            start = index * header.fragment_bytes
            copy_bytes(home[start + span.start : start + span.stop], view, threads=COPY_THREADS)
            return
        left_s = self._peers.left_s()
        self._peers.clients[pull.source].pull_fragment(
            header.shard,
            index,
            view,
            offset=span.start,
            timeout_s=left_s,
            patience_s=patience(left_s),
            wanted=goes_on,
            last=pull.again,
            connections=connections,
        )

    def _near_home(self) -> memoryview | None:
        """This node's own copy, mapped, if it is in memory."""
        with self._lock:
            if not self._asked_home and self._peers.home is not None and self._is_near:
                self._asked_home = True
                try:
                    self._home = self._peers.home(self._header)
                except (EcckptError, OSError) as error:  # on disk only, or gone: it is pulled
                    self._problems.append(f"home copy: {error}")
        return self._home

    def _wipe(self, unproven: Flags) -> None:
        """Bytes that were written and are not proven do not stay."""
        for index in np.flatnonzero(unproven.any(axis=1)).tolist():
            for rows in spans(unproven[index]):
                np.frombuffer(self._view(index)[span_of(self._header, rows)], np.uint8).fill(0)
