"""Effects on a rank's state and its shards: part of the closed set of client/effects.py.

The routines do not know what a state is; the performers do: client/state_performer.py in the
training process, sim/state.py in the simulator. A plan, a shard and a claim pass through routines
as values of the protocols below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ecckpt.client.effects import Effect

if TYPE_CHECKING:
    from ecckpt.format.fragment_file import Header
    from ecckpt.policy.survival import ShardSources
    from ecckpt.protocol.messages.save import Slot


class NotWanted(Exception):
    """A proof ended early, because no routine waits for it any more."""


class ReplicaClaim(Protocol):
    """What one rank says that all ranks have, tensor by tensor (state/snapshot/replicas.py)."""

    @property
    def digest(self) -> bytes:
        """Equal for two ranks if their claims are."""

    def pack(self) -> bytes:
        """What ``differences`` needs of another rank's claim."""

    def differences(self, packed: bytes) -> str:
        """In words, where another rank's claim is not this one."""


class Snapshot(Protocol):
    """The plan of one shard, before its bytes are copied (``state.snapshot.plan.ShardPlan``)."""

    @property
    def shard_bytes(self) -> int:
        """Length of the shard."""

    @property
    def claim(self) -> ReplicaClaim | None:
        """What the other ranks must have as well, if anything."""


class Brought(Protocol):
    """A shard that is here, every block of it proven, and what bringing it cost."""

    @property
    def pulled_bytes(self) -> int:
        """Bytes that came from other nodes."""

    @property
    def rebuilt_fragments(self) -> int:
        """Fragments that were computed."""

    @property
    def reseeded(self) -> tuple[str, ...]:
        """Paths of the ``RngState`` that are to be seeded anew."""

    @property
    def own(self) -> bool:
        """Whether the bytes are this process's, which may keep and change them."""


@dataclass(frozen=True, slots=True)
class PlanState(Effect[Snapshot]):
    """Plan the shard of a state; ``previous`` is the plan before, most of which can be used again.

    Raises what the state's own code raises, too.
    """

    state: Any
    previous: Snapshot | None


@dataclass(frozen=True, slots=True)
class CopyState(Effect[None]):
    """Copy the planned state into a slot, and zeros up to ``header.payload_bytes`` behind it.

    A recycled slot holds an older shard, and what lies behind the new one is coded too. The state
    may change as soon as this returns. Raises what the state's own code raises, too.
    """

    snapshot: Snapshot
    slot: Slot
    header: Header


@dataclass(frozen=True, slots=True)
class MapSlot(Effect[None]):
    """Map a slot ahead of the ``CopyState`` that will fill it."""

    slot: Slot
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class SlotExists(Effect[bool]):
    """Whether the slot's file is still there: an agent that starts anew keeps no unused slots."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class ProveHome(Effect[Brought]):
    """Map this node's home copy in a slot and check every block of it.

    Attributes:
        assign: map it privately, so that tensors of this process may lie in it for good.
        wanted: asked between pieces; the proof ends with ``NotWanted`` once it is False.
        patience_s: how long the agent may take to send the checksums.

    Raises ``CorruptFragment`` for a bad block, ``NotMapped`` without address space.
    """

    slot: Slot
    assign: bool
    wanted: Callable[[], bool]
    patience_s: float


@dataclass(frozen=True, slots=True)
class ReadShard(Effect[Brought]):
    """Bring one shard from other nodes straight into this process, past this node's agent.

    ``sources`` names addresses of agents where others name nodes. One agent may take ``patience_s``
    to answer, all of it ``timeout_s``.
    """

    sources: ShardSources
    patience_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class GatherShard(Effect[None]):
    """Read all of one shard from other nodes, prove it and drop it: can it be had from this node?

    ``sources`` names nodes. Takes memory for a few pieces. Raises what ``ReadShard`` raises.
    """

    sources: ShardSources
    patience_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class MakeShard(Effect[Brought]):
    """Make this rank's shard out of all that another number of ranks, or another mesh, saved.

    ``shards`` are in the order of the ranks that saved. Raises ``StateMismatch`` where none can be
    made that fits ``state``.
    """

    shards: Sequence[ShardSources]
    state: Any
    patience_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CheckState(Effect["Callable[[], int]"]):
    """Check a shard against the state and change nothing; the result loads it (``LoadState``).

    ``assign``: without a copy where that is possible. Raises ``StateMismatch``.
    """

    state: Any
    brought: Brought
    assign: bool


@dataclass(frozen=True, slots=True)
class IsRelaid(Effect[bool]):
    """Whether a shard would fit the state but for DTensors that are cut in another way here."""

    state: Any
    brought: Brought


@dataclass(frozen=True, slots=True)
class LoadState(Effect[int]):
    """Load a checked shard into the state; the result is how many bytes were assigned."""

    load: Callable[[], int]
