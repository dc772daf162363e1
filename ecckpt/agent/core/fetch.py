"""Bringing a shard to this node for a restore: a ``Fetch`` makes this node a home of the shard.

    start --> region allocated --> parity allocated --> gathered --> sealed, Fetched is the answer
      |          |                    |                    |
      +----------+--------------------+--------------------+--> failed: regions recycled, refused

``gather`` pulls every surviving block into place and rebuilds the rest; it needs the parity region
only if m > 0. The request is answered at the end, so a server thread waits all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecckpt.agent.core.actions import (
    Action,
    Allocate,
    Gather,
    Gathered,
    Recycle,
    Refuse,
    Reply,
    Seal,
)
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.tasks import Fetching
from ecckpt.agent.records.entry import Entry
from ecckpt.errors import Fenced, NotHeld, RequestRefused
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES, Header
from ecckpt.policy.sizing import parity_region_bytes
from ecckpt.protocol.messages.restore import Fetch, Fetched
from ecckpt.protocol.messages.save import Slot

if TYPE_CHECKING:
    from ecckpt.agent.storage.region import Region

# Each fetch occupies one of the 64 server threads (runtime/daemon.py) until it ends. The other half
# is left for peers: two nodes that fetch from each other would otherwise wait for each other.
FETCHES = 32


class Fetcher:
    """The shards on their way to this node, at most ``FETCHES``."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._running = 0

    def start(self, message: Fetch) -> list[Action]:
        """Allocate a region for the shard and gather it there; the answer comes at the end."""
        if self._running >= FETCHES:
            raise RequestRefused(self._records.node, 503, f"{FETCHES} shards are being fetched")
        header = message.header
        admitted = self._records.admit(header.shard.run, message.writer)
        self._running += 1
        return [*admitted, _allocate(Fetching(message), header.file_bytes)]

    def allocated(self, fetching: Fetching, region: Region) -> list[Action]:
        """The region of the shard was allocated, or after it the region of its parity."""
        header = fetching.message.header
        if fetching.region is not None:
            fetching.parity = region
        else:
            fetching.region = region
            if header.m:
                return [_allocate(fetching, parity_region_bytes(header))]
        return [Gather(fetching)]

    def gathered(self, fetching: Fetching, gathered: Gathered) -> list[Action]:
        """The shard is in its region, every block verified: seal and enter it."""
        message, region = fetching.message, fetching.region
        assert region is not None
        run = message.header.shard.run
        try:  # again: the fence may have risen during the gathering
            admitted = self._records.admit(run, message.writer)
        except Fenced as error:
            return self.failed(fetching, error)
        if region.removed:
            return self.failed(fetching, NotHeld(f"the file of {message.header.shard} was removed"))
        entry = Entry(header=message.header, region=region, table=gathered.table)
        fetching.region = None  # the entry owns it now: it must not be recycled below
        answer = Fetched(
            slot_of(message.header, region),
            gathered.pulled_bytes,
            gathered.rebuilt_fragments,
            gathered.problems,
        )
        entered = [Seal(entry), *self._records.enter(entry)]
        return [*admitted, *entered, *self._release(fetching), Reply(answer)]

    def failed(self, fetching: Fetching, error: Exception) -> list[Action]:
        """Memory was too small, or the sources that can be reached do not suffice."""
        return [*self._release(fetching), Refuse(error)]

    def _release(self, fetching: Fetching) -> list[Action]:
        self._running -= 1
        run = fetching.message.header.shard.run
        regions = [fetching.region, fetching.parity]
        fetching.region = fetching.parity = None
        return [Recycle(run, region) for region in regions if region is not None]


def slot_of(header: Header, region: Region) -> Slot:
    """How a trainer on this node maps a home copy, or the region for one."""
    return Slot(
        path=str(region.path),
        region=region.name,
        use=region.use,
        file_bytes=region.size_bytes,
        payload_offset=SUPERBLOCK_BYTES,
        header=header,
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
