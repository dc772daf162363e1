"""Where the bytes of a fragment lie on this node: memory, then disk; alone or in a home copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES
from ecckpt.format.ids import ShardId

if TYPE_CHECKING:
    from ecckpt.agent.records.run_record import RunRecord
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.region import Region

# The file, and the offset and length of the bytes in it.
Place: TypeAlias = "tuple[Region | DiskFile, int, int]"


def places_of(record: RunRecord, shard: ShardId, index: int, *, early: bool) -> list[Place]:
    """All places of a fragment, the preferred one first.

    ``early``: data of a home copy that is still being encoded count.
    """
    places: list[Place] = []
    entry = record.find(shard, index)
    if entry is not None and entry.table is not None:
        places.append((entry.region, SUPERBLOCK_BYTES, entry.header.fragment_bytes))
    home = record.find(shard, HOME)
    readable = home is not None and (home.table is not None or (early and home.early))
    if home is not None and readable and index >= 0:
        size_bytes, k = home.header.fragment_bytes, home.header.k
        if index < k:
            places.append((home.region, SUPERBLOCK_BYTES + index * size_bytes, size_bytes))
        elif home.parity is not None and index < home.header.n:
            at = SUPERBLOCK_BYTES + (index - k) * size_bytes
            places.append((home.parity, at, size_bytes))
    file = record.files.get((shard, index))
    if file is not None:
        places.append((file, SUPERBLOCK_BYTES, file.header.fragment_bytes))
    file = record.files.get((shard, HOME))
    if file is not None and 0 <= index < file.header.k:
        size_bytes = file.header.fragment_bytes
        places.append((file, SUPERBLOCK_BYTES + index * size_bytes, size_bytes))
    return places


def shard_place_of(record: RunRecord, shard: ShardId) -> Place | None:
    """Where the safetensors file lies within a home copy; None without a home copy."""
    entry = record.find(shard, HOME)
    if entry is not None and entry.table is not None:
        return entry.region, SUPERBLOCK_BYTES, entry.header.shard_bytes
    file = record.files.get((shard, HOME))
    return (file, SUPERBLOCK_BYTES, file.header.shard_bytes) if file is not None else None
