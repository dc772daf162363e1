"""Where a rank's shard comes from in a restore, every block of it proven.

    order --> on this node? --yes--> its home copy, proven where it lies --bad block--+
                  |                                                                    v
                  no -----------------------------------> this node's agent fetches it from peers
                                                             | the agent is away
                                                             v
                                                          straight from the peers into this process

Where another number of ranks saved, or DTensors are cut in another way here, this rank makes a new
shard out of all saved ones. The home copy that rank 0 will most likely order is proven while rank 0
still chooses (docs/decisions/0110-prove-while-choosing.md).
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass
from typing import Any

from ecckpt.client import deadlines
from ecckpt.client.cluster.members import Cluster
from ecckpt.client.effects import (
    Join,
    Now,
    PingAgent,
    Report,
    Routine,
    Start,
    Task,
    call_own,
    perform,
    sleep,
    traced,
)
from ecckpt.client.events import Message
from ecckpt.client.restore.protocol import Order, Wanted, as_told, likely_home
from ecckpt.client.state_effects import Brought, GatherShard, MakeShard, ProveHome, ReadShard
from ecckpt.errors import AgentUnreachable, EcckptError, NotHeld, NotMapped
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import ShardId
from ecckpt.policy.survival import ShardSources
from ecckpt.protocol.messages.restore import Assign, Fetch, Fetched
from ecckpt.protocol.messages.save import Slot
from ecckpt.protocol.verbs import ASSIGN, FETCH, INVENTORY, SLOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A shard that is here; ``source`` is "home" (this node's own memory) or "peers"."""

    brought: Brought
    source: str
    pulled_bytes: int = 0
    rebuilt_fragments: int = 0


def _from_peers(brought: Brought) -> Delivery:
    return Delivery(
        brought=brought,
        source="peers",
        pulled_bytes=brought.pulled_bytes,
        rebuilt_fragments=brought.rebuilt_fragments,
    )


