"""A restore onto another number of ranks, another mesh or placement, out of the peers' memory.

Every rank reads for itself, from all saved shards what it needs of them: the headers, which say
what lies where; the values; and the boxes that make up its parts of the global tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ecckpt.client.read.shard_reader import Peers, ShardReader
from ecckpt.policy.survival import ShardSources
from ecckpt.protocol.fan_out import PARALLEL_HEADERS, call_each
from ecckpt.state.file.shard import Shard
from ecckpt.state.reshard.reshape import Place, reshape
from ecckpt.state.reshard.saved_shard import SavedShard


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A shard made for this rank, which keeps what it refers to alive, and what it cost."""

    shard: Shard
    reseeded: tuple[str, ...]
    pulled_bytes: int
    rebuilt_fragments: int


def reshape_from(
    sources: Sequence[ShardSources], peers: Peers, state: dict[Any, Any], *, rank: int, ranks: int
) -> Reshaped:
    """Make the shard that ``state`` needs on this rank from the saved shards, in their order.

    Changes nothing in ``state``. Raises ``StateMismatch`` for what cannot be handed over, and what
    ``ShardReader`` and ``SavedShard`` raise for bytes that cannot be had or proven.
    """
    opened = call_each(sources, lambda each: _open(each, peers), parallel=PARALLEL_HEADERS)
    readers = [reader for reader, _ in opened]
    place = Place(rank=rank, world_size=ranks, saved_by=len(sources))
    shard, reseeded = reshape(state, place, [saved for _, saved in opened])
    return Reshaped(
        shard,
        reseeded,
        sum(reader.pulled_bytes for reader in readers),
        sum(reader.rebuilt_fragments for reader in readers),
    )


def _open(sources: ShardSources, peers: Peers) -> tuple[ShardReader, SavedShard]:
    reader = ShardReader(sources, peers)
    return reader, SavedShard(reader)
