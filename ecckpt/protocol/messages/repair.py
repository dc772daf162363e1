"""Repair: which home copies are watched, what a node has of them, what is made again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, RunWriter, ShardId
from ecckpt.protocol.messages.restore import Sources
from ecckpt.protocol.messages.save import Target


@dataclass(frozen=True, slots=True)
class Member:
    """A node of a group: its address, and the domain that it fails together with."""

    node: str
    domain: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Watch the home copies of a run on this node, and make fragments again that holders lose.

    ``members`` are the other nodes of the group in ring order. The first ``holders`` of them keep
    fragments 0, 1, ...; the others may take the fragments of a lost holder. ``local_ranks`` is the
    number of ranks whose home is this node. ``memory_bytes`` is the run's budget on each node (0:
    the agent's default); a repair leaves the part that saves need. ``timeout_s`` is for the repair
    of one shard.
    """

    run: str
    writer: RunWriter
    members: tuple[Member, ...]
    holders: int
    local_ranks: int
    memory_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A home asks another node whether it answers, and what it has of these shards."""

    run: str
    shards: tuple[ShardId, ...]


@dataclass(frozen=True, slots=True)
class Presence:
    """What a node has of the shards it was asked about, in their order: indices (-1: home copy).

    ``coming`` are fragments that it is pulling or about to pull. ``committed`` is the newest
    generation that it was told of.
    """

    node: str
    committed: Generation | None
    held: tuple[tuple[int, ...], ...]
    coming: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Fetch the shard if no home copy is here, then have the targets hold their fragments of it.

    The fields are those of ``Fetch`` and ``Protect``.
    """

    header: Header
    writer: RunWriter
    sources: tuple[Sources, ...]
    targets: tuple[Target, ...]
    memory_bytes: int
    timeout_s: float
