"""A generation that another reads: what ``Checkpointer.find`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ecckpt.client.read.shard_reader import Peers
from ecckpt.format.ids import Generation
from ecckpt.policy.survival import ShardSources


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGeneration:
    """Where the shards of a generation are.

    Every rank has all of them, in the order of the ``saved_by`` ranks that saved. ``peers`` may be
    read from for ``timeout_s`` seconds, at any time.
    """

    generation: Generation
    saved_by: int
    margin: int
    rejected: Mapping[str, str]
    shards: tuple[ShardSources, ...]
    peers: Peers
    timeout_s: float
