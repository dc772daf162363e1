"""A restore, step by step, the same on all ranks.

rank 0                                   every rank
------                                   ----------
                                <------  which timelines this node knows
ask all agents to begin the next one,    prove ahead what is likely to be
which fences older ones off; each        ordered of this node's home copies
answers with its inventory
plan -> an order for each rank  ------>  bring the shard home, prove every block
                                         check it against the state, change nothing
all fine?                       <------  outcome
go, or refuse this generation   ------>  load, or wait for the next order

Rank 0's part is in leading.py, what it goes by in ordering.py, how a shard comes home in
bringing.py. Here is what all ranks agree on, and in which order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ecckpt.client.cluster.members import Cluster
from ecckpt.client.cluster.rendezvous import Meeting
from ecckpt.client.handles import SaveHandle
from ecckpt.client.read.shard_reader import Peers
from ecckpt.client.restore.coordinator import Leader
from ecckpt.client.restore.protocol import Order, Outcome, Wanted
from ecckpt.client.restore.shard_source import Bringer, Brought
from ecckpt.client.slot_mappings import Slots
from ecckpt.errors import (
    EcckptError,
    MemoryBudgetTooSmall,
    NothingToRestore,
    NotMapped,
    StateMismatch,
    TmpfsFull,
)
from ecckpt.format.ids import Generation
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.policy.survival import ShardSources
from ecckpt.protocol.encoding import pack_message, unpack_message
from ecckpt.protocol.tracing import Tracer, moment
from ecckpt.state.load.load import check
from ecckpt.state.reshard.reshape import is_relaid

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A shard that is here and fits; ``load`` restores it, and tells what it assigned."""

    brought: Brought
    load: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    ``source`` is "home" (this node's own memory) or "peers" (other nodes, and all disks);
    ``pulled_bytes`` came from there and ``rebuilt_fragments`` were computed. ``margin`` is how many
    more nodes could have been lost. ``rejected`` maps newer generations to why they were passed
    over. ``reprotection`` is the handle of re-making the fragments that were lost, in the
    background. ``saved_by`` is how many ranks had saved; if others restore, ``reseeded`` are the
    paths of the ``RngState`` that were seeded anew. ``assigned_bytes`` of the state's tensors were
    not copied (see ``Checkpointer.restore``).
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
    assigned_bytes: int


@dataclass(frozen=True, slots=True)
class FoundGeneration:
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
    """Restores for one rank, once; ``number`` tells apart several restores of one session.

    ``assign``: without a copy where that is possible.
    """

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
        assign: bool = False,
    ) -> None:
        self._meeting = meeting
        self._tracer = tracer
        self._cluster = cluster
        # A peer that hangs may use up part of a step's time, not all of it.
        patience_s = min(10.0, timeout_s / 4)
        peers = {node: replace(peer, timeout_s=patience_s) for node, peer in cluster.peers.items()}
        self._tag = f"restore/{number}"
        self._timeout_s = timeout_s
        self._after = after
        self._bringer = Bringer(
            cluster,
            peers,
            slots,
            tracer,
            rank=meeting.rank,
            ranks=meeting.world_size,
            patience_s=patience_s,
            timeout_s=timeout_s,
            assign=assign,
        )
        self._assign = assign
        self.leader = Leader(cluster, peers, session=meeting.session)

    def run(
        self, state: dict[str, Any], wanted: Wanted, *, required: bool
    ) -> tuple[Order, Restored | None]:
        """Restore into ``state``; returns the order carried out and what was restored, if anything.

        Raises ``NothingToRestore`` if something of the run was found and none of it can be
        rebuilt, or if nothing was found and ``required`` is set.
        """
        with collector_paused(), self.leader, self._bringer:
            return self._run(state, wanted, required=required)

    def _run(
        self, state: dict[str, Any], wanted: Wanted, *, required: bool
    ) -> tuple[Order, Restored | None]:
        started_s = time.monotonic()
        for attempt in range(1000):
            began = moment()
            order = self._order(attempt, wanted, prepare=wanted)
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
            ready, outcome = self._prepare(order, state)
            with self._tracer.span("agree", shard):
                agreed = self._verdict(attempt, shard.generation, outcome, wanted)
            if agreed:
                assert ready is not None
                with self._tracer.span("load", shard):
                    assigned_bytes = ready.load()
                return order, self._restored(order, ready.brought, assigned_bytes, started_s)
        raise NothingToRestore(self._cluster.run, {"all": "1000 generations were refused"})

    def find(self, wanted: Wanted) -> tuple[Order, FoundGeneration | None]:
        """Choose, and leave the reading to somebody else: no bytes are looked at here."""
        with self.leader:
            return self._find(wanted)

    def _find(self, wanted: Wanted) -> tuple[Order, FoundGeneration | None]:
        order = self._order(0, wanted, alike=True)
        if order.header is None:
            if order.rejected or wanted.named:
                raise NothingToRestore(self._cluster.run, order.rejected)
            return order, None
        generation = order.header.shard.generation
        self._verdict(0, generation, Outcome("ok", ""), wanted)
        return order, FoundGeneration(
            generation,
            order.header.world_size,
            order.margin,
            order.rejected,
            order.shards,
            self._bringer.reading_peers(),
            0.8 * self._timeout_s,
        )

    # -- between rank 0 and all -------------------------------------------------------------------

    def _order(
        self, attempt: int, wanted: Wanted, *, prepare: Wanted | None = None, alike: bool = False
    ) -> Order:
        def lead(payloads: list[bytes]) -> Sequence[bytes]:
            known = [int(payload) for payload in payloads]
            orders = self.leader.order(wanted, known=known, alike=alike)
            if all(order is orders[0] for order in orders):  # and it may name all shards
                return [pack_message(orders[0])] * len(orders)
            return [pack_message(order) for order in orders]

        tag = f"{self._tag}/{attempt}/order"
        known = b"0" if attempt else str(self._known_timeline(prepare)).encode()
        answer = self._meeting.decide(tag, known, lead, timeout_s=self._timeout_s)
        return unpack_message(Order, answer)

    def _known_timeline(self, prepare: Wanted | None) -> int:
        """The newest that this session or this node's agent has seen: it saves rank 0 a round.

        This session's own counts even where all agents forgot it: its saves are still counted in
        the store, and a save of the same name would be taken for one of them.
        """
        return max(self._after, self._bringer.known_timeline(prepare))

    def _verdict(
        self, attempt: int, generation: Generation, outcome: Outcome, wanted: Wanted
    ) -> bool:
        def lead(payloads: list[bytes]) -> Sequence[bytes]:
            outcomes = [unpack_message(Outcome, payload) for payload in payloads]
            go = self.leader.judge(generation, outcomes, wanted)
            return [b"go" if go else b""] * len(payloads)

        tag = f"{self._tag}/{attempt}/verdict"
        answer = self._meeting.decide(tag, pack_message(outcome), lead, timeout_s=self._timeout_s)
        return answer == b"go"

    # -- every rank -------------------------------------------------------------------------------

    def _prepare(self, order: Order, state: dict[str, Any]) -> tuple[_Ready | None, Outcome]:
        rank = self._meeting.rank
        brought = None
        try:
            assert order.header is not None
            with self._tracer.span("bring", order.header.shard):
                brought = self._bringer.bring(order, state)
            with self._tracer.span("check", order.header.shard):
                load = check(state, brought.shard, assign=self._assign and brought.own)
        except StateMismatch as error:
            relaid = brought is not None and not order.shards and is_relaid(state, brought.shard)
            return None, Outcome("relaid" if relaid else "mismatch", f"rank {rank}: {error}")
        except (MemoryBudgetTooSmall, TmpfsFull, NotMapped, MemoryError) as error:
            return None, Outcome("room", f"rank {rank}: {error or 'MemoryError'}")
        except (EcckptError, OSError) as error:
            self._bringer.await_agent()
            return None, Outcome("bad", f"rank {rank}: {error}")
        return _Ready(brought, load), Outcome("ok", "")

    def _restored(
        self, order: Order, brought: Brought, assigned_bytes: int, started_s: float
    ) -> Restored:
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
            assigned_bytes=assigned_bytes,
        )
