"""A restore: fence older writers, and bring a rank's shard to its node. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, RunWriter, ShardId
from ecckpt.policy.rollbacks import RollBack
from ecckpt.protocol.messages.save import Slot


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a timeline for a session, and answer with the inventory of the run.

    All other writers are refused from then on. Refused if another session began the timeline, or if
    a start that is younger than this one, which is ``age_s`` old, began any. Repeated, it is
    answered again.
    """

    run: str
    writer: RunWriter
    age_s: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop everything that is held of a run, in memory and on disk, and begin a timeline."""

    run: str
    writer: RunWriter


@dataclass(frozen=True, slots=True)
class Fence:
    """Refuse all writers of older timelines from now on.

    ``restored`` is the generation that the writer's timeline continues, once that is known.
    ``roll_backs`` are all that the sender knows of, for agents that were away when they were made.
    """

    run: str
    writer: RunWriter
    restored: Generation | None
    roll_backs: tuple[RollBack, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """The addresses from which one fragment can be pulled."""

    index: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Bring the shard into a region on this node, from the sources that are left."""

    header: Header
    writer: RunWriter
    sources: tuple[Sources, ...]
    memory_bytes: int
    timeout_s: float

    @property
    def places(self) -> dict[int, tuple[str, ...]]:
        """The addresses that have each fragment, by its index."""
        return {each.index: each.addresses for each in self.sources}


@dataclass(frozen=True, slots=True)
class Fetched:
    """The slot with the verified shard in it, and what it took."""

    slot: Slot
    pulled_bytes: int
    rebuilt_fragments: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assign:
    """A rank's tensors will lie in the sealed home copy: its region is never written to again.

    That holds whatever happens to the shard and to the agent. Repeated, it is answered again.
    """

    shard: ShardId
