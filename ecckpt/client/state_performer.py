"""Effects on the rank's state and its shards, performed in the training process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from ecckpt.client.cluster.connections import Connections
from ecckpt.client.effects import Effect
from ecckpt.client.read.home_copy import ShardInMemory, prove_home
from ecckpt.client.read.reshard import reshape_from
from ecckpt.client.read.shard_reader import Peers, ShardReader
from ecckpt.client.slot_mappings import Slots
from ecckpt.client.state_effects import (
    CheckState,
    CopyState,
    GatherShard,
    IsRelaid,
    LoadState,
    MakeShard,
    MapSlot,
    PlanState,
    ProveHome,
    ReadShard,
    Snapshot,
)
from ecckpt.format.fragment_file import Header
from ecckpt.memory.buffers import COPY_THREADS
from ecckpt.protocol.verbs import SLOT
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import check
from ecckpt.state.reshard.reshape import is_relaid
from ecckpt.state.snapshot.plan import ShardPlan, plan_shard
from ecckpt.state.snapshot.replicas import Replicas


class StatePerformer:
    """Performs them for one rank; ``slots`` are the mappings of its node's slots."""

    def __init__(
        self,
        connections: Connections,
        slots: Slots,
        *,
        rank: int = 0,
        ranks: int = 1,
        replicas: Replicas | None = None,
        home: str = "",
    ) -> None:
        self._connections, self._slots = connections, slots
        self._rank, self._ranks, self._replicas = rank, ranks, replicas
        self._home = home
        self.table: dict[type[Effect[Any]], Callable[[Any], Any]] = {
            PlanState: self._plan,
            CopyState: self._copy,
            MapSlot: lambda effect: slots.ahead(effect.slot, effect.payload_bytes),
            ProveHome: self._prove_home,
            ReadShard: self._read,
            GatherShard: self._gather,
            MakeShard: self._make,
            CheckState: self._check,
            IsRelaid: lambda effect: is_relaid(effect.state, _in_memory(effect.brought).shard),
            LoadState: lambda effect: effect.load(),
        }

    def peers(self, *, patience_s: float, timeout_s: float) -> Peers:
        """The agents, to be read from for ``timeout_s`` from now on."""
        clients = self._connections.peers.items()
        return Peers(
            clients={node: replace(peer, timeout_s=patience_s) for node, peer in clients},
            near=self._home,
            home=self._home_payload,
            spread=self._rank,
            deadline_s=time.monotonic() + timeout_s,
        )

    def _plan(self, effect: PlanState) -> Snapshot:
        previous = cast("ShardPlan | None", effect.previous)
        return plan_shard(effect.state, previous=previous, replicas=self._replicas)

    def _copy(self, effect: CopyState) -> None:
        plan, header = cast(ShardPlan, effect.snapshot), effect.header
        payload = self._slots.payload(effect.slot, header.payload_bytes)
        plan.write(payload[: plan.shard_bytes], threads=COPY_THREADS)
        payload[plan.shard_bytes :] = bytes(header.payload_bytes - plan.shard_bytes)

    def _prove_home(self, effect: ProveHome) -> ShardInMemory:
        agent = replace(self._connections.agent, timeout_s=effect.patience_s)
        return prove_home(
            effect.slot, agent, self._slots, assign=effect.assign, wanted=effect.wanted
        )

    def _read(self, effect: ReadShard) -> ShardInMemory:
        peers = self.peers(patience_s=effect.patience_s, timeout_s=effect.timeout_s)
        by_address = {peer.address: peer for peer in peers.clients.values()}
        reader = ShardReader(effect.sources, replace(peers, clients=by_address))
        shard = read_shard(reader.whole())
        return ShardInMemory(
            shard=shard,
            pulled_bytes=reader.pulled_bytes,
            rebuilt_fragments=reader.rebuilt_fragments,
            own=True,
        )

    def _gather(self, effect: GatherShard) -> None:
        peers = self.peers(patience_s=effect.patience_s, timeout_s=effect.timeout_s)
        ShardReader(effect.sources, peers).prove()

    def _make(self, effect: MakeShard) -> ShardInMemory:
        peers = self.peers(patience_s=effect.patience_s, timeout_s=effect.timeout_s)
        shards, state = effect.shards, effect.state
        made = reshape_from(shards, peers, state, rank=self._rank, ranks=self._ranks)
        return ShardInMemory(
            shard=made.shard,
            pulled_bytes=made.pulled_bytes,
            rebuilt_fragments=made.rebuilt_fragments,
            reseeded=made.reseeded,
        )

    def _check(self, effect: CheckState) -> Callable[[], int]:
        return check(effect.state, _in_memory(effect.brought).shard, assign=effect.assign)

    def _home_payload(self, header: Header) -> memoryview:
        """A home copy of this node where it lies, nothing of it proven."""
        slot = self._connections.agent.call(SLOT, header.shard)
        return self._slots.payload(slot, header.payload_bytes, to_write=False)


def _in_memory(brought: object) -> ShardInMemory:
    return cast(ShardInMemory, brought)
