"""A simulated rank's state: the bytes of one step, and where a restore brings them from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import shake_128
from typing import TYPE_CHECKING, Any, cast

from ecckpt.agent.runtime.shard_bytes import bad_blocks, data_views
from ecckpt.client.effects import Effect
from ecckpt.client.read.shard_reader import Peers
from ecckpt.client.state_effects import (
    CopyState,
    MakeShard,
    MapSlot,
    PlanState,
    ProveHome,
    ReadShard,
    SlotExists,
)
from ecckpt.errors import CorruptFragment, NotHeld
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.format.ids import Generation
from ecckpt.policy.survival import ShardSources
from ecckpt.protocol.messages.restore import Fetch, Sources
from ecckpt.protocol.messages.save import Slot
from ecckpt.sim.hosts.agent import SimulatedAgent
from ecckpt.sim.hosts.host import SimulatedHost
from ecckpt.sim.hosts.network import answering
from ecckpt.sim.hosts.pulling import Puller
from ecckpt.sim.session import Session
from ecckpt.sim.truth.ledger import LoadedPart
from ecckpt.sim.world import Steps, sleep

if TYPE_CHECKING:
    from ecckpt.agent.storage.regions import Region
    from ecckpt.protocol.agent_client import AgentClient

_COPY_S = 0.5  # at most
_TABLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SimulatedClaim:
    """What a rank says that all ranks have."""

    digest: bytes

    def pack(self) -> bytes:
        """What ``differences`` needs."""
        return self.digest

    def differences(self, packed: bytes) -> str:
        """In words."""
        return f"{packed.hex()} there, {self.digest.hex()} here"


@dataclass(frozen=True, slots=True)
class SimulatedSnapshot:
    """The plan of a shard; ``step`` is the step it captures."""

    step: int
    shard_bytes: int
    claim: SimulatedClaim | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBytes:
    """Parts of shards of one generation, proven; ``region`` is where tensors lie, if assigned."""

    generation: Generation
    parts: list[LoadedPart]
    region: Region | None = None
    own: bool = False
    pulled_bytes: int = 0
    rebuilt_fragments: int = 0
    reseeded: tuple[str, ...] = ()


class SimulatedState:
    """Performs the effects on the state of one rank."""

    def __init__(self, session: Session, rank: int, host: SimulatedHost) -> None:
        self._session, self._rank, self._host = session, rank, host
        self._mapped: dict[str, Region] = {}
        self.at_once: dict[type[Effect[Any]], Callable[[Any], Any]] = {
            PlanState: self.plan,
            MapSlot: lambda effect: self._map(effect.slot),
            SlotExists: lambda effect: effect.slot.path in host.memory.files,
        }
        self.in_steps: dict[type[Effect[Any]], Callable[[Any], Steps]] = {
            CopyState: self._copy,
            ProveHome: self._prove,
            ReadShard: self._read_whole,
            MakeShard: self._make,
        }

    # -- saving -----------------------------------------------------------------------------------

    def plan(self, effect: PlanState) -> SimulatedSnapshot:
        """The snapshot of a step."""
        session, claim, step = self._session, None, effect.state
        if session.rules.replicated:
            drifts = session.world.chance(session.network.faults.drift)
            text = f"{session.seed} {session.name} {step}{f' {self._rank}' if drifts else ''}"
            claim = SimulatedClaim(shake_128(text.encode()).digest(16))
        return SimulatedSnapshot(step, session.rules.shard_bytes, claim)

    def _map(self, slot: Slot) -> Region:
        """A mapped region stays writable, whatever becomes of its file."""
        region = self._mapped.get(slot.region) or self._host.memory.files.get(slot.path)
        if region is None:
            raise FileNotFoundError(f"{slot.path} is gone")
        self._mapped = {slot.region: region}
        return region

    def _copy(self, effect: CopyState) -> Steps:
        session, header = self._session, effect.header
        snapshot, shard = cast(SimulatedSnapshot, effect.snapshot), header.shard
        region = self._map(effect.slot)
        view = region.view
        yield sleep(_COPY_S * session.world.rng.random())
        data = session.content(shard)
        session.truth.writes(self._host, region)
        session.truth.saved(shard, data, session.ranks)
        if snapshot.claim is not None:
            session.truth.claimed(shard, snapshot.claim.digest)
        payload = view[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + header.payload_bytes]
        payload[: len(data)] = data
        payload[len(data) :] = bytes(len(payload) - len(data))

    # -- restoring --------------------------------------------------------------------------------

    def _prove(self, effect: ProveHome) -> Steps:
        """The shard's bytes at home, every block checked."""
        slot, assign = effect.slot, effect.assign
        shard = slot.header.shard

        def look(agent: SimulatedAgent) -> bytes:
            home = agent.core.home(shard)
            if home.table is None:
                raise NotHeld(f"{shard} is not sealed here")
            for index, view in enumerate(data_views(home.header, home.region)):
                if bad_blocks(home.header, index, view, home.table):
                    raise CorruptFragment(f"home copy of {shard}: bad blocks")
            return bytes(home.region.view[SUPERBLOCK_BYTES:][: home.header.shard_bytes])

        data = yield self._host.call(self._host.node, answering(look), _TABLE_TIMEOUT_S)
        return SimulatedBytes(
            generation=shard.generation,
            parts=[LoadedPart(shard, 0, data)],
            region=self._host.memory.files.get(slot.path) if assign else None,
            own=assign,
        )

    def _read_whole(self, effect: ReadShard) -> Steps:
        shard = effect.sources.header.shard
        part = LoadedPart(shard, 0, (yield from self._read(effect.sources)))
        return SimulatedBytes(generation=shard.generation, parts=[part], own=True)

    def _make(self, effect: MakeShard) -> Steps:
        """This rank's range of all that was saved, in the order of the ranks that saved."""
        shards, rank, ranks = effect.shards, self._rank, self._session.ranks
        whole = sum(each.header.shard_bytes for each in shards)
        start, end = whole * rank // ranks, whole * (rank + 1) // ranks
        parts, at = [], 0
        for sources in shards:
            first, last = max(start - at, 0), min(end - at, sources.header.shard_bytes)
            at += sources.header.shard_bytes
            if first < last:
                data = yield from self._read(sources)
                parts.append(LoadedPart(sources.header.shard, first, data[first:last]))
        return SimulatedBytes(generation=shards[0].header.shard.generation, parts=parts)

    def _read(self, sources: ShardSources) -> Steps:
        """A shard from wherever it is, straight into memory of this rank."""
        header, session = sources.header, self._session
        peers = Peers(
            clients=cast("dict[str, AgentClient]", session.hosts),  # only names are looked at
            near=self._host.node,
            spread=self._rank,
        )
        places = []
        for index in range(header.n):
            homes = sources.homes if index < header.k else ()
            if nodes := peers.order((*homes, *sources.fragments.get(index, ()))):
                places.append(Sources(index, tuple(nodes)))
        message = Fetch(
            header=header, writer=0, sources=tuple(places), memory_bytes=0, timeout_s=0.0
        )
        puller = Puller(self._host.node, session.world, session.network, session.hosts)
        table = yield from puller.table(message)
        views = [memoryview(bytearray(header.fragment_bytes)) for _ in range(header.n)]
        yield from puller.gather(message, views, table)
        return b"".join(views[: header.k])[: header.shard_bytes]
