"""Bringing a shard home: a region, room for parity, gather and rebuild, seal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecckpt.agent.core.actions import (
    Action,
    Allocate,
    Fetching,
    Gather,
    Gathered,
    Recycle,
    Refuse,
    Reply,
    Seal,
)
from ecckpt.agent.core.run_record import Entry
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.sizing import parity_region_bytes
from ecckpt.errors import Fenced, RequestRefused
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES, Header
from ecckpt.protocol.messages.restore import Fetch, Fetched
from ecckpt.protocol.messages.save import Slot

if TYPE_CHECKING:
    from ecckpt.agent.storage.regions import Region

# Whoever asks waits in a server thread: some must be left for peers that fetch from here.
FETCHES = 32


class Fetcher:
    """The shards on their way to this node."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._running = 0

    def start(self, message: Fetch) -> list[Action]:
        """Make this node the shard's home; answered when it is here."""
        if self._running >= FETCHES:
            raise RequestRefused(self._records.node, 503, f"{FETCHES} shards are being fetched")
        header = message.header
        admitted = self._records.admit(header.shard.run, message.writer)
        self._running += 1
        return [*admitted, _allocate(Fetching(message), header.file_bytes)]

    def allocated(self, fetching: Fetching, region: Region) -> list[Action]:
        """There is room for the shard, or for its parity."""
        header = fetching.message.header
        if fetching.region is not None:
            fetching.parity = region
        else:
            fetching.region = region
            if header.m:
                return [_allocate(fetching, parity_region_bytes(header))]
        return [Gather(fetching)]

    def gathered(self, fetching: Fetching, gathered: Gathered) -> list[Action]:
        """The shard is here, every block proven."""
        message, region = fetching.message, fetching.region
        assert region is not None
        run = message.header.shard.run
        try:
            admitted = self._records.admit(run, message.writer)
        except Fenced as error:
            return self.failed(fetching, error)
        entry = Entry(message.header, region, gathered.table)
        fetching.region = None
        answer = Fetched(
            slot_of(message.header, region),
            gathered.pulled_bytes,
            gathered.rebuilt_fragments,
            gathered.problems,
        )
        entered = [Seal(entry), *self._records.enter(entry)]
        return [*admitted, *entered, *self._release(fetching), Reply(answer)]

    def failed(self, fetching: Fetching, error: Exception) -> list[Action]:
        """There is no room, or what can be reached does not suffice."""
        return [*self._release(fetching), Refuse(error)]

    def _release(self, fetching: Fetching) -> list[Action]:
        self._running -= 1
        run = fetching.message.header.shard.run
        regions = [fetching.region, fetching.parity]
        fetching.region = fetching.parity = None
        return [Recycle(run, region) for region in regions if region is not None]


def slot_of(header: Header, region: Region) -> Slot:
    """How a trainer on this node reaches a home copy, or the place for one."""
    return Slot(
        str(region.path), region.name, region.use, region.size_bytes, SUPERBLOCK_BYTES, header
    )


def _allocate(fetching: Fetching, size_bytes: int) -> Allocate:
    message = fetching.message
    shard = message.header.shard
    return Allocate(
        run=shard.run,
        size_bytes=size_bytes,
        budget_bytes=message.memory_bytes,
        what=f"restoring {shard}",
        task=fetching,
    )
