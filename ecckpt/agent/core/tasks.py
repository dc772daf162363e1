"""Tasks of an agent's core: work that takes more than one event. Plain values.

Each kind belongs to one part of the core: ``Job`` to protect.py, ``Taking`` to hold.py and
prefetch.py, ``Fetching`` to fetch.py, ``Storing`` to archive.py, ``Scrubbing`` to scrub.py. Actions
carry the task that they are for, so that their ends find it again.
``DiskInventory`` is what the disk's thread brings back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from ecckpt.agent.records.entry import Entry
from ecckpt.agent.records.run_notes import RunNotes
from ecckpt.protocol.messages.disk import Store
from ecckpt.protocol.messages.restore import Fetch
from ecckpt.protocol.messages.save import Hold, Prefetch, Protect

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.region import Region
    from ecckpt.format.block_ranges import Flags
    from ecckpt.format.ids import ShardId

# Why a write to disk ended early: its region went back to a save.
TAKEN_BACK = "memory was needed for a newer save (a larger memory_bytes would keep it longer)"


class JobState(StrEnum):
    """The state of a ``Job``. The values are those of ``Progress.state`` on the wire."""

    ENCODING = "encoding"
    SCATTERING = "scattering"
    PROTECTED = "protected"
    FAILED = "failed"


@dataclass(eq=False, kw_only=True, slots=True)
class Job:
    """Protection of one shard: encode it, then have its holders pull their fragments.

    Attributes:
        message: the request, or for a repair the request that the agent made for itself.
        home: the shard's home copy, pinned by this job; None once the job has released it.
        started_s, deadline_s: on the clock of the core. ``deadline_s`` becomes earlier once
            ``min_fragments`` are held: then those that have not answered are asked again.
        parity: the region that the parity is encoded into.
        waiting: indices of fragments whose holders have not answered.
        held: indices of fragments that their holders have verified and sealed.
        unreached, dead: indices of fragments whose holders could not be reached once, and twice.
        encode_s, protected_s: seconds from the start to the end of encoding, and to the end.
        repair: the shard was protected before. A repair is cancelled when a save begins.
    """

    message: Protect
    home: Entry | None
    started_s: float
    deadline_s: float
    state: JobState = JobState.ENCODING
    parity: Region | None = None
    waiting: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    unreached: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    encode_s: float = 0.0
    protected_s: float = 0.0
    repair: bool = False

    @property
    def needed(self) -> int:
        """How many fragments must be held for the shard to count as protected."""
        least = self.message.min_fragments
        if not self.message.every_living:
            return least
        return max(least, len(self.message.targets) - len(self.dead))

    @property
    def ended(self) -> bool:
        """Whether the job has ended: nothing of it changes any more."""
        return self.state in (JobState.PROTECTED, JobState.FAILED)


@dataclass(eq=False, slots=True, kw_only=True)
class Taking:
    """Taking in one fragment of another node's shard, because of a ``Hold`` or a ``Prefetch``.

    Attributes:
        message: the newest request for this fragment; a ``Hold`` replaces a ``Prefetch``.
        table: the checksums from the ``Hold``; None while only a ``Prefetch`` has come.
        region: where the bytes go; None until one was allocated or borrowed.
        sums: checksums of the blocks now in ``region``; None before the first pull has ended.
        tries: pulls since ``table`` is known.
        early: a pull that began before the ``Hold`` is under way and may still write to ``region``.
        dropped: the result is no longer wanted; a pull that is under way stops at its next check.
    """

    message: Hold | Prefetch
    _: KW_ONLY
    table: np.ndarray | None = None
    region: Region | None = None
    sums: np.ndarray | None = None
    tries: int = 0
    early: bool = False
    dropped: bool = False

    @property
    def key(self) -> tuple[ShardId, int]:
        """The shard and the index of the fragment."""
        return self.message.header.shard, self.message.header.index

    def lacking(self) -> Flags:
        """Flags of the rows that have to be pulled: absent, or different from the table.

        All rows before the first pull; none while there is no table to compare with.
        """
        header = self.message.header
        if self.sums is None:
            return np.ones(header.rows, bool)
        if self.table is None:
            return np.zeros(header.rows, bool)
        return np.asarray(self.sums != self.table[header.index])


@dataclass(eq=False, slots=True)
class Fetching:
    """Bringing a shard to this node: into ``region``, with ``parity`` to rebuild from.

    Both are None until they were allocated.
    """

    message: Fetch
    region: Region | None = None
    parity: Region | None = None


@dataclass(eq=False, slots=True)
class Storing:
    """Writing this node's files of one generation to disk; the entries ``waiting`` are lent to it.

    ``copied_bytes`` of the file being written have been given to the disk. The disk's thread
    updates it without a lock; it is read only to report progress.
    """

    message: Store
    waiting: deque[Entry]
    copied_bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Scrubbing:
    """One endless scrub of the disk; ``waiting`` are the files left of the current round."""

    waiting: deque[DiskFile] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class DiskInventory:
    """What an earlier process left on disk: notes by run, files, and rejected files."""

    notes: dict[str, RunNotes] = field(default_factory=dict)
    files: list[DiskFile] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
