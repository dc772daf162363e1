"""What a rank asks its agent for when it saves, as messages: the same for ``save`` and for tickets.

No requests are made here, and what changes from save to save is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ecckpt import wire
from ecckpt.cluster import Cluster
from ecckpt.config import ClusterConfig
from ecckpt.fragment import HOME, Header, block_bytes_for, fragment_bytes_for
from ecckpt.generation import Generation, ShardId


@dataclass(frozen=True, slots=True)
class Asking:
    """Of one rank, with ``local_ranks`` at home on its node."""

    config: ClusterConfig
    cluster: Cluster
    rank: int
    ranks: int
    local_ranks: int

    @property
    def least(self) -> int:
        """Fragments that a shard needs at its holders, in memory and on disk."""
        code = self.cluster.placement.code
        return min(code.k + self.config.min_margin, code.holders)

    def shard(self, generation: Generation) -> ShardId:
        """This rank's."""
        return ShardId(self.config.run, generation, self.rank)

    def header(self, shard: ShardId, shard_bytes: int, parent: Generation | None) -> Header:
        """Of a shard of that size, whose timeline goes on from ``parent``."""
        code = self.cluster.placement.code
        return Header(
            shard=shard,
            world_size=self.ranks,
            index=HOME,
            k=code.k,
            m=code.m,
            shard_bytes=shard_bytes,
            fragment_bytes=fragment_bytes_for(shard_bytes, code.k),
            block_bytes=block_bytes_for(shard_bytes),
            home=self.cluster.home.node,
            parent=parent,
            created_unix_s=int(time.time()),
        )

    def slot(self, header: Header, given_up: Sequence[Generation]) -> wire.Reserve:
        """A slot that such a shard fits into."""
        return wire.Reserve(
            header=header,
            memory_bytes=self.cluster.memory_bytes,
            local_ranks=self.local_ranks,
            holders=self.cluster.placement.code.holders,
            discard=tuple(given_up),
        )

    def protection(self, shard: ShardId, given_up: Sequence[Generation]) -> wire.Protect:
        """All fragments at their holders, and a failure if too few get there."""
        peers = self.cluster.peers
        holders = self.cluster.placement.holders[self.cluster.home.node]
        targets = tuple(
            wire.Target(index, node, peers[node].address) for index, node in enumerate(holders)
        )
        return self._protect(shard, shard.generation.timeline, targets, self.least, given_up)

    def repair(
        self, shard: ShardId, timeline: int, targets: tuple[wire.Target, ...]
    ) -> wire.Protect:
        """Fragments of an older generation, as far as they can be had."""
        return self._protect(shard, timeline, targets, 0, ())

    def _protect(
        self,
        shard: ShardId,
        timeline: int,
        targets: tuple[wire.Target, ...],
        least: int,
        given_up: Sequence[Generation],
    ) -> wire.Protect:
        return wire.Protect(
            shard=shard,
            writer=timeline,
            targets=targets,
            min_fragments=least,
            memory_bytes=self.cluster.memory_bytes,
            timeout_s=0.5 * self.config.save_timeout_s,
            discard=tuple(given_up),
        )
