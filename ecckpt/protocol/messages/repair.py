"""Repair: who watches over what, who has what of it, and what shall be made again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.restore import Sources
from ecckpt.protocol.messages.save import Target


@dataclass(frozen=True, slots=True)
class Member:
    """A node of a group: where it is, and what it fails together with."""

    node: str
    domain: str
    address: str


@dataclass(frozen=True, slots=True)
class Guard:
    """Watch over the home copies of a run on this node, and re-make what their holders lose.

    ``members`` are the other nodes of the group in ring order: the first ``holders`` of them keep
    fragments 0, 1, ...; the others may take what a lost one had. ``local_ranks`` have their home
    here; ``memory_bytes`` is the run's budget on each node (0: the agent's default), of which a
    repair leaves what saves need. ``timeout_s`` is for the repair of one shard.
    """

    run: str
    writer: int
    members: tuple[Member, ...]
    holders: int
    local_ranks: int
    memory_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A home asks another node whether it lives, and what it has of these shards."""

    run: str
    shards: tuple[ShardId, ...]


@dataclass(frozen=True, slots=True)
class Presence:
    """What a node has of the shards it was asked about, in their order: indices (-1: home copy).

    ``coming`` are fragments that it is about to pull, or pulling; ``committed`` is the newest
    generation that it was told of.
    """

    node: str
    committed: Generation | None
    held: tuple[tuple[int, ...], ...]
    coming: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Repair:
    """Have the targets hold their fragments of a shard: from the home copy here, or fetch it first.

    The fields are those of ``Fetch`` and ``Protect``.
    """

    header: Header
    writer: int
    sources: tuple[Sources, ...]
    targets: tuple[Target, ...]
    memory_bytes: int
    timeout_s: float
