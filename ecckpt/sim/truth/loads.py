"""What ranks load when they restore, compared with what was saved.

``SimulatedState`` makes the parts, ``Truth`` checks them here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ecckpt.format.ids import Generation, ShardId
from ecckpt.sim.truth.violation import Violation


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """Some bytes of a shard, from byte ``start`` on, that a rank goes on from."""

    shard: ShardId
    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TruthStart:
    """One restore of a run: the timeline it begins, its session, and the number of ranks."""

    timeline: int
    session: str
    ranks: int


@dataclass(slots=True)
class _Loaded:
    """What the ranks of one restore have loaded so far."""

    generation: Generation
    saved_bytes: int
    ranks: int = 0
    loaded_bytes: int = 0


class TruthLoads:
    """All restores of a run."""

    def __init__(self) -> None:
        self._by_start: dict[TruthStart, _Loaded] = {}

    def add(
        self,
        start: TruthStart,
        rank: int,
        parts: Iterable[LoadedPart],
        *,
        generation: Generation,
        saved: Mapping[ShardId, bytes],
        shards: Sequence[ShardId],
    ) -> bool:
        """A rank goes on from these parts of ``generation``.

        Every byte must be as ``saved``, and all ranks together must load all bytes of one
        generation, however they share them. Returns whether this is the last rank of the restore.
        """
        if start not in self._by_start:
            # Bytes that are forgotten, or were never saved, differ from all that a rank can load.
            saved_bytes = sum(len(saved.get(shard, b"")) for shard in shards)
            self._by_start[start] = _Loaded(generation, saved_bytes)
        loaded = self._by_start[start]
        for part in parts:
            expected = saved.get(part.shard, b"")[part.start : part.start + len(part.data)]
            if expected != part.data:
                raise Violation("bytes", f"{part.shard} is not what was saved")
            if part.shard.generation != generation:
                raise Violation("mixed", f"rank {rank} of {start} read {part.shard}")
            loaded.loaded_bytes += len(part.data)
        if loaded.generation != generation:
            raise Violation("mixed", f"rank {rank} of {start} loaded {generation}")
        loaded.ranks += 1
        if loaded.ranks != start.ranks:
            return False
        if loaded.loaded_bytes != loaded.saved_bytes:
            text = f"{start} loaded {loaded.loaded_bytes} of {loaded.saved_bytes} bytes"
            raise Violation("bytes", text)
        return True
