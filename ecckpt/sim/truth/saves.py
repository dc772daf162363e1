"""What ranks have saved, and what must hold of a generation when it is committed.

``Truth`` keeps one for its run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import Generation, ShardId
from ecckpt.sim.truth.violation import Violation

# Generations whose saved bytes are kept for comparison, though no host has a file of them.
_REMEMBERED = 4


class TruthSaves:
    """All saves of one run; a commit needs ``least`` fragments of every shard.

    ``contents`` are the bytes that each rank saved, ``ranks`` how many ranks saved a generation.
    """

    def __init__(self, run: str, least: int) -> None:
        self.contents: dict[ShardId, bytes] = {}
        self.ranks: dict[Generation, int] = {}
        self._run, self._least = run, least
        self._ever_sealed: dict[ShardId, set[int]] = defaultdict(set)  # fragment indices
        self._claims: dict[Generation, set[bytes]] = defaultdict(set)

    def sealed(self, shard: ShardId, index: int) -> None:
        """An agent has completed this file of a shard."""
        self._ever_sealed[shard].add(index)

    def saved(self, shard: ShardId, data: bytes, ranks: int) -> None:
        """A rank, one of ``ranks``, has copied these bytes into its slot."""
        self.contents[shard] = data
        self.ranks[shard.generation] = ranks

    def claimed(self, shard: ShardId, digest: bytes) -> None:
        """A rank has saved tensors with this digest that it declares replicated."""
        self._claims[shard.generation].add(digest)

    def shards(self, generation: Generation) -> list[ShardId]:
        """The shards of a generation, by rank; empty if it is not known."""
        return [
            ShardId(self._run, generation, rank) for rank in range(self.ranks.get(generation, 0))
        ]

    def check_commit(self, generation: Generation) -> None:
        """The ranks must agree on replicated tensors, and every shard must have its redundancy."""
        if len(self._claims[generation]) > 1:
            raise Violation("replicas", f"{generation} was committed though its ranks differ")
        for shard in self.shards(generation):
            sealed = len(self._ever_sealed[shard] - {HOME})
            if shard not in self.contents or sealed < self._least:
                text = f"{shard}: {sealed} fragments were ever sealed, {self._least} are needed"
                raise Violation("commit", text)

    def remembered(self) -> set[Generation]:
        """The newest generations, whose bytes are kept in any case."""
        return set(sorted(self.ranks)[-_REMEMBERED:])

    def forget(self, kept: Collection[Generation]) -> None:
        """Drop what is known of generations that are not in ``kept``."""
        by_shard: tuple[dict[ShardId, Any], ...] = (self.contents, self._ever_sealed)
        for shards in by_shard:
            for shard in [shard for shard in shards if shard.generation not in kept]:
                del shards[shard]
        by_generation: tuple[dict[Generation, Any], ...] = (self.ranks, self._claims)
        for generations in by_generation:
            for generation in [known for known in generations if known not in kept]:
                del generations[generation]
