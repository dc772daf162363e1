"""The effects on a simulated rank's state: copy it into a slot, verify, read and load shards.

The counterpart of client/state_effects.py, for ``SimulatedPerformer``. The state of a step is the
bytes that ``content_of`` makes.
"""

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
    GatherShard,
    MakeShard,
    MapSlot,
    PlanState,
    ProveHome,
    ReadShard,
    SlotExists,
)
from ecckpt.errors import CorruptFragment, NotHeld
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.format.ids import Generation, RunWriter
from ecckpt.policy.survival import ShardSources
from ecckpt.protocol.messages.restore import Fetch, Sources
from ecckpt.protocol.messages.save import Slot
from ecckpt.sim.hosts.agent import SimulatedAgent
from ecckpt.sim.hosts.host import SimulatedHost
from ecckpt.sim.hosts.network import answering
from ecckpt.sim.hosts.pulling import Puller
from ecckpt.sim.session import Session
from ecckpt.sim.truth.loads import LoadedPart
from ecckpt.sim.world import Steps, sleep

if TYPE_CHECKING:
    from ecckpt.agent.storage.region import Region
    from ecckpt.protocol.agent_client import AgentClient

_COPY_S = 0.5  # the most that a copy takes
_VERIFY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SimulatedClaim:
    """The digest of the tensors that a rank declares replicated."""

    digest: bytes

    def pack(self) -> bytes:
        """The bytes that other ranks give to ``differences``."""
        return self.digest

    def differences(self, packed: bytes) -> str:
        """In words, how a packed claim of another rank differs from this one."""
        return f"digest {self.digest.hex()} on this rank, {packed.hex()} on the other"


@dataclass(frozen=True, slots=True)
class SimulatedSnapshot:
    """The plan of a shard; ``step`` is the step that it saves."""

    step: int
    shard_bytes: int
    claim: SimulatedClaim | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBytes:
    """Verified parts of the shards of one generation, for the client's protocols a ``Brought``.

    ``region`` is the slot that tensors stay in, if they are assigned; ``own``: it is this rank's
    own shard.
    """

    generation: Generation
    parts: list[LoadedPart]
    region: Region | None = None
    own: bool = False
    pulled_bytes: int = 0
    rebuilt_fragments: int = 0
    reseeded: tuple[str, ...] = ()


class SimulatedState:
    """Performs the effects on the state of one rank.

    ``at_once`` are the effects that take no simulated time, ``in_steps`` all others.
    """

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
            GatherShard: lambda effect: self._read(effect.sources),
            MakeShard: self._make,
        }

    # -- saving -----------------------------------------------------------------------------------

    def plan(self, effect: PlanState) -> SimulatedSnapshot:
        """Plan the snapshot of a step.

        If tensors are declared replicated, their digest is the same on all ranks, unless it drifts.
        """
        session, claim, step = self._session, None, effect.state
        if session.rules.replicated:
            drifts = session.world.chance(session.network.faults.drift)
            text = f"{session.seed} {session.name} {step}{f' {self._rank}' if drifts else ''}"
            claim = SimulatedClaim(shake_128(text.encode()).digest(16))
        return SimulatedSnapshot(step, session.rules.shard_bytes, claim)

    def _map(self, slot: Slot) -> Region:
        """Map a slot.

        A mapped region stays writable, even when the agent has removed its file.
        """
        region = self._mapped.get(slot.region) or self._host.memory.files.get(slot.path)
        if region is None:
            raise FileNotFoundError(f"{slot.path} is gone")
        self._mapped = {slot.region: region}  # only the latest mapping is kept
        return region

    def _copy(self, effect: CopyState) -> Steps:
        session, header = self._session, effect.header
        snapshot, shard = cast(SimulatedSnapshot, effect.snapshot), header.shard
        region = self._map(effect.slot)
        view = region.view
        yield sleep(_COPY_S * session.world.rng.random())
        data = session.content(shard)
        session.truth.slot_writing(self._host, region)
        claim = snapshot.claim.digest if snapshot.claim is not None else None
        session.truth.state_saved(shard, data, ranks=session.ranks, claim=claim)
        payload = view[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + header.payload_bytes]
        payload[: len(data)] = data
        payload[len(data) :] = bytes(len(payload) - len(data))

    # -- restoring --------------------------------------------------------------------------------

    def _prove(self, effect: ProveHome) -> Steps:
        """Read the home copy from this host's agent, every block verified."""
        slot, assign = effect.slot, effect.assign
        shard = slot.header.shard

        def read_verified(agent: SimulatedAgent) -> bytes:
            home = agent.core.home(shard)
            if home.table is None:
                raise NotHeld(f"{shard} is not sealed on this node")
            for index, view in enumerate(data_views(home.header, home.region)):
                if bad_blocks(home.header, index, view, home.table):
                    raise CorruptFragment(f"home copy of {shard}: wrong checksums")
            return bytes(home.region.view[SUPERBLOCK_BYTES:][: home.header.shard_bytes])

        data = yield self._host.call(self._host.node, answering(read_verified), _VERIFY_TIMEOUT_S)
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
        """Make this rank's shard from the shards of another number of ranks.

        It is this rank's share of all saved bytes, in the order of the ranks that saved.
        """
        shards, rank, ranks = effect.shards, self._rank, self._session.ranks
        total_bytes = sum(sources.header.shard_bytes for sources in shards)
        start, end = total_bytes * rank // ranks, total_bytes * (rank + 1) // ranks
        parts, offset = [], 0
        for sources in shards:
            first, last = max(start - offset, 0), min(end - offset, sources.header.shard_bytes)
            offset += sources.header.shard_bytes
            if first < last:
                data = yield from self._read(sources)
                parts.append(LoadedPart(sources.header.shard, first, data[first:last]))
        return SimulatedBytes(generation=shards[0].header.shard.generation, parts=parts)

    def _read(self, sources: ShardSources) -> Steps:
        """Read a whole shard from any sources into this rank's memory."""
        header, session = sources.header, self._session
        peers = Peers(
            clients=cast("dict[str, AgentClient]", session.hosts),  # Peers uses the keys only
            near=self._host.node,
            spread=self._rank,
        )
        places = []
        for index in range(header.n):
            homes = sources.homes if index < header.k else ()
            if nodes := peers.order((*homes, *sources.fragments.get(index, ()))):
                places.append(Sources(index, tuple(nodes)))
        message = Fetch(
            header=header,
            writer=RunWriter(0, ""),
            sources=tuple(places),
            memory_bytes=0,
            timeout_s=0.0,
        )
        puller = Puller(self._host.node, session.world, session.network, session.hosts)
        table = yield from puller.table(message)
        views = [memoryview(bytearray(header.fragment_bytes)) for _ in range(header.n)]
        yield from puller.gather(message, views, table)
        return b"".join(views[: header.k])[: header.shard_bytes]
