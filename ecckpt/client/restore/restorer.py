"""A restore, step by step, the same on all ranks.

rank 0 (coordinator.py)                  every rank
-----------------------                  ----------
                                <------  1 the newest timeline that this node knows
2 ask all agents to begin the next one,    prove the home copy that is likely to be ordered
  which fences older ones off; each
  answers with its inventory
3 plan: an order for each rank  ------>  4 bring the shard home, prove every block
                                           (shard_source.py), check it against the state
6 all fine?                     <------  5 outcome
7 go, or refuse this generation ------>  8 load, or wait for the next order
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ecckpt.client import deadlines
from ecckpt.client.cluster.members import Cluster
from ecckpt.client.effects import (
    Mark,
    Now,
    RankExchange,
    Report,
    Routine,
    TraceSpan,
    perform,
    traced,
)
from ecckpt.client.events import Message, TimelineBegun
from ecckpt.client.handles import SaveHandle
from ecckpt.client.restore.coordinator import Coordinator
from ecckpt.client.restore.protocol import Order, Outcome, Wanted
from ecckpt.client.restore.shard_source import Delivery, ShardSource
from ecckpt.client.state_effects import CheckState, IsRelaid, LoadState
from ecckpt.errors import (
    EcckptError,
    MemoryBudgetTooSmall,
    NothingToRestore,
    NotMapped,
    StateMismatch,
    TmpfsFull,
    TooFewFragments,
)
from ecckpt.format.ids import Generation
from ecckpt.protocol.encoding import pack_message, unpack_message

_ATTEMPTS = 1000


@dataclass(frozen=True, slots=True)
class _Ready:
    """A shard that is here and fits; ``load`` restores it, and returns the bytes it assigned."""

    delivery: Delivery
    load: Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was restored.

    Attributes:
        source: "home" (this node's own memory) or "peers" (other nodes, and all disks).
        pulled_bytes: bytes that came from there.
        rebuilt_fragments: fragments that were computed.
        margin: how many more nodes could have been lost.
        rejected: newer generations that were passed over, and why.
        reprotection: the handle of re-making lost fragments, in the background.
        saved_by: how many ranks had saved.
        reseeded: generators of ``RngState`` that were seeded anew, as ``path: part``, if another
            number restores.
        assigned_bytes: bytes of the state's tensors that were not copied.
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


class Restorer:
    """Restores for one rank, once.

    Args:
        number: tells apart several restores of one session.
        after: the newest timeline of this session, 0 if it has none.
        timeout_s: how long ranks wait for each other in each step.
        assign: hand tensors over without a copy where that is possible.
    """

    def __init__(
        self, cluster: Cluster, *, number: int, after: int, timeout_s: float, assign: bool = False
    ) -> None:
        self.coordinator = Coordinator(
            cluster,
            patience_s=deadlines.peer_patience_s(timeout_s),
            disks_s=deadlines.DISKS_SHARE * timeout_s,
        )
        self._source = ShardSource(cluster, timeout_s=timeout_s, assign=assign)
        self._cluster, self._timeout_s, self._assign = cluster, timeout_s, assign
        self._tag, self._after = f"restore/{number}", after

    def run(
        self, state: Any, wanted: Wanted, *, required: bool
    ) -> Routine[tuple[Order, Restored | None]]:
        """Restore into ``state``; the order that was carried out, and what was restored, if any.

        Raises ``NothingToRestore`` if something of the run was found and none of it can be
        rebuilt, or if nothing was found and ``required`` is set.
        """
        try:
            result = yield from self._run(state, wanted, required=required)
        except GeneratorExit:
            raise
        except BaseException:  # also KeyboardInterrupt: nothing is proven behind its back
            yield from self._source.end()
            raise
        yield from self._source.end()
        return result

    def _run(
        self, state: Any, wanted: Wanted, *, required: bool
    ) -> Routine[tuple[Order, Restored | None]]:
        started_s = yield from perform(Now())
        for attempt in range(_ATTEMPTS):
            began = yield from perform(Mark())
            order = yield from self._order(attempt, wanted, prepare=wanted)
            if order.header is None:
                return (yield from self._nothing(order, wanted, required=required)), None
            shard = order.header.shard
            yield from perform(TraceSpan("choose", shard, began))
            task = yield from self._source.begin_witness(order)
            ready, outcome = yield from self._prepare(order, state)
            witnessed = yield from self._source.end_witness(task)
            outcome = replace(outcome, witnessed=witnessed)
            verdict = self._verdict(attempt, shard.generation, outcome, wanted)
            if (yield from traced("agree", shard, verdict)):
                assert ready is not None
                load = perform(LoadState(ready.load))
                assigned_bytes = yield from traced("load", shard, load)
                now_s = yield from perform(Now())
                handle = SaveHandle(shard.generation, shard.generation.step, began_s=now_s)
                restored = self._restored(
                    order, ready.delivery, assigned_bytes, now_s - started_s, handle
                )
                yield from self._note_reseeded(restored)
                return order, restored
        raise NothingToRestore(self._cluster.run, {"all": f"{_ATTEMPTS} generations were refused"})

    def find(self, wanted: Wanted) -> Routine[Order]:
        """Choose a generation that another reads: no bytes are looked at here.

        The order names all shards; without a header there never was a generation.
        """
        order = yield from self._order(0, wanted, alike=True)
        if order.header is None:
            return (yield from self._nothing(order, wanted, required=False))
        yield from self._verdict(0, order.header.shard.generation, Outcome("ok", ""), wanted)
        return order

    def _nothing(self, order: Order, wanted: Wanted, *, required: bool) -> Routine[Order]:
        """There is nothing to restore: an error unless there never was anything."""
        if order.rejected or required or wanted.named:
            raise NothingToRestore(self._cluster.run, order.rejected, hint=wanted.hint)
        if self._cluster.rank == 0:
            text = f"run {self._cluster.run}: no agent knows a generation; it begins from scratch"
            yield from perform(Report(Message(logging.WARNING, text)))
            yield from perform(Report(TimelineBegun(order.timeline, None, False)))
        return order

    # -- between rank 0 and all -------------------------------------------------------------------

    def _order(
        self, attempt: int, wanted: Wanted, *, prepare: Wanted | None = None, alike: bool = False
    ) -> Routine[Order]:
        def decide(payloads: list[bytes]) -> Routine[Sequence[bytes]]:
            known = [int(payload) for payload in payloads]
            orders = yield from self.coordinator.order(wanted, known=known, alike=alike)
            if all(order is orders[0] for order in orders):  # and it may name all shards
                return [pack_message(orders[0])] * len(orders)
            return [pack_message(order) for order in orders]

        tag = f"{self._tag}/{attempt}/order"
        known = 0 if attempt else (yield from self._known_timeline(prepare))
        answer = yield from perform(RankExchange(tag, str(known).encode(), decide, self._timeout_s))
        return unpack_message(Order, answer)

    def _known_timeline(self, prepare: Wanted | None) -> Routine[int]:
        """The newest that this session or this node's agent has seen: it saves rank 0 a round.

        This session's own counts even where all agents forgot it: its saves are still counted in
        the store, and a save of the same name would be taken for one of them.
        """
        return max(self._after, (yield from self._source.known_timeline(prepare)))

    def _verdict(
        self, attempt: int, generation: Generation, outcome: Outcome, wanted: Wanted
    ) -> Routine[bool]:
        def decide(payloads: list[bytes]) -> Routine[Sequence[bytes]]:
            outcomes = [unpack_message(Outcome, payload) for payload in payloads]
            go = yield from self.coordinator.judge(generation, outcomes, wanted)
            return [b"go" if go else b""] * len(payloads)

        tag = f"{self._tag}/{attempt}/verdict"
        exchange = RankExchange(tag, pack_message(outcome), decide, self._timeout_s)
        return (yield from perform(exchange)) == b"go"

    # -- every rank -------------------------------------------------------------------------------

    def _prepare(self, order: Order, state: Any) -> Routine[tuple[_Ready | None, Outcome]]:
        assert order.header is not None
        shard, rank = order.header.shard, self._cluster.rank
        delivery = None
        try:
            delivery = yield from traced("bring", shard, self._source.bring(order, state))
            check = CheckState(state, delivery.brought, self._assign and delivery.brought.own)
            load = yield from traced("check", shard, perform(check))
        except StateMismatch as error:
            relaid = delivery is not None and not order.shards
            if relaid and delivery is not None:
                relaid = yield from perform(IsRelaid(state, delivery.brought))
            return None, Outcome("relaid" if relaid else "mismatch", f"rank {rank}: {error}")
        except (MemoryBudgetTooSmall, TmpfsFull, NotMapped, MemoryError) as error:
            return None, Outcome("room", f"rank {rank}: {error or 'MemoryError'}")
        except (EcckptError, OSError) as error:
            yield from self._source.await_agent()
            lacks = error.rank if isinstance(error, TooFewFragments) else -1
            lacks = lacks if order.shards else shard.rank
            return None, Outcome("bad", f"rank {rank}: {error}", lacks=lacks)
        except Exception as error:
            # From an object's own code. Raised here alone, it would leave the other ranks waiting.
            text = "".join(traceback.format_exception(error))
            yield from perform(Report(Message(logging.ERROR, f"rank {rank}: {text}")))
            return None, Outcome("mismatch", f"rank {rank}: {type(error).__name__}: {error}")
        return _Ready(delivery, load), Outcome("ok", "")

    def _restored(
        self,
        order: Order,
        delivery: Delivery,
        assigned_bytes: int,
        seconds: float,
        reprotection: SaveHandle,
    ) -> Restored:
        assert order.header is not None
        generation = order.header.shard.generation
        return Restored(
            step=generation.step,
            timeline=order.timeline,
            generation=generation,
            source=delivery.source,
            seconds=seconds,
            pulled_bytes=delivery.pulled_bytes,
            rebuilt_fragments=delivery.rebuilt_fragments,
            margin=order.margin,
            rejected=order.rejected,
            reprotection=reprotection,
            saved_by=order.header.world_size,
            reseeded=delivery.brought.reseeded,
            assigned_bytes=assigned_bytes,
        )

    def _note_reseeded(self, restored: Restored) -> Routine[None]:
        if not restored.reseeded:
            return
        text = (
            f"rank {self._cluster.rank} of {self._cluster.ranks}: {restored.saved_by} ranks had "
            f"saved; seeded anew: {', '.join(restored.reseeded)}"
        )
        yield from perform(Report(Message(logging.WARNING, text)))
