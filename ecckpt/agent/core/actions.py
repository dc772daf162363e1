"""What an agent has under way, what it does and what it is told: plain values.

Tasks are the work that takes more than one event. Actions are what the core decides; a driver
performs them. Events are what the driver tells the core: requests, ends of actions, alarms.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from ecckpt.agent.core.health import GroupHealth, PeerHealth
from ecckpt.agent.core.run_record import Entry
from ecckpt.protocol.messages.disk import Retain, Store
from ecckpt.protocol.messages.repair import Guard, Probe
from ecckpt.protocol.messages.restore import Assign, Begin, Fence, Fetch, Forget
from ecckpt.protocol.messages.save import Commit, Held, Hold, Prefetch, Protect, Reserve, Stage

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.regions import Region
    from ecckpt.format.block_ranges import Flags
    from ecckpt.format.ids import ShardId

# -- tasks ----------------------------------------------------------------------------------------


class JobState(StrEnum):
    """The state of a ``Job``; the values are those of ``Progress.state`` on the wire."""

    ENCODING = "encoding"
    SCATTERING = "scattering"
    PROTECTED = "protected"
    FAILED = "failed"


@dataclass(eq=False, kw_only=True, slots=True)
class Job:
    """Protecting one shard; ``home`` is its home copy until the job has ended.

    ``deadline_s`` comes nearer once enough fragments are held. A ``repair`` is of a shard that was
    protected before: it gives way to everything else.
    """

    message: Protect
    home: Entry | None
    started_s: float
    deadline_s: float
    state: JobState = JobState.ENCODING
    parity: Region | None = None
    waiting: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    encode_s: float = 0.0
    protected_s: float = 0.0
    repair: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing about it changes any more."""
        return self.state in (JobState.PROTECTED, JobState.FAILED)


@dataclass(eq=False, slots=True)
class Taking:
    """Taking in one fragment that another node asked to hold, or is about to.

    As long as that is not sure there is no ``table``. ``sums`` are the checksums of the blocks that
    are in ``region``, ``tries`` counts pulls since the table is there. What is ``early`` is being
    pulled since before that; what is ``dropped`` need not arrive.
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
        """Which fragment."""
        return self.message.header.shard, self.message.header.index

    def lacking(self) -> Flags:
        """The rows that have to be pulled: those not here, or not what the table says."""
        header = self.message.header
        if self.sums is None:
            return np.ones(header.rows, bool)
        if self.table is None:
            return np.zeros(header.rows, bool)
        return np.asarray(self.sums != self.table[header.index])


@dataclass(eq=False, slots=True)
class Fetching:
    """Bringing a shard home: into ``region``, with ``parity`` to rebuild from."""

    message: Fetch
    region: Region | None = None
    parity: Region | None = None


@dataclass(eq=False, slots=True)
class Storing:
    """Writing what is here of one generation to disk; what is ``waiting`` is lent to it.

    ``copied_bytes`` of the file that is being written have gone to the disk; its thread says so.
    """

    message: Store
    waiting: deque[Entry]
    copied_bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Scrubbing:
    """Reading all files on disk, one by one; these are left of the round."""

    waiting: deque[DiskFile] = field(default_factory=deque)


# -- actions that are settled at once, in order, before the next event; they cannot fail ----------


@dataclass(frozen=True, slots=True)
class Seal:
    """Complete the file of an entry: table and end mark first, superblock last."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Recycle:
    """Keep a region for the next taker. Nobody writes to it any more."""

    run: str
    region: Region


@dataclass(frozen=True, slots=True)
class Discard:
    """Give a region back for good: somebody may still have it mapped."""

    run: str
    region: Region


@dataclass(frozen=True, slots=True)
class MarkAssigned:
    """Mark a region as one that a process keeps, so that an agent after this one knows it."""

    region: Region


@dataclass(frozen=True, slots=True)
class Release:
    """Give back what a run keeps for later."""

    run: str


@dataclass(frozen=True, slots=True)
class Borrow:
    """Give the task a region that is kept for the next taker, if there is one that fits."""

    taking: Taking


@dataclass(frozen=True, slots=True)
class Wake:
    """Tell the core ``Due(task)`` at that time, or soon after."""

    at_s: float
    task: Job | Taking | GroupHealth | Scrubbing


