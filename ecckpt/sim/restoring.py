"""How a trainer restores: the order of requests of ``restoring.py`` above, on every rank.

Where another number of ranks saved, a rank's state is a range of all that they saved, in the order
of their ranks: so its bytes come from several shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ecckpt.agent.runtime.shard_bytes import bad_blocks, data_views
from ecckpt.client.read.shard_reader import Peers
from ecckpt.client.restore.protocol import Order, Outcome, as_told
from ecckpt.errors import (
    AgentUnreachable,
    CorruptFragment,
    EcckptError,
    MemoryBudgetTooSmall,
    TmpfsFull,
)
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES, Header
from ecckpt.policy.survival import ShardSources
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.restore import Assign, Fetch, Sources
from ecckpt.sim.hosts.network import answering
from ecckpt.sim.hosts.pulling import Puller
from ecckpt.sim.leading import SimulatedLeader
from ecckpt.sim.saving import LOCAL_TIMEOUT_S, Saving
from ecckpt.sim.truth.ledger import LoadedPart, TruthStart
from ecckpt.sim.world import Failure, Steps, sleep

if TYPE_CHECKING:
    from ecckpt.agent.storage.regions import Region
    from ecckpt.sim.trainer import Rank

_KNOWN_TIMEOUT_S = 1.0


class SimulatedRestorer:
    """Restores one rank, once."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._host, self._session = rank, rank.host, rank.session
        self._leader = SimulatedLeader(rank)
        self._assigned: Region | None = None

    def run(self) -> Steps:
        """Restore with the others; returns the step to go on with."""
        session, rank = self._session, self._rank
        for attempt in range(20):
            known = 0 if attempt else (yield from self._known_timeline())
            order: Order = yield from session.decide(
                rank, f"{attempt}/order", known, self._leader.order
            )
            rank.timeline = order.timeline
            if order.header is None:
                self._begin_archive(order)
                return 0
            parts, outcome = None, Outcome("ok", "")
            try:
                parts = yield from self._bring(order)
            except (MemoryBudgetTooSmall, TmpfsFull) as error:
                outcome = Outcome("room", str(error))
            except EcckptError as error:
                outcome = Outcome("bad", f"rank {rank.rank}: {error}")
                yield from self._await_agent()
            generation = order.header.shard.generation
            lead = self._leader.verdict(generation)
            if (yield from session.decide(rank, f"{attempt}/verdict", outcome, lead)):
                start = TruthStart(order.timeline, session.name, session.ranks)
                session.truth.loaded(start, rank.rank, generation, parts or [])
                if self._assigned is not None:
                    session.truth.assigned(self._assigned)
                rank.parent = generation
                self._begin_archive(order)
                if order.repair:
                    self._protect_again(order, order.header)
                return generation.step + 1
        raise Failure("20 generations were refused")

    def _known_timeline(self) -> Steps:
        run = self._session.run
        look = answering(lambda agent: agent.core.ledgers.look(run).fence)
        try:
            return (yield self._host.call(self._host.node, look, _KNOWN_TIMEOUT_S))
        except EcckptError:
            return 0

    def _begin_archive(self, order: Order) -> None:
        leader = self._leader
        self._rank.archiver.begin(order.timeline, leader.on_disk, leader.roll_backs)

    def _protect_again(self, order: Order, header: Header) -> None:
        deadline_s = self._rank.world.now_s + self._session.rules.save_timeout_s
        self._rank.saver.follow(Saving(header.shard, deadline_s), order.repair, counted=False)

    def _bring(self, order: Order) -> Steps:
        """The parts of shards that this rank goes on from."""
        header = order.header
        assert header is not None
        if order.shards:
            return (yield from self._reshape(order))
        for _ in range(2):
            if not (yield from self._await_agent()):
                break
            try:
                return [LoadedPart(header.shard, 0, (yield from self._through_agent(order)))]
            except AgentUnreachable:
                continue
        data = yield from self._read(order, ShardSources(header, (), order.sources))
        return [LoadedPart(header.shard, 0, data)]

    def _through_agent(self, order: Order) -> Steps:
        header, rules = order.header, self._session.rules
        assert header is not None
        if order.local:
            try:
                return (yield from self._proven(header))
            except EcckptError:
                pass  # peers will have it
        fetch = Fetch(
            header,
            order.timeline,
            as_told(order.sources),
            rules.budget_bytes,
            0.8 * rules.restore_timeout_s,
        )
        yield self._host.ask(self._host.node, fetch, 0.9 * rules.restore_timeout_s)
        return (yield from self._proven(header))

    def _await_agent(self) -> Steps:
        """Whether this node's agent answers, now or soon."""
        patience_s, world = self._session.rules.patience_s, self._rank.world
        deadline_s = world.now_s + patience_s
        here = answering(lambda agent: agent.node)
        while world.now_s < deadline_s:
            try:
                yield self._host.call(self._host.node, here, patience_s)
            except EcckptError:
                yield sleep(0.1)
            else:
                return True
        return False

    def _proven(self, header: Header) -> Steps:
        """The shard's bytes at home, every block checked; every other rank keeps them there."""
        self._assigned = None
        if self._rank.rank % 2:
            slot = yield self._rank.own(Assign(header.shard))
            self._assigned = self._host.memory.files.get(slot.path)

        def look(agent: Any) -> bytes:
            home = agent.core.home(header.shard)
            for index, view in enumerate(data_views(home.header, home.region)):
                if bad_blocks(home.header, index, view, home.table):
                    raise CorruptFragment(f"home copy of {header.shard}: bad blocks")
            return bytes(home.region.view[SUPERBLOCK_BYTES:][: home.header.shard_bytes])

        return (yield self._host.call(self._host.node, answering(look), LOCAL_TIMEOUT_S))

    # -- on another number of ranks ---------------------------------------------------------------

    def _reshape(self, order: Order) -> Steps:
        rank, ranks = self._rank.rank, self._session.ranks
        whole = sum(each.header.shard_bytes for each in order.shards)
        start, end = whole * rank // ranks, whole * (rank + 1) // ranks
        parts, at = [], 0
        for sources in order.shards:
            first, last = max(start - at, 0), min(end - at, sources.header.shard_bytes)
            at += sources.header.shard_bytes
            if first < last:
                data = yield from self._read(order, sources)
                parts.append(LoadedPart(sources.header.shard, first, data[first:last]))
        return parts

    def _read(self, order: Order, sources: ShardSources) -> Steps:
        """A shard from wherever it is, straight into memory of this rank."""
        header, session = sources.header, self._session
        peers = Peers(
            clients=cast(dict[str, AgentClient], session.hosts),  # only names are looked at
            near=self._host.node,
            spread=self._rank.rank,
        )
        places = []
        for index in range(header.n):
            homes = sources.homes if index < header.k else ()
            if nodes := peers.order((*homes, *sources.fragments.get(index, ()))):
                places.append(Sources(index, tuple(nodes)))
        message = Fetch(header, order.timeline, tuple(places), 0, 0.0)
        puller = Puller(self._host.node, session.world, session.network, session.hosts)
        table = yield from puller.table(message)
        views = [memoryview(bytearray(header.fragment_bytes)) for _ in range(header.n)]
        yield from puller.gather(message, views, table)
        return b"".join(views[: header.k])[: header.shard_bytes]
