"""The messages that one rank sends its agents, made of the run's configuration and the cluster.

Pure: what changes from save to save is passed in, and nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ecckpt.client.cluster.members import Cluster
from ecckpt.client.config import ClusterConfig
from ecckpt.format.fragment_file import HOME, Header, block_bytes_for, fragment_bytes_for
from ecckpt.format.ids import Generation, RunWriter, ShardId
from ecckpt.protocol.messages.repair import Guard, Member
from ecckpt.protocol.messages.save import Protect, Reserve, Target


@dataclass(frozen=True, slots=True)
class Requests:
    """Of one rank. ``block_bytes`` maps the length of a shard to that of its blocks."""

    config: ClusterConfig
    cluster: Cluster
    block_bytes: Callable[[int], int] = block_bytes_for

    @property
    def min_fragments(self) -> int:
        """Fragments that a shard needs at its holders, in memory and on disk."""
        code = self.cluster.placement.code
        return min(code.k + (self.config.min_margin or 0), code.holders)

    def shard(self, generation: Generation) -> ShardId:
        """This rank's shard."""
        return ShardId(self.cluster.run, generation, self.cluster.rank)

    def header(
        self,
        shard: ShardId,
        shard_bytes: int,
        parent: Generation | None,
        *,
        created_unix_s: int,
    ) -> Header:
        """The header of a shard of that size, whose timeline goes on from ``parent``."""
        code = self.cluster.placement.code
        return Header(
            shard=shard,
            world_size=self.cluster.ranks,
            index=HOME,
            k=code.k,
            m=code.m,
            shard_bytes=shard_bytes,
            fragment_bytes=fragment_bytes_for(shard_bytes, code.k),
            block_bytes=self.block_bytes(shard_bytes),
            home=self.cluster.home,
            parent=parent,
            created_unix_s=created_unix_s,
        )

    def slot(self, header: Header, given_up: Sequence[Generation]) -> Reserve:
        """A slot that such a shard fits into."""
        return Reserve(
            header=header,
            memory_bytes=self.cluster.memory_bytes,
            local_ranks=self.cluster.local_ranks,
            holders=self.cluster.placement.code.holders,
            discard=tuple(given_up),
        )

    def protection(self, shard: ShardId, given_up: Sequence[Generation]) -> Protect:
        """All fragments at their holders, and a failure if fewer get there than are needed."""
        cluster = self.cluster
        holders = cluster.placement.holders[cluster.home]
        targets = tuple(
            Target(index, node, cluster.address[node]) for index, node in enumerate(holders)
        )
        message = self._protect(shard, shard.generation.writer, targets, given_up)
        least, every_living = self.min_fragments, self.config.min_margin is None
        return replace(message, min_fragments=least, every_living=every_living)

    def repair(self, shard: ShardId, timeline: int, targets: tuple[Target, ...]) -> Protect:
        """Fragments of an older generation, as far as they can be had."""
        return self._protect(shard, self.cluster.writer(timeline), targets, ())

    def guard(self, timeline: int) -> Guard:
        """Watch the holders of this node's shards, and repair each shard in the background."""
        cluster = self.cluster
        placement, home = cluster.placement, cluster.home
        ring = placement.ring(home) if placement.code.holders else ()
        return Guard(
            run=cluster.run,
            writer=self.cluster.writer(timeline),
            members=tuple(Member(each.id, each.domain, cluster.address[each.id]) for each in ring),
            holders=placement.code.holders,
            local_ranks=cluster.local_ranks,
            memory_bytes=cluster.memory_bytes,
            timeout_s=0.5 * self.config.save_timeout_s,
        )

    def _protect(
        self,
        shard: ShardId,
        writer: RunWriter,
        targets: tuple[Target, ...],
        given_up: Sequence[Generation],
    ) -> Protect:
        return Protect(
            shard=shard,
            writer=writer,
            targets=targets,
            min_fragments=0,
            every_living=False,
            memory_bytes=self.cluster.memory_bytes,
            timeout_s=0.5 * self.config.save_timeout_s,
            discard=tuple(given_up),
        )
