"""Pulling data fragments while their home still encodes them, into memory that is spare.

Prefetched fragments are best effort: they are announced by ``Prefetch``, never count as held, use
only spare regions, and are the first to be dropped when memory is short.

    Prefetch --> waiting --> early: a pull is under way --> here: sums known, region kept
                    |            |                            |
                    |            |                            +-- Hold: claimed, with its bytes
                    |            +-- Hold: claimed; hold.py waits for the pull to end
                    +-- Hold: forgotten; hold.py pulls it
    any state --> dropped: at timeout_s, with a newer generation of the rank, with a commit of this
                  or a newer one, when the fence rises, with forget, when memory is short

A region is given back only when its pull has ended (``early`` is False), because the pulling thread
writes to it. If memory is needed at once, the region is discarded instead: the thread writes to an
unlinked file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from ecckpt.agent.core.actions import Action, Borrow, Discard, Pull, Recycle, Wake
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.tasks import Taking
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.save import Hold, Prefetch

# At a time: as many as one home encodes at a time. In addition to the ``PULLS`` of hold.py.
PREFETCHES = 2
_QUEUE_LIMIT = 1024


class Prefetcher:
    """Fragments that no ``Hold`` has asked for yet: waiting, being pulled, or here."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._takings: dict[tuple[ShardId, int], Taking] = {}
        self._waiting: deque[Taking] = deque()
        self._pulling: list[Taking] = []  # also if dropped or claimed meanwhile

    def start(self, message: Prefetch, now_s: float) -> list[Action]:
        """Queue a fragment; if the queue is full it is left out."""
        taking = Taking(message=message)
        header = message.header
        actions = self.supersede(header.shard)
        known = taking.key in self._takings or self._records.get(header.shard.run).find(*taking.key)
        if known or len(self._waiting) >= _QUEUE_LIMIT or self._is_stale(taking):
            return actions
        self._takings[taking.key] = taking
        self._waiting.append(taking)
        return [*actions, Wake(now_s + message.timeout_s, taking), *self._begin_queued()]

    def claim(self, message: Hold) -> Taking | None:
        """Hand over the fragment that a ``Hold`` asks for; None if nothing of it was pulled.

        It is ``early`` while its pull is under way.
        """
        taking = self._takings.get((message.header.shard, message.header.index))
        if taking is None or taking.message.header != message.header:
            return None
        del self._takings[taking.key]
        if taking in self._waiting:
            self._waiting.remove(taking)
            return None
        return taking

    def ended(self, taking: Taking, sums: np.ndarray | None) -> list[Action]:
        """A pull that began before its ``Hold`` has ended; ``sums`` is None if it failed."""
        self._pulling.remove(taking)
        taking.early, taking.sums = False, sums
        unwanted = taking.dropped or (sums is None and taking.table is None)
        return [*(self._drop(taking) if unwanted else ()), *self._begin_queued()]

    def due(self, taking: Taking) -> list[Action]:
        """``timeout_s`` has passed; drop the fragment if no ``Hold`` has claimed it."""
        return self._drop(taking) if self._takings.get(taking.key) is taking else []

    def review(self) -> list[Action]:
        """Drop fragments that no ``Hold`` will ask for any more."""
        return self._drop_all(self._is_stale)

    def supersede(self, shard: ShardId) -> list[Action]:
        """Drop fragments of older generations of the rank that saves this shard."""

        def is_older(taking: Taking) -> bool:
            other = taking.message.header.shard
            same = (other.run, other.rank) == (shard.run, shard.rank)
            return same and other.generation < shard.generation

        return self._drop_all(is_older)

    def clear(self, run: str | None) -> list[Action]:
        """Drop all fragments of a run (None: every run), so that their memory is free at once."""
        actions: list[Action] = []
        for taking in list(self._takings.values()):
            its_run = taking.message.header.shard.run
            if run in (None, its_run):
                if taking.early and taking.region is not None:  # its pull may still write
                    actions.append(Discard(its_run, taking.region))
                    taking.region = None
                actions += self._drop(taking)
        return actions

    def _is_stale(self, taking: Taking) -> bool:
        """Whether the generation is committed or older, or its writer is fenced."""
        message = taking.message
        shard = message.header.shard
        record = self._records.get(shard.run)
        committed = record.committed is not None and shard.generation <= record.committed
        return committed or record.is_fenced(message.writer)

    def _begin_queued(self) -> list[Action]:
        actions: list[Action] = []
        while self._waiting and len(self._pulling) < PREFETCHES:
            taking = self._waiting.popleft()
            shard = taking.message.header.shard
            actions += self._records.discard(shard.run, shard.rank, taking.message.discard)
            taking.early = True
            self._pulling.append(taking)
            actions += [Borrow(taking), Pull(taking)]
        return actions

    def _drop_all(self, goes: Callable[[Taking], bool]) -> list[Action]:
        found = [taking for taking in self._takings.values() if goes(taking)]
        return [action for taking in found for action in self._drop(taking)]

    def _drop(self, taking: Taking) -> list[Action]:
        """Forget a fragment. Its region is given back now, or by ``ended`` after its pull."""
        taking.dropped = True
        if self._takings.get(taking.key) is taking:
            del self._takings[taking.key]
        if taking in self._waiting:
            self._waiting.remove(taking)
        region = taking.region
        if region is None or taking.early:
            return []
        taking.region = None
        return [Recycle(taking.message.header.shard.run, region)]