@dataclass(frozen=True, slots=True)
class Warn:
    """Something that people may want to know."""

    text: str


# -- answers to the request that the events began with --------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """It is done."""

    message: object


@dataclass(frozen=True, slots=True)
class Refuse:
    """It cannot be done."""

    error: Exception


# -- actions that take time: each ends in Finished or Failed --------------------------------------


# Requests that are answered when what they change is written down.
Noted = Commit | Begin | Forget | Fence | Guard | Retain


@dataclass(frozen=True, slots=True)
class Remember:
    """Write down what must outlive the process of a run, as it is when this is performed.

    Its result is the ``Notes`` that were written. ``request`` is answered after that.
    """

    run: str
    request: Noted | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate:
    """A region for a task. Its result is the region; ``budget_bytes`` 0 is the agent's default."""

    run: str
    size_bytes: int
    budget_bytes: int
    what: str
    task: Reserve | Job | Taking | Fetching
    again: bool = False


@dataclass(frozen=True, slots=True)
class Encode:
    """Fill the job's parity from its home copy. Its result is the checksum table."""

    job: Job


@dataclass(frozen=True, slots=True)
class Pull:
    """Pull what the task lacks into its region. Its result is the ``sums`` of all blocks there.

    It fails if there is no region.
    """

    taking: Taking


@dataclass(frozen=True, slots=True)
class Gather:
    """Pull what is left of a shard into place and rebuild the rest. Its result is ``Gathered``."""

    fetching: Fetching


@dataclass(frozen=True, slots=True)
class Gathered:
    """A shard in its region, every block proven, and what that took."""

    table: np.ndarray
    pulled_bytes: int
    rebuilt_fragments: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Post:
    """Send a message to the agent at an address. ``job`` waits for the answer to a ``Hold``."""

    address: str
    message: Hold | Held
    job: Job | None = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the agent at an address what it will be asked to hold, unless that has begun.

    Whether it arrives makes no difference.
    """

    address: str
    message: Prefetch
    job: Job


@dataclass(frozen=True, slots=True)
class AskPeer:
    """Ask a node what it has. Its result is a ``Presence``. ``at_s`` is when this was decided.

    Nothing hangs on a single answer: patience of a few seconds is enough.
    """

    health: GroupHealth
    sight: PeerHealth
    message: Probe
    at_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """Read a file on disk. Its result says what is wrong with it: nothing if it is empty.

    At most at that rate; no other is read meanwhile.
    """

    scrubbing: Scrubbing
    file: DiskFile
    bytes_per_s: float


# -- the same, but nobody waits for the disk: one thread of its own does them, in order -----------


@dataclass(frozen=True, slots=True)
class Write:
    """Write a lent entry to disk. Its result is the ``DiskFile``."""

    storing: Storing
    entry: Entry
    again: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove files from disk."""

    files: tuple[DiskFile, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Write down on disk what must outlive the memory of a run. Its result is the ``Notes``."""

    run: str


Small = Seal | Recycle | Discard | MarkAssigned | Release | Borrow | Wake | Warn
Answer = Reply | Refuse
Behind = Write | Remove | Record
Large = Remember | Allocate | Encode | Pull | Gather | Post | Announce | AskPeer | Check | Behind
Action = Small | Answer | Large

# -- events ---------------------------------------------------------------------------------------

Request = (
    Reserve
    | Stage
    | Protect
    | Prefetch
    | Hold
    | Held
    | Commit
    | Begin
    | Forget
    | Fence
    | Fetch
    | Assign
    | Guard
    | Store
    | Retain
)


@dataclass(frozen=True, slots=True)
class Finished:
    """A large action is done."""

    action: Large
    result: object = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A large action could not be done, and left nothing behind."""

    action: Large
    error: Exception


@dataclass(frozen=True, slots=True)
class Due:
    """The time that a ``Wake`` named has come."""

    task: Job | Taking | GroupHealth | Scrubbing


@dataclass(frozen=True, slots=True)
class Begun:
    """The agent serves from now on: what an earlier process left has been entered."""


Event = Request | Finished | Failed | Due | Begun
