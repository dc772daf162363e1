"""What a rank asks its agent for when it saves, as messages: the same for ``save`` and for tickets.

No requests are made here, and what changes from save to save is passed in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ecckpt.client.cluster.members import Cluster
from ecckpt.client.config import ClusterConfig
from ecckpt.errors import EcckptError
from ecckpt.format.fragment_file import HOME, Header, block_bytes_for, fragment_bytes_for
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.placement import Placement
from ecckpt.protocol.messages.repair import Guard, Member
from ecckpt.protocol.messages.save import Protect, Reserve, Target
from ecckpt.protocol.verbs import GUARD

_log = logging.getLogger(__name__)


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

    def slot(self, header: Header, given_up: Sequence[Generation]) -> Reserve:
        """A slot that such a shard fits into."""
        return Reserve(
            header=header,
            memory_bytes=self.cluster.memory_bytes,
            local_ranks=self.local_ranks,
            holders=self.cluster.placement.code.holders,
            discard=tuple(given_up),
        )

    def protection(self, shard: ShardId, given_up: Sequence[Generation]) -> Protect:
        """All fragments at their holders, and a failure if too few get there."""
        peers = self.cluster.peers
        holders = self.cluster.placement.holders[self.cluster.home.node]
        targets = tuple(
            Target(index, node, peers[node].address) for index, node in enumerate(holders)
        )
        return self._protect(shard, shard.generation.timeline, targets, self.least, given_up)

    def repair(self, shard: ShardId, timeline: int, targets: tuple[Target, ...]) -> Protect:
        """Fragments of an older generation, as far as they can be had."""
        return self._protect(shard, timeline, targets, 0, ())

    def _protect(
        self,
        shard: ShardId,
        timeline: int,
        targets: tuple[Target, ...],
        least: int,
        given_up: Sequence[Generation],
    ) -> Protect:
        return Protect(
            shard=shard,
            writer=timeline,
            targets=targets,
            min_fragments=least,
            memory_bytes=self.cluster.memory_bytes,
            timeout_s=0.5 * self.config.save_timeout_s,
            discard=tuple(given_up),
        )


def guard_of(
    run: str,
    home: str,
    placement: Placement,
    address: Mapping[str, str],
    *,
    writer: int,
    local_ranks: int,
    memory_bytes: int,
    timeout_s: float,
) -> Guard:
    """Whom a home's agent shall watch; ``address`` is each node's."""
    ring = placement.ring(home) if placement.code.holders else ()
    return Guard(
        run=run,
        writer=writer,
        members=tuple(Member(each.id, each.domain, address[each.id]) for each in ring),
        holders=placement.code.holders,
        local_ranks=local_ranks,
        memory_bytes=memory_bytes,
        timeout_s=timeout_s,
    )


_GUARD_TIMEOUT_S = 2.0


def guard(cluster: Cluster, timeline: int, *, local_ranks: int, timeout_s: float) -> None:
    """Ask the agent to watch, and to repair in the background, each shard within ``timeout_s``.

    Without much patience: it is asked again after the next save.
    """
    message = guard_of(
        cluster.run,
        cluster.home.node,
        cluster.placement,
        {node: peer.address for node, peer in cluster.peers.items()},
        writer=timeline,
        local_ranks=local_ranks,
        memory_bytes=cluster.memory_bytes,
        timeout_s=timeout_s,
    )
    try:
        replace(cluster.agent, timeout_s=_GUARD_TIMEOUT_S).call(GUARD, message)
    except (EcckptError, OSError) as error:
        _log.warning("nobody watches over the holders until the next save: %s", error)
