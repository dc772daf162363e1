"""Actions and events of an agent's core, as plain values.

An *action* is what the core decides; a driver performs it (agent/runtime/driver.py, or
sim/hosts/agent.py in a simulation). An *event* is what the driver tells the core: a request, the
end of an action, or an alarm.

    request ----> Core.handle ----> small actions: performed at once, in order, cannot fail
    Finished -->               ---> answer: one Reply or Refuse for each request, sooner or later
    Failed ---->               ---> large actions: performed by threads; each ends in exactly one
    Due ------->                    Finished or Failed, which is the next event
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ecckpt.agent.core.health import GroupHealth, PeerHealth
from ecckpt.agent.core.tasks import Fetching, Job, Scrubbing, Storing, Taking
from ecckpt.agent.records.entry import Entry
from ecckpt.protocol.messages.disk import Retain, Store
from ecckpt.protocol.messages.repair import Guard, Probe
from ecckpt.protocol.messages.restore import Assign, Begin, Fence, Fetch, Forget
from ecckpt.protocol.messages.save import (
    Commit,
    Held,
    Hold,
    Prefetch,
    Protect,
    Reserve,
    Revoke,
    Stage,
)

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.region import Region

# -- small actions --------------------------------------------------------------------------------
# The driver performs them under the core's lock, in order, before the next event. So the core's
# records and the files agree whenever another event is decided. They cannot fail.


@dataclass(frozen=True, slots=True)
class Seal:
    """Complete the file of an entry: table and end mark first, superblock last.

    The superblock names the content, so a file that a crash cut off before it has no name and is
    not adopted.
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class Recycle:
    """Keep a region for the next allocation. No process writes to it any more."""

    run: str
    region: Region


@dataclass(frozen=True, slots=True)
class Discard:
    """Unlink a region and count it out. Used where a trainer may still have it mapped."""

    run: str
    region: Region


@dataclass(frozen=True, slots=True)
class MarkAssigned:
    """Mark a region's file as assigned to a process, so that the next agent knows it too."""

    region: Region


@dataclass(frozen=True, slots=True)
class Release:
    """Give all spare regions of a run back to the system."""

    run: str


@dataclass(frozen=True, slots=True)
class Borrow:
    """Give ``taking`` a spare region that fits, if there is one; else it stays without."""

    taking: Taking


@dataclass(frozen=True, slots=True)
class Wake:
    """Tell the core ``Due(task)`` at ``at_s`` on its clock, or soon after."""

    at_s: float
    task: Job | Taking | GroupHealth | Scrubbing


@dataclass(frozen=True, slots=True)
class Warn:
    """Log a text at level warning."""

    text: str


# -- answers to the request that started the chain of events --------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """The request succeeded with this answer."""

    message: object


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request failed with this error."""

    error: Exception


# -- large actions: they take time; each ends in Finished or Failed -------------------------------


# Requests that are answered only when the run's notes with their changes are written.
Noted = Commit | Begin | Forget | Fence | Guard | Retain


@dataclass(frozen=True, slots=True)
class Remember:
    """Write the run's notes to its state file in tmpfs, as they are when this is performed.

    The result is the ``RunNotes`` that were written. ``request``, if any, is answered after that,
    so that an answer never promises what a killed agent would forget.
    """

    run: str
    request: Noted | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate:
    """Allocate a region for a task. The result is the region.

    ``budget_bytes`` is the run's memory budget; 0 stands for the agent's default. ``what`` is for
    error messages. ``again``: nothing may be dropped to make room, either because that was tried
    already or because the task is a repair.
    """

    run: str
    size_bytes: int
    budget_bytes: int
    what: str
    task: Reserve | Job | Taking | Fetching
    again: bool = False


@dataclass(frozen=True, slots=True)
class Encode:
    """Compute the job's parity from its home copy. The result is the checksum table."""

    job: Job


@dataclass(frozen=True, slots=True)
class Pull:
    """Pull the rows that the task lacks into its region. The result is the new ``sums``.

    Fails if the task has no region.
    """

    taking: Taking


@dataclass(frozen=True, slots=True)
class Gather:
    """Pull what survives of a shard into place and rebuild the rest. The result is ``Gathered``."""

    fetching: Fetching


@dataclass(frozen=True, slots=True)
class Gathered:
    """A shard in its region, every block verified, and what it took to get it there."""

    table: np.ndarray
    pulled_bytes: int
    rebuilt_fragments: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Post:
    """Send a message to the agent at ``address``.

    ``job`` and ``node`` are set for a ``Hold``: a failure to send it is that holder's answer.
    """

    address: str
    message: Hold | Held
    job: Job | None = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class Announce:
    """Send a ``Prefetch`` to a future holder, unless the job is past encoding by then.

    Best effort: the job does not depend on whether it arrives.
    """

    address: str
    node: str
    message: Prefetch
    job: Job


@dataclass(frozen=True, slots=True)
class AskPeer:
    """Ask a node which fragments it has. The result is a ``Presence``.

    ``at_s`` is when the core decided to ask. The timeout is short: a lost answer only counts one
    miss, and the node is asked again in the next round.
    """

    health: GroupHealth
    sight: PeerHealth
    message: Probe
    at_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """Verify a file on disk. The result is a text that says what is wrong, or is empty.

    One file is read at a time, at no more than ``bytes_per_s``.
    """

    scrubbing: Scrubbing
    file: DiskFile
    bytes_per_s: float


# -- large actions on the disk --------------------------------------------------------------------
# One thread of their own performs them, in the order in which they were decided. No request waits
# for the disk.


@dataclass(frozen=True, slots=True)
class Write:
    """Write a lent entry to disk. The result is the ``DiskFile``.

    ``again``: room was made once already after this file found none.
    """

    storing: Storing
    entry: Entry
    again: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove files from disk."""

    files: tuple[DiskFile, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Write the lasting part of the run's notes to disk. The result is what was written."""

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
    | Revoke
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
    """A large action succeeded."""

    action: Large
    result: object = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A large action failed and had no lasting effect."""

    action: Large
    error: Exception


@dataclass(frozen=True, slots=True)
class Due:
    """The time that a ``Wake`` named has come."""

    task: Job | Taking | GroupHealth | Scrubbing


@dataclass(frozen=True, slots=True)
class FilesRemoved:
    """Files of this agent in tmpfs were removed by another process, such as a cleaner.

    The regions among them are marked (``Region.removed``). ``runs`` have lost their state files.
    """

    runs: frozenset[str]


@dataclass(frozen=True, slots=True)
class Begun:
    """The agent serves from now on. All that an earlier process left in memory is entered."""


Event = Request | Finished | Failed | Due | FilesRemoved | Begun
