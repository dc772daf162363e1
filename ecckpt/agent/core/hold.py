"""Holding fragments of other nodes' shards: queue, pull, verify every block, seal, answer.

A fragment being taken in (``Taking``):

    Hold --> waiting --> pulling: allocate a region, unless prefetch.py has borrowed one
                            |
                            v
                         pull the rows that differ from the table, at most _TRIES times
                            |                                    |
                            | every block matches                | no room, no bytes, bad blocks
                            v                                    v
                         admit again, seal                    give the region back
                            |                                    |
                            +------> Held to the home <----------+

A ``Prefetch`` may come before the ``Hold``: then prefetch.py may have pulled some bytes already.
At most ``PULLS`` fragments are in the state pulling. A fragment that was claimed from the
prefetcher while its early pull is under way waits in this state for that pull to end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ecckpt.agent.core.actions import Action, Allocate, Discard, Post, Pull, Recycle, Reply, Seal
from ecckpt.agent.core.prefetch import Prefetcher
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.tasks import Taking
from ecckpt.agent.records.entry import Entry
from ecckpt.errors import Fenced, InvalidMessage, RequestRefused
from ecckpt.format.fragment_file import HOME, parse_table
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.save import Held, Hold, Prefetch

if TYPE_CHECKING:
    from ecckpt.agent.storage.region import Region

PULLS = 4  # at a time
_QUEUE_LIMIT = 4096
_TRIES = 2  # a bit that flips on the way is cured by a second pull; damage at the source is not


class Holder:
    """The fragments that this node was asked to hold; ``PULLS`` of them are pulled at a time."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self.prefetcher = Prefetcher(records)
        self._waiting: deque[Taking] = deque()
        self._pulling: list[Taking] = []

    def coming(self, shard: ShardId) -> list[int]:
        """Indices of fragments of a shard that are queued or being pulled."""
        takings = [taking.message.header for taking in (*self._waiting, *self._pulling)]
        return sorted({header.index for header in takings if header.shard == shard})

    def start(self, message: Prefetch | Hold, now_s: float) -> list[Action]:
        """Take a ``Hold`` into the queue, or perhaps begin to pull for a ``Prefetch``."""
        if isinstance(message, Prefetch):
            return self._prefetch(message, now_s)
        return self._hold(message)

    def _prefetch(self, message: Prefetch, now_s: float) -> list[Action]:
        header = message.header
        if not 0 <= header.index < header.k:
            raise InvalidMessage(
                f"fragment {header.index} cannot be prefetched: "
                "only data fragments exist before encoding"
            )
        admitted = self._records.admit(header.shard.run, message.writer, header)
        coming = header.index in self.coming(header.shard)
        begun = [] if coming else self.prefetcher.start(message, now_s)
        return [*admitted, Reply(Done()), *begun]

    def _hold(self, message: Hold) -> list[Action]:
        """Queue the work. ``Held`` goes to the source when it has ended."""
        header = message.header
        if header.index == HOME:
            raise InvalidMessage("a home copy is fetched, not held")
        # Every check comes before the first change: a request that is refused changes nothing.
        self._records.get(header.shard.run).check_writer(message.writer)
        table = parse_table(message.table, header, f"table of {header.shard}")
        if any(each.message == message for each in (*self._waiting, *self._pulling)):
            return [Reply(Done())]  # asked again, and still at it
        queued = len(self._waiting) + len(self._pulling)
        if queued >= _QUEUE_LIMIT:
            raise RequestRefused(self._records.node, 503, f"{queued} fragments are queued")
        admitted = self._records.admit(header.shard.run, message.writer, header)
        superseded = self.prefetcher.supersede(header.shard)
        taking = self.prefetcher.claim(message) or Taking(message=message)
        taking.message, taking.table = message, table
        self._waiting.append(taking)
        return [*admitted, Reply(Done()), *superseded, *self._begin_queued()]

    def allocated(self, taking: Taking, region: Region) -> list[Action]:
        """The region for the fragment was allocated."""
        taking.region = region
        return self._advance(taking)

    def pulled(self, taking: Taking, sums: np.ndarray) -> list[Action]:
        """A pull has ended; ``sums`` are the checksums of the blocks now in the region."""
        if taking.early:
            return self._ended_early(taking, sums)
        taking.sums = sums
        return self._advance(taking)

    def failed(self, taking: Taking, error: Exception) -> list[Action]:
        """The region could not be allocated, or the source not be read."""
        return self._ended_early(taking, None) if taking.early else self._end(taking, str(error))

    def _ended_early(self, taking: Taking, sums: np.ndarray | None) -> list[Action]:
        """A pull that began before the ``Hold`` has ended; ``sums`` is None if it failed.

        If the fragment was claimed meanwhile, go on with what arrived: only rows that differ from
        the table are pulled again.
        """
        actions = self.prefetcher.ended(taking, sums)
        return actions + (self._advance(taking) if taking in self._pulling else [])

    def _advance(self, taking: Taking) -> list[Action]:
        """Take the next step for a fragment: allocate, pull, seal or give up."""
        message, header = taking.message, taking.message.header
        assert isinstance(message, Hold)
        if taking.region is None:
            what = f"fragment {header.index} of {header.shard}"
            return [
                Allocate(
                    run=header.shard.run,
                    size_bytes=header.file_bytes,
                    budget_bytes=message.memory_bytes,
                    what=what,
                    task=taking,
                    again=message.repair,
                )
            ]
        bad_blocks = int(taking.lacking().sum())
        if bad_blocks and taking.tries < _TRIES:
            taking.tries += 1
            return [Pull(taking)]
        if bad_blocks:
            return self._end(
                taking,
                f"fragment {header.index} of {header.shard} from {message.source}: "
                f"{bad_blocks} of {header.rows} blocks fail their CRC32C",
            )
        if taking.region.removed:  # its file was removed by another process meanwhile
            return self._end(taking, f"the file of fragment {header.index} was removed")
        return self._seal(taking, taking.region)

    def _seal(self, taking: Taking, region: Region) -> list[Action]:
        header = taking.message.header
        try:  # again: the fence may have risen during the pull
            admitted = self._records.admit(header.shard.run, taking.message.writer)
        except Fenced as error:
            return self._end(taking, str(error))
        entry = Entry(header=header, region=region, table=taking.table)
        taking.region = None  # the entry owns it now
        return [*admitted, Seal(entry), *self._records.enter(entry), *self._end(taking, "")]

    def _begin_queued(self) -> list[Action]:
        """Begin with queued fragments while there are places."""
        actions: list[Action] = []
        while self._waiting and len(self._pulling) < PULLS:
            self._pulling.append(self._waiting.popleft())
            actions += self._begin_pull(self._pulling[-1])
        return actions

    def _begin_pull(self, taking: Taking) -> list[Action]:
        message, header = taking.message, taking.message.header
        assert isinstance(message, Hold)
        run = header.shard.run
        actions = self._records.discard(run, header.shard.rank, message.discard)
        # The home asks again after a lost answer, or when it has been restarted.
        present = self._records.get(run).find(header.shard, header.index)
        # A damaged one is pulled again, and replaced when the new one is sealed.
        if present is not None and present.header.same_shard(header) and not present.damage:
            return actions + self._end(taking, "")
        record = self._records.get(run)
        # This node may know of a newer commit than the home that repairs.
        if message.repair and record.is_outdated(header.shard.generation, record.committed):
            return actions + self._end(taking, f"{record.committed} is committed")
        return actions if taking.early else [*actions, *self._advance(taking)]

    def _end(self, taking: Taking, problem: str) -> list[Action]:
        """End the work on a fragment: give its region back and answer the home."""
        shard, index = taking.message.header.shard, taking.message.header.index
        actions: list[Action] = []
        if taking.region is not None:
            # A pull that is under way may still write: such a region is not used again.
            let_go = Discard if taking.early else Recycle
            actions.append(let_go(shard.run, taking.region))
            taking.region = None
        taking.dropped = True
        self._pulling.remove(taking)
        answer = Held(shard, index, self._records.node, problem)
        return [*actions, Post(taking.message.source, answer), *self._begin_queued()]