class ShardSource:
    """Brings shards home for one rank, in one restore; ``end`` is to be called in any case.

    ``assign``: bring them as bytes of this process's own, where that costs no copy.
    """

    def __init__(self, cluster: Cluster, *, timeout_s: float, assign: bool) -> None:
        self._cluster, self._assign = cluster, assign
        self._timeout_s = timeout_s
        self._patience_s = deadlines.peer_patience_s(timeout_s)
        self._ahead: tuple[ShardId, Task[tuple[Slot, Brought]]] | None = None
        self._ahead_wanted = True
        self._agent_answers = False  # a moment ago

    def end(self) -> Routine[None]:
        """Wait for the proof that was started ahead, if one was: it ends at its next piece."""
        self._ahead_wanted = False
        if self._ahead is not None:
            # A rank that is told to load this copy meets its error again.
            with contextlib.suppress(Exception):
                yield from perform(Join(self._ahead[1], math.inf))

    def known_timeline(self, prepare: Wanted | None) -> Routine[int]:
        """The newest timeline that this node's agent has seen; 0 if it does not answer at once.

        With ``prepare``, the home copy that this rank will most likely be told to load is proven
        from now on, in the background.
        """
        run, patience_s = self._cluster.run, deadlines.KNOWN_TIMELINE_S
        try:
            inventory = yield from call_own(INVENTORY, run, patience_s)
        except (EcckptError, OSError):
            return 0
        self._agent_answers = True
        if prepare is not None:
            rank, ranks = self._cluster.rank, self._cluster.ranks
            likely = likely_home(inventory, prepare, rank=rank, ranks=ranks)
            if likely is not None:
                yield from self._prove_ahead(likely.shard)
        return inventory.fence

    def bring(self, order: Order, state: Any) -> Routine[Delivery]:
        """Carry out an order; nothing in ``state`` changes.

        Raises an ``EcckptError`` or ``OSError`` where the shard cannot be had, proven or kept,
        ``StateMismatch`` where none can be made that fits.
        """
        assert order.header is not None
        began_s = yield from perform(Now())
        if order.shards:
            timeout_s = deadlines.BRING_SHARE * self._timeout_s
            make = MakeShard(order.shards, state, self._patience_s, timeout_s)
            return _from_peers((yield from perform(make)))
        for _ in range(2):
            if not (self._agent_answers or (yield from self.await_agent())):
                break
            self._agent_answers = False
            try:
                return (yield from self._through_agent(order, order.header))
            except AgentUnreachable as error:
                yield from self._warn(f"{error}")
        yield from self._warn("restores without its node's agent")
        # Straight from the others, into memory of this process that is as large as the shard.
        sources = ShardSources(order.header, (), order.sources)
        left_s = began_s + deadlines.BRING_SHARE * self._timeout_s - (yield from perform(Now()))
        return _from_peers((yield from perform(ReadShard(sources, self._patience_s, left_s))))

    def await_agent(self) -> Routine[bool]:
        """Whether this node's agent answers, now or soon: it may be on its way back."""
        deadline_s = (yield from perform(Now())) + self._patience_s
        while (yield from perform(Now())) < deadline_s:
            try:
                yield from perform(PingAgent(self._patience_s))
            except (EcckptError, OSError):
                yield from sleep(deadlines.AGENT_LOOK_S)
            else:
                return True
        return False

    def _through_agent(self, order: Order, header: Header) -> Routine[Delivery]:
        if order.local:
            brought = yield from self._from_home(header)
            if brought is not None:
                return Delivery(brought=brought, source="home")
        fetched = yield from self._fetch(order, header)
        slot = (yield from self._slot(header.shard)) if self._assign else fetched.slot
        return Delivery(
            brought=(yield from self._prove(slot)),
            source="peers",
            pulled_bytes=fetched.pulled_bytes,
            rebuilt_fragments=fetched.rebuilt_fragments,
        )

    def _from_home(self, header: Header) -> Routine[Brought | None]:
        """The local home copy if every block of it proves right, else None: peers will have it."""
        try:
            # All older writers are fenced by now: what the agent says stays true.
            slot = yield from self._slot(header.shard)
            if slot.header.same_shard(header):
                brought = yield from self._take_ahead(slot)
                if brought is not None:
                    return brought
            return (yield from self._prove(slot))
        except NotHeld:
            return None  # it is on disk only: fetching brings it into memory
        except NotMapped:
            raise  # there is no more room for another copy of it
        except EcckptError as error:
            yield from self._warn(f"home copy refused, asking peers: {error}")
            return None

    def _slot(self, shard: ShardId) -> Routine[Slot]:
        """The slot of a sealed home copy; to assign, the agent is told that it is kept for good."""
        if self._assign:
            return (yield from call_own(ASSIGN, Assign(shard), deadlines.CALL_S))
        return (yield from call_own(SLOT, shard, deadlines.CALL_S))

    def _fetch(self, order: Order, header: Header) -> Routine[Fetched]:
        message = Fetch(
            header=header,
            writer=self._cluster.writer(order.timeline),
            sources=as_told(order.sources),
            memory_bytes=self._cluster.memory_bytes,
            timeout_s=deadlines.BRING_SHARE * self._timeout_s,
        )
        return (yield from call_own(FETCH, message, 0.1 * self._timeout_s))

    def _prove(self, slot: Slot) -> Routine[Brought]:
        proof = ProveHome(slot, self._assign, _always, deadlines.CALL_S)
        return (yield from traced("prove", slot.header.shard, perform(proof)))

    # -- for another rank -------------------------------------------------------------------------

    def begin_witness(self, order: Order) -> Routine[Task[int] | None]:
        """Begin to gather the shard that this rank is to gather as a witness, if it is one."""
        sources = order.witnesses.get(self._cluster.rank)
        if sources is None:
            return None
        try:
            return (yield from perform(Start(self._witness(sources))))
        except OSError as error:
            yield from self._note(f"gathers nothing for other ranks: {error}")
            return None

    def end_witness(self, task: Task[int] | None) -> Routine[int]:
        """The saved shard, by its rank, that was gathered as a witness; -1 if none was."""
        return -1 if task is None else (yield from perform(Join(task, math.inf)))

    def _witness(self, sources: ShardSources) -> Routine[int]:
        timeout_s = deadlines.BRING_SHARE * self._timeout_s
        try:
            yield from perform(GatherShard(sources, self._patience_s, timeout_s))
        except (EcckptError, OSError) as error:
            yield from self._warn(f"cannot gather a shard for another rank either: {error}")
            return -1
        return sources.header.shard.rank

    # -- ahead ------------------------------------------------------------------------------------

    def _prove_ahead(self, shard: ShardId) -> Routine[None]:
        try:
            task = yield from perform(Start(self._proof_of(shard)))
        except OSError as error:  # it is proven when it is ordered
            yield from self._note(f"{shard} is not proven ahead: {error}")
        else:
            self._ahead = shard, task

    def _proof_of(self, shard: ShardId) -> Routine[tuple[Slot, Brought]]:
        """Failures here are no errors: they are met again when the shard is ordered."""
        patience_s = deadlines.KNOWN_TIMELINE_S
        slot = yield from call_own(SLOT, shard, patience_s)
        proof = ProveHome(slot, self._assign, lambda: self._ahead_wanted, patience_s)
        return slot, (yield from traced("prove", shard, perform(proof)))

    def _take_ahead(self, slot: Slot) -> Routine[Brought | None]:
        """The shard in this slot, if it is what was proven ahead: the same one, in the same place.

        The slot was asked for after all older writers were fenced off. An agent that still answers
        with the same ``use`` has not given the region up since the proof began.
        """
        if self._ahead is None:
            return None
        shard, task = self._ahead
        if slot.header.shard != shard:
            self._ahead_wanted = False
            return None
        try:
            proven, brought = yield from perform(Join(task, self._timeout_s))
        except Exception as error:
            self._ahead_wanted = False
            yield from self._note(f"{shard} is not proven ahead: {error}")
            return None
        return brought if proven == slot else None

    # -- words ------------------------------------------------------------------------------------

    def _warn(self, text: str) -> Routine[None]:
        text = f"rank {self._cluster.rank}: {text}"
        yield from perform(Report(Message(logging.WARNING, text)))

    def _note(self, text: str) -> Routine[None]:
        yield from perform(Report(Message(logging.INFO, text)))


def _always() -> bool:
    return True
