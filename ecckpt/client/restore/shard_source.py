"""Bringing a rank's shard home, every block of it proven: the part of a restore that moves bytes.

From this node's own memory where the order says that it is there (proving.py), else the agent
fetches it; from the other nodes straight into this process where the agent is away; and where
another number of ranks saved, or DTensors are cut in another way here, a new shard is made from all
(resharding.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from ecckpt.client.cluster.members import Cluster
from ecckpt.client.read.shard_reader import Peers, ShardReader
from ecckpt.client.restore.home_copy import ProofAhead, Prover
from ecckpt.client.restore.protocol import Order, Wanted, as_told, likely_home
from ecckpt.client.restore.reshard import reshape_from
from ecckpt.client.slot_mappings import Slots
from ecckpt.errors import AgentUnreachable, EcckptError, NotHeld, NotMapped
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import ShardId
from ecckpt.memory.mapping import address_space_is_limited
from ecckpt.policy.survival import ShardSources
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.restore import Assign, Fetch, Fetched
from ecckpt.protocol.messages.save import Slot
from ecckpt.protocol.tracing import Tracer
from ecckpt.protocol.verbs import ASSIGN, FETCH, INVENTORY, SLOT
from ecckpt.state.file.shard import Shard, read_shard

_log = logging.getLogger(__name__)

_KNOWN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Brought:
    """A shard that is here, proven, and what that cost; its tensors are views of the bytes.

    ``source``: "home" or "peers". ``reseeded``: paths of the ``RngState`` to be seeded anew.
    ``own``: the bytes are this process's, which may keep and change them.
    """

    shard: Shard
    source: str
    pulled_bytes: int = 0
    rebuilt_fragments: int = 0
    reseeded: tuple[str, ...] = ()
    own: bool = False


class Bringer:
    """Brings shards home for one rank, in one restore; use as a context manager.

    ``peers`` are the agents by node, with the patience that each may cost; ``patience_s`` is how
    long this node's own may be away. To ``assign``, shards are brought as bytes of this process's
    own, where that costs no copy.
    """

    def __init__(
        self,
        cluster: Cluster,
        peers: Mapping[str, AgentClient],
        slots: Slots,
        tracer: Tracer,
        *,
        rank: int,
        ranks: int,
        patience_s: float,
        timeout_s: float,
        assign: bool,
    ) -> None:
        self._cluster, self._peers, self._slots = cluster, peers, slots
        self._assign = assign
        self._rank, self._ranks = rank, ranks
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._prover = Prover(slots, tracer, assign=assign)
        self._ahead: ProofAhead | None = None
        self._agent_answers = False  # a moment ago

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ahead is not None:
            self._ahead.end()

    def known_timeline(self, prepare: Wanted | None) -> int:
        """The newest timeline that this node's agent has seen; 0 if it does not answer at once.

        With ``prepare``, what of that this rank will most likely be told to load is proven from now
        on, in the background.
        """
        agent = replace(self._cluster.agent, timeout_s=_KNOWN_TIMEOUT_S)
        try:
            inventory = agent.call(INVENTORY, self._cluster.run)
        except (EcckptError, OSError):
            return 0
        self._agent_answers = True
        if prepare is not None:
            likely = likely_home(inventory, prepare, rank=self._rank, ranks=self._ranks)
            if likely is not None:
                self._prove_ahead(likely.shard, agent)
        return inventory.fence

    def bring(self, order: Order, state: dict[str, Any]) -> Brought:
        """Carry out an order; ``state`` tells what to make where it names all shards.

        Changes nothing in ``state``. Raises an ``EcckptError`` or ``OSError`` where the shard
        cannot be had, proven or kept, ``StateMismatch`` where none can be made that fits.
        """
        assert order.header is not None
        if order.shards:
            return self._reshape(order, state)
        peers = self.reading_peers()
        for _ in range(2):
            if not (self._agent_answers or self.await_agent()):
                break
            self._agent_answers = False
            try:
                return self._through_agent(order)
            except AgentUnreachable as error:
                _log.warning("rank %d: %s", self._rank, error)
        return self._without_agent(order, peers)

    def await_agent(self) -> bool:
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

    def reading_peers(self) -> Peers:
        """The agents, for whoever reads from them by itself from now on."""
        return Peers(
            clients=self._peers,
            near=self._cluster.home.node,
            home=self._home_payload,
            spread=self._rank,
            deadline_s=time.monotonic() + 0.8 * self._timeout_s,
        )

    def _prove_ahead(self, shard: ShardId, agent: AgentClient) -> None:
        # Where the address space has a limit, the round's threads may need what is left: one that
        # finds no memory for its first step would be waited for without an end.
        if address_space_is_limited():
            return
        try:
            self._ahead = ProofAhead(self._prover, agent, shard)
        except RuntimeError as error:  # no thread can be started: it is proven when it is ordered
            _log.info("%s is not proven ahead: %s", shard, error)

    def _through_agent(self, order: Order) -> Brought:
        assert order.header is not None
        shard = self._from_home(order.header) if order.local else None
        if shard is not None:
            return Brought(shard, "home", own=self._assign)
        fetched, agent = self._fetch(order), self._cluster.agent
        slot = self._slot(order.header.shard) if self._assign else fetched.slot
        payload = self._prover.prove(slot, agent)
        shard = read_shard(payload[: order.header.shard_bytes])
        return Brought(
            shard, "peers", fetched.pulled_bytes, fetched.rebuilt_fragments, own=self._assign
        )

    def _without_agent(self, order: Order, peers: Peers) -> Brought:
        """Straight from the others, into memory of this process that is as large as the shard."""
        assert order.header is not None
        _log.warning("rank %d restores without its node's agent", self._rank)
        by_address = {peer.address: peer for peer in peers.clients.values()}
        sources = ShardSources(order.header, (), order.sources)
        reader = ShardReader(sources, replace(peers, clients=by_address))
        shard = read_shard(reader.whole())
        return Brought(shard, "peers", reader.pulled_bytes, reader.rebuilt_fragments, own=True)

    def _reshape(self, order: Order, state: dict[str, Any]) -> Brought:
        peers = self.reading_peers()
        made = reshape_from(order.shards, peers, state, rank=self._rank, ranks=self._ranks)
        return Brought(
            made.shard, "peers", made.pulled_bytes, made.rebuilt_fragments, made.reseeded
        )

    def _home_payload(self, header: Header) -> memoryview:
        """A home copy of this node where it lies, nothing of it proven."""
        slot = self._cluster.agent.call(SLOT, header.shard)
        return self._slots.payload(slot, header.payload_bytes, to_write=False)

    def _from_home(self, header: Header) -> Shard | None:
        """The local home copy if every block of it proves right, else None: peers will have it."""
        agent = self._cluster.agent
        try:
            # All older writers are fenced by now: what is here stays.
            slot = self._slot(header.shard)
            if self._ahead is not None and slot.header.same_shard(header):
                shard = self._ahead.take(slot, timeout_s=self._timeout_s)
                if shard is not None:
                    return shard
            payload = self._prover.prove(slot, agent)
        except NotHeld:
            return None  # on disk only: fetching brings it into memory
        except NotMapped:
            raise  # there is no more room for another copy of it
        except EcckptError as error:
            _log.warning("home copy refused, asking peers: %s", error)
            return None
        return read_shard(payload[: header.shard_bytes])

    def _slot(self, shard: ShardId) -> Slot:
        agent = self._cluster.agent
        if self._assign:
            return agent.call(ASSIGN, Assign(shard))
        return agent.call(SLOT, shard)

    def _fetch(self, order: Order) -> Fetched:
        assert order.header is not None
        agent = replace(self._cluster.agent, timeout_s=0.1 * self._timeout_s)
        return agent.call(
            FETCH,
            Fetch(
                header=order.header,
                writer=order.timeline,
                sources=as_told(order.sources),
                memory_bytes=self._cluster.memory_bytes,
                timeout_s=0.8 * self._timeout_s,
            ),
        )
