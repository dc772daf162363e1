"""One home copy or fragment in the memory of an agent.

An entry passes through these states:

    reserved --stage--> staged --encoded--> sealed --commit of a newer one--> dropped
        |                 |                   |                                ^
        |                 |                 lent (a write to disk keeps it) -----+
        |                 |                   |                                |
        +-----------------+-------------------+-- fence, discard, forget, room --+

    reserved   ``RunRecord.reserved`` has the slot of a rank; there is no entry yet
    staged     an entry without ``table``: its superblock is void, no reader accepts the file
    sealed     an entry with ``table``: complete, readable, adopted after a restart. Files that
               were pulled from peers enter in this state
    lent       sealed, and a write to disk is pending (``lent``)
    dropped    removed from ``entries``. It is ``doomed``: its region is given up as soon as
               ``pins`` (a reference count) is zero and it is not lent
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import numpy as np

from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import ShardId

if TYPE_CHECKING:
    from ecckpt.agent.storage.region import Region


@dataclass(eq=False, slots=True, kw_only=True)
class Entry:
    """A home copy or fragment in the memory of this node.

    table       checksums of all blocks of the shard; None until the file is sealed
    pins        reference count: jobs and verifications that use the entry
    doomed      give the region up as soon as ``pins`` is zero and the entry is not lent
    lent        a write to disk is pending: a pin that may be taken back at any time, since the
                disk's thread reads this flag after each piece that it has copied
    early       data fragments may be pulled although the home copy is still being encoded
    parity      the parity fragments of a home copy while holders pull them
    damage      what a verification found wrong with it; empty if nothing
    """

    header: Header
    region: Region
    table: np.ndarray | None
    _: KW_ONLY
    pins: int = 0
    doomed: bool = False
    lent: bool = False
    early: bool = False
    parity: Region | None = None
    damage: str = ""

    @property
    def key(self) -> tuple[ShardId, int]:
        """The key of the entry in ``RunRecord.entries``."""
        return self.header.shard, self.header.index
