"""A restore: older writers out, and a rank's shard onto its node. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.rollbacks import RollBack
from ecckpt.protocol.messages.save import Slot


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a timeline of a session, unless another start of the run has; show what is there.

    Refuses all writers of older timelines from then on. Asked again, it is answered again.
    """

    run: str
    timeline: int
    session: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop all that is held of a run, in memory and on disk, and begin that timeline of nothing."""

    run: str
    timeline: int
    session: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Refuse all writers of older timelines from now on.

    ``restored`` is the generation the new timeline continues, once that is known; ``roll_backs``
    are all that the sender knows of, so that an agent which was not there learns them.
    """

    run: str
    timeline: int
    restored: Generation | None
    roll_backs: tuple[RollBack, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where one fragment can be pulled from."""

    index: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the shard into a slot on this node, from whatever sources are left."""

    header: Header
    writer: int
    sources: tuple[Sources, ...]
    memory_bytes: int
    timeout_s: float

    @property
    def places(self) -> dict[int, tuple[str, ...]]:
        """The addresses that have each fragment, by its index."""
        return {each.index: each.addresses for each in self.sources}


@dataclass(frozen=True, slots=True)
class Fetched:
    """A slot with the verified shard in it, and where the bytes came from."""

    slot: Slot
    pulled_bytes: int
    rebuilt_fragments: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Assign:
    """A rank's tensors will lie in the sealed home copy: it is never written to again.

    Whatever becomes of the shard, and of the agent. Asked again, it is answered again.
    """

    shard: ShardId
