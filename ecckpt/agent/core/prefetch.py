"""Pulling fragments that somebody is about to ask for, into memory that nobody needs.

Nothing is promised: what is here of it is handed to the ``Hold`` that follows, or goes. Only spare
regions are used, so it costs no save any memory, and whoever finds too little goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from ecckpt.agent.core.actions import Action, Borrow, Discard, Pull, Recycle, Taking, Wake
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.save import Hold, Prefetch

# As many as one home encodes at a time. They are beside the pulls of what is to be held.
PREFETCHES = 2
_QUEUE_LIMIT = 1024


class Prefetcher:
    """What nobody has asked to hold yet, waiting, on its way or here."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._takings: dict[tuple[ShardId, int], Taking] = {}
        self._waiting: deque[Taking] = deque()
        self._pulling: list[Taking] = []  # also what was dropped or claimed, until that has ended

    def start(self, message: Prefetch, now_s: float) -> list[Action]:
        """Pull a fragment as soon as it is its turn; what is too much is not queued."""
        taking = Taking(message)
        header = message.header
        actions = self.supersede(header.shard)
        known = taking.key in self._takings or self._records.look(header.shard.run).find(
            *taking.key
        )
        if known or len(self._waiting) >= _QUEUE_LIMIT or self._is_stale(taking):
            return actions
        self._takings[taking.key] = taking
        self._waiting.append(taking)
        return [*actions, Wake(now_s + message.timeout_s, taking), *self._begin_queued()]

    def claim(self, message: Hold) -> Taking | None:
        """What is here of a fragment that is to be held now, or on its way; no longer kept here.

        While it is on its way it is ``early``.
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
        """A pull of ours has ended, with these checksums, or failed."""
        self._pulling.remove(taking)
        taking.early, taking.sums = False, sums
        unwanted = taking.dropped or (sums is None and taking.table is None)
        return [*(self._drop(taking) if unwanted else ()), *self._begin_queued()]

    def due(self, taking: Taking) -> list[Action]:
        """Nobody has asked for it in time."""
        return self._drop(taking) if self._takings.get(taking.key) is taking else []

    def review(self) -> list[Action]:
        """Let go what nobody will ask for any more."""
        return self._drop_all(self._is_stale)

    def supersede(self, shard: ShardId) -> list[Action]:
        """A rank saves this: what it was about to save before goes."""

        def is_older(taking: Taking) -> bool:
            other = taking.message.header.shard
            same = (other.run, other.rank) == (shard.run, shard.rank)
            return same and other.generation < shard.generation

        return self._drop_all(is_older)

    def clear(self, run: str | None) -> list[Action]:
        """Forget all of a run (None: of every one); what it had is free at once."""
        actions: list[Action] = []
        for taking in list(self._takings.values()):
            its_run = taking.message.header.shard.run
            if run in (None, its_run):
                if taking.early and taking.region is not None:  # bytes may still come
                    actions.append(Discard(its_run, taking.region))
                    taking.region = None
                actions += self._drop(taking)
        return actions

    def _is_stale(self, taking: Taking) -> bool:
        message = taking.message
        shard = message.header.shard
        record = self._records.look(shard.run)
        committed = record.committed is not None and shard.generation <= record.committed
        return committed or message.writer < record.fence

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
        """Forget it; its region is given back now, or when nobody writes to it any more."""
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
