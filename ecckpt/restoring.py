"""A restore, step by step, the same on all ranks.

rank 0                                   every rank
------                                   ----------
                                <------  which timelines this node knows
ask all agents to begin the next one,
which fences older ones off; each
answers with its inventory
plan -> an order for each rank  ------>  bring the shard home, prove every block
                                         check it against the state, change nothing
all fine?                       <------  outcome
go, or refuse this generation   ------>  load, or wait for the next order

Rank 0's part is in leading.py, what it goes by in ordering.py. Where another number of ranks saved,
or a rank finds its DTensors cut in another way, the order names all shards instead, and every rank
makes its own from them (resharding.py). A rank whose node's agent is away reads its shard from the
others as well, into its own memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ecckpt import wire
from ecckpt.cluster import Cluster
from ecckpt.codec import Codec
from ecckpt.copying import COPY_THREADS
from ecckpt.errors import (
    AgentUnreachable,
    CorruptFragment,
    EcckptError,
    MemoryBudgetTooSmall,
    NotHeld,
    NothingToRestore,
    NotMapped,
    StateMismatch,
    TmpfsFull,
)
from ecckpt.fragment import Header
from ecckpt.generation import Generation
from ecckpt.handle import SaveHandle
from ecckpt.leading import Leader
from ecckpt.ordering import Order, Outcome, ShardSources, Wanted
from ecckpt.reading import Peers, ShardReader
from ecckpt.rendezvous import Meeting
from ecckpt.resharding import reshape_from
from ecckpt.slots import Slots
from ecckpt.state import Shard, check, is_relaid, read_shard
from ecckpt.tracing import Tracer, moment

_log = logging.getLogger(__name__)

_KNOWN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Brought:
    """A shard that is here, proven, and what that cost; ``load`` restores it, once checked."""

    shard: Shard
    source: str
    pulled_bytes: int = 0
    rebuilt_fragments: int = 0
    reseeded: tuple[str, ...] = ()
    load: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    ``source`` is "home" (this node's own memory) or "peers" (other nodes, and all disks);
    ``pulled_bytes`` came from there and ``rebuilt_fragments`` were computed. ``margin`` is how many
    more nodes could have been lost. ``rejected`` maps newer generations to why they were passed
    over. ``reprotection`` is the handle of re-making the fragments that were lost, in the
    background. ``saved_by`` is how many ranks had saved; if others restore, ``reseeded`` are the
    paths of the ``RngState`` that were seeded anew.
    """

    step: int
    timeline: int
    generation: Generation
    source: str
    seconds: float
    pulled_bytes: int
    rebuilt_fragments: int
    margin: int
    rejected: Mapping[str, str]
    reprotection: SaveHandle
    saved_by: int
    reseeded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A generation to continue from, which somebody else reads: where its shards are.

    Every rank has all of them, in the order of the ``saved_by`` ranks that saved. ``peers`` may be
    read from for ``timeout_s`` more, at any time.
    """

    generation: Generation
    saved_by: int
    margin: int
    rejected: Mapping[str, str]
    shards: tuple[ShardSources, ...]
    peers: Peers
    timeout_s: float


class Restorer:
    """Restores for one rank, once; ``number`` tells apart several restores of one session."""

    def __init__(
        self,
        meeting: Meeting,
        cluster: Cluster,
        slots: Slots,
        *,
        number: int,
        after: int,
        timeout_s: float,
        tracer: Tracer,
    ) -> None:
        self._meeting = meeting
        self._tracer = tracer
        self._cluster = cluster
        # A peer that hangs may use up part of a step's time, not all of it.
        self._patience_s = patience_s = min(10.0, timeout_s / 4)
        self._peers = {
            node: replace(peer, timeout_s=patience_s) for node, peer in cluster.peers.items()
        }
        self._slots = slots
        self._tag = f"restore/{number}"
        self._timeout_s = timeout_s
        self._after = after
        self._agent_answers = False  # a moment ago
        self.leader = Leader(cluster, self._peers, session=meeting.session)

    def run(
        self, state: dict[str, Any], wanted: Wanted, *, required: bool
    ) -> tuple[Order, Restored | None]:
        """Restore into ``state``; returns the order carried out and what was restored, if anything.

        Raises ``NothingToRestore`` if something of the run was found and none of it can be
        rebuilt, or if nothing was found and ``required`` is set.
        """
        with self.leader:
            return self._run(state, wanted, required=required)

    def _run(
        self, state: dict[str, Any], wanted: Wanted, *, required: bool
    ) -> tuple[Order, Restored | None]:
        started_s = time.monotonic()
        for attempt in range(1000):
            began = moment()
            order = self._order(attempt, wanted)
            if order.header is None:
                if order.rejected or required or wanted.named:
                    raise NothingToRestore(
                        self._cluster.run,
                        order.rejected,
                        hint=wanted.hint,
                    )
                return order, None
            shard = order.header.shard
            self._tracer.since(began, "choose", shard)
            brought, outcome = self._prepare(order, state)
            with self._tracer.span("agree", shard):
                agreed = self._verdict(attempt, shard.generation, outcome, wanted)
            if agreed:
                assert brought is not None
                assert brought.load is not None
                with self._tracer.span("load", shard):
                    brought.load()
                return order, self._restored(order, brought, started_s)
        raise NothingToRestore(self._cluster.run, {"all": "1000 generations were refused"})

    def find(self, wanted: Wanted) -> tuple[Order, Found | None]:
        """Choose, and leave the reading to somebody else: no bytes are looked at here."""
        with self.leader:
            return self._find(wanted)

    def _find(self, wanted: Wanted) -> tuple[Order, Found | None]:
        order = self._order(0, wanted, alike=True)
        if order.header is None:
            if order.rejected or wanted.named:
                raise NothingToRestore(self._cluster.run, order.rejected)
            return order, None
        generation = order.header.shard.generation
        self._verdict(0, generation, Outcome("ok", ""), wanted)
        return order, Found(
            generation,
            order.header.world_size,
            order.margin,
            order.rejected,
            order.shards,
            self._reading_peers(),
            0.8 * self._timeout_s,
        )

    # -- between rank 0 and all -------------------------------------------------------------------

    def _order(self, attempt: int, wanted: Wanted, *, alike: bool = False) -> Order:
        def lead(payloads: list[bytes]) -> Sequence[bytes]:
            known = [int(payload) for payload in payloads]
            orders = self.leader.order(wanted, known=known, alike=alike)
            return [wire.pack(order) for order in orders]

        tag = f"{self._tag}/{attempt}/order"
        known = b"0" if attempt else str(self._known_timeline()).encode()
        answer = self._meeting.decide(tag, known, lead, timeout_s=self._timeout_s)
        return wire.unpack(Order, answer)

    def _known_timeline(self) -> int:
        """The newest that this session or this node's agent has seen: it saves rank 0 a round.

        This session's own counts even where all agents forgot it: its saves are still counted in
        the store, and a save of the same name would be taken for one of them.
        """
        agent = replace(self._cluster.agent, timeout_s=_KNOWN_TIMEOUT_S)
        try:
            fence = agent.inventory(self._cluster.run).fence
        except (EcckptError, OSError):
            return self._after
        self._agent_answers = True
        return max(self._after, fence)

    def _verdict(
        self, attempt: int, generation: Generation, outcome: Outcome, wanted: Wanted
    ) -> bool:
        def lead(payloads: list[bytes]) -> Sequence[bytes]:
            outcomes = [wire.unpack(Outcome, payload) for payload in payloads]
            go = self.leader.judge(generation, outcomes, wanted)
            return [b"go" if go else b""] * len(payloads)

        tag = f"{self._tag}/{attempt}/verdict"
        answer = self._meeting.decide(tag, wire.pack(outcome), lead, timeout_s=self._timeout_s)
        return answer == b"go"

    # -- every rank -------------------------------------------------------------------------------

    def _prepare(self, order: Order, state: dict[str, Any]) -> tuple[_Brought | None, Outcome]:
        rank = self._meeting.rank
        brought = None
        try:
            assert order.header is not None
            with self._tracer.span("bring", order.header.shard):
                brought = self._bring_shard(order, state)
            with self._tracer.span("check", order.header.shard):
                brought = replace(brought, load=check(state, brought.shard))
        except StateMismatch as error:
            relaid = brought is not None and not order.shards and is_relaid(state, brought.shard)
            return None, Outcome("relaid" if relaid else "mismatch", f"rank {rank}: {error}")
        except (MemoryBudgetTooSmall, TmpfsFull, NotMapped, MemoryError) as error:
            return None, Outcome("room", f"rank {rank}: {error or 'MemoryError'}")
        except (EcckptError, OSError) as error:
            self._await_agent()
            return None, Outcome("bad", f"rank {rank}: {error}")
        return brought, Outcome("ok", "")

    def _await_agent(self) -> bool:
        """Whether this node's agent answers, now or soon: it may be on its way back."""
        deadline_s = time.monotonic() + self._patience_s
        agent = replace(self._cluster.agent, timeout_s=self._patience_s)
        while time.monotonic() < deadline_s:
            try:
                agent.node()
            except (EcckptError, OSError):
                time.sleep(0.1)
            else:
                return True
        return False

    def _bring_shard(self, order: Order, state: dict[str, Any]) -> _Brought:
        assert order.header is not None
        if order.shards:
            return self._reshape(order, state)
        peers = self._reading_peers()
        for _ in range(2):
            if not (self._agent_answers or self._await_agent()):
                break
            self._agent_answers = False
            try:
                return self._through_agent(order)
            except AgentUnreachable as error:
                _log.warning("rank %d: %s", self._meeting.rank, error)
        return self._without_agent(order, peers)

    def _through_agent(self, order: Order) -> _Brought:
        assert order.header is not None
        shard_bytes = order.header.shard_bytes
        payload = self._from_home(order) if order.local else None
        if payload is not None:
            return _Brought(read_shard(payload[:shard_bytes]), "home")
        fetched = self._fetch(order)
        shard = read_shard(self._proven(fetched.slot)[:shard_bytes])
        return _Brought(shard, "peers", fetched.pulled_bytes, fetched.rebuilt_fragments)

    def _without_agent(self, order: Order, peers: Peers) -> _Brought:
        """Straight from the others, into memory of this process that is as large as the shard."""
        assert order.header is not None
        _log.warning("rank %d restores without its node's agent", self._meeting.rank)
        by_address = {peer.address: peer for peer in peers.clients.values()}
        fragments = {each.index: each.addresses for each in order.sources}
        sources = ShardSources(order.header, (), fragments)
        reader = ShardReader(sources, replace(peers, clients=by_address))
        shard = read_shard(reader.whole())
        return _Brought(shard, "peers", reader.pulled_bytes, reader.rebuilt_fragments)

    def _reshape(self, order: Order, state: dict[str, Any]) -> _Brought:
        rank, ranks = self._meeting.rank, self._meeting.world_size
        made = reshape_from(order.shards, self._reading_peers(), state, rank=rank, ranks=ranks)
        return _Brought(
            made.shard, "peers", made.pulled_bytes, made.rebuilt_fragments, made.reseeded
        )

    def _reading_peers(self) -> Peers:
        return Peers(
            clients=self._peers,
            near=self._cluster.home.node,
            home=self._home_payload,
            spread=self._meeting.rank,
            deadline_s=time.monotonic() + 0.8 * self._timeout_s,
        )

    def _home_payload(self, header: Header) -> memoryview:
        """A home copy of this node where it lies, nothing of it proven."""
        slot = self._cluster.agent.slot(header.shard)
        return self._slots.payload(slot, header.payload_bytes, to_write=False)

    def _from_home(self, order: Order) -> memoryview | None:
        """The local home copy if every block of it proves right, else None: peers will have it."""
        assert order.header is not None
        try:
            return self._proven(self._cluster.agent.slot(order.header.shard))
        except NotHeld:
            return None  # on disk only: fetching brings it into memory
        except NotMapped:
            raise  # there is no more room for another copy of it
        except EcckptError as error:
            _log.warning("home copy refused, asking peers: %s", error)
            return None

    def _fetch(self, order: Order) -> wire.Fetched:
        assert order.header is not None
        agent = replace(self._cluster.agent, timeout_s=0.1 * self._timeout_s)
        return agent.fetch(
            wire.Fetch(
                header=order.header,
                writer=order.timeline,
                sources=order.sources,
                memory_bytes=self._cluster.memory_bytes,
                timeout_s=0.8 * self._timeout_s,
            )
        )

    def _proven(self, slot: wire.Slot) -> memoryview:
        """The payload of a slot, every block checked here, where it is about to be used."""
        with self._tracer.span("prove", slot.header.shard):
            return self._proven_payload(slot)

    def _proven_payload(self, slot: wire.Slot) -> memoryview:
        header = slot.header
        payload = self._slots.payload(slot, header.payload_bytes, to_write=False)
        size_bytes = header.fragment_bytes
        views = {
            index: payload[index * size_bytes : (index + 1) * size_bytes]
            for index in range(header.k)
        }
        table = self._cluster.agent.table(header)
        bad = Codec(header.k, header.m).verify(
            views, table, header.block_bytes, threads=COPY_THREADS
        )
        if bad:
            raise CorruptFragment(
                f"home copy of {header.shard}: {len(bad)} of {header.k * header.rows} blocks "
                f"fail their CRC32C, the first in fragment {bad[0][0]}, block {bad[0][1]}"
            )
        return payload

    def _restored(self, order: Order, brought: _Brought, started_s: float) -> Restored:
        assert order.header is not None
        generation = order.header.shard.generation
        if brought.reseeded:
            _log.warning(
                "rank %d of %d: %d ranks had saved; seeded anew: %s",
                self._meeting.rank,
                self._meeting.world_size,
                order.header.world_size,
                ", ".join(brought.reseeded),
            )
        return Restored(
            step=generation.step,
            timeline=order.timeline,
            generation=generation,
            source=brought.source,
            seconds=time.monotonic() - started_s,
            pulled_bytes=brought.pulled_bytes,
            rebuilt_fragments=brought.rebuilt_fragments,
            margin=order.margin,
            rejected=order.rejected,
            reprotection=SaveHandle(generation, generation.step),
            saved_by=order.header.world_size,
            reseeded=brought.reseeded,
        )
