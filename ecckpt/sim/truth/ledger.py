"""What is really there, and what was promised. Raises ``Violation`` where the two differ.

It sees every file that agents complete and give up, every fault, every commit and every restore,
and believes nothing that the agents say of themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from ecckpt.agent.core.actions import Allocate, Discard, Event, Recycle
from ecckpt.agent.core.run_record import Entry, RunNotes
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.client.restore.protocol import Wanted
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.disk import Retain, Store
from ecckpt.protocol.messages.save import Commit
from ecckpt.sim.run_config import Rules
from ecckpt.sim.truth.counts import Counts
from ecckpt.sim.truth.disk import TruthDisk, name_of
from ecckpt.sim.truth.pieces import TruthPiece, TruthPieces, promised_losses, restorable, whole
from ecckpt.sim.truth.rollbacks import Choices
from ecckpt.sim.truth.violation import Violation

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.regions import Region
    from ecckpt.sim.hosts.host import SimulatedHost

_REMEMBERED = 4  # generations of whose bytes a copy is kept, beyond the safe one


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """Some bytes of a shard, from ``start`` on, that a rank goes on from."""

    shard: ShardId
    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TruthStart:
    """One start of a run: so many ranks, of one session, on one timeline."""

    timeline: int
    session: str
    ranks: int


@dataclass(slots=True)
class Loaded:
    """What the ranks of a start have loaded so far."""

    generation: Generation
    saved_bytes: int
    ranks: int = 0
    bytes: int = 0


class Truth:
    """Of one run; ``strict``: nothing but disks can fail, so no save may."""

    def __init__(self, run: str, rules: Rules, *, strict: bool) -> None:
        self.run = run
        self.safe: Generation | None = None
        self.counts = Counts()
        self._least, self._strict = rules.least, strict
        self._ranks: dict[Generation, int] = {}
        self._saved: dict[ShardId, bytes] = {}
        self._pieces = TruthPieces()
        self._stored = TruthDisk(run, rules)
        self._choices = Choices()
        self._sealed: dict[ShardId, set[int]] = defaultdict(set)
        self._owed: dict[ShardId, list[TruthPiece]] = {}
        self._committed: set[Generation] = set()
        self._timeline = 0
        self._begun_at: Generation | None = None
        self._decided: Generation | None = None  # to go on from, which agents may know before us
        self._loaded: dict[TruthStart, Loaded] = {}
        self._assigned: set[Region] = set()
        self._claims: dict[Generation, set[bytes]] = defaultdict(set)

    # -- what agents do ---------------------------------------------------------------------------

    def sealed(self, host: SimulatedHost, entry: Entry) -> None:
        """A file is complete."""
        if entry.header.shard.run != self.run:
            return
        self._pieces.add(TruthPiece(host.node, entry.region.name, entry.header))
        self._sealed[entry.header.shard].add(entry.header.index)

    def going(self, host: SimulatedHost, action: Recycle | Discard) -> None:
        """A region is about to be given up: the safe generation must not need it."""
        if isinstance(action, Recycle) and action.region in self._assigned:
            text = f"{host.node} recycles {action.region.name}, where tensors of a rank lie"
            raise Violation("bytes", text)
        piece = self._pieces.find(host.node, action.region.name)
        if piece is None:
            return
        shard = piece.header.shard
        before = restorable(self._pieces.of(shard))
        self._pieces.pop(host.node, action.region.name)
        if not before or shard.generation != self.safe or self._told_to() is not None:
            return
        if not restorable(self._pieces.of(shard)):
            raise Violation(
                "retention", f"{host.node} gave up the last of {shard}, which nothing replaces"
            )

    def adopted(self, host: SimulatedHost, ledgers: RunRecords) -> None:
        """What an agent could not read again is gone, as far as it is concerned."""
        known = {entry.region.name for entry in ledgers.look(self.run).entries.values()}
        for piece in [each for each in self._pieces.on(host.node) if each.name not in known]:
            self._pieces.pop(host.node, piece.name)
            if not piece.rotten:
                raise Violation("adoption", f"{host.node} did not take over {piece.header.shard}")

    def decided(self, host: SimulatedHost, event: Event) -> None:
        """An agent has handled an event: no commit of a writer that is fenced off."""
        if isinstance(event, Retain) and event.run == self.run:
            if event.writer >= self._timeline:
                shards = self._shards(event.generations[-1])
                self.counts.stored += self._stored.retained(event, shards)
            return
        if not isinstance(event, Commit) or event.run != self.run:
            return
        assert host.agent is not None
        fence = host.agent.core.ledgers.look(self.run).fence
        if event.generation.timeline < fence:
            raise Violation("fencing", f"{host.node}, fenced at {fence}, took {event.generation}")
        if event.generation.timeline >= self._timeline:
            self._commit(event.generation)

    def remembered(self, host: SimulatedHost, run: str, notes: RunNotes) -> None:
        """An agent has written down what it knows of a run."""
        if run == self.run:
            self._choices.noted(host.node, notes.roll_backs)

    def allocated(self, host: SimulatedHost, action: Allocate) -> None:
        """A region was given to a task: what the run occupies is within its budget."""
        used_bytes = host.memory.used_bytes(action.run)
        budget_bytes = host.cluster.budget_bytes
        if used_bytes > budget_bytes:
            raise Violation("budget", f"{host.node}: {used_bytes} of {budget_bytes} bytes")

    def written(self, host: SimulatedHost, file: DiskFile, message: Store) -> None:
        """A file is said to be on disk."""
        self._stored.written(host, file, message)

    def looked(self, host: SimulatedHost, ledgers: RunRecords) -> None:
        """An agent has entered what is on its disk."""
        self._stored.looked(host, ledgers)

    def blinded(self, host: SimulatedHost) -> None:
        """An agent does not know what is on its disk."""
        self._stored.blinded(host)

    def removing(self, host: SimulatedHost, files: Iterable[DiskFile]) -> None:
        """Files on disk are about to go."""
        self._stored.removing(host, files, self._choices.left)

    def removed(self, host: SimulatedHost, files: Iterable[DiskFile]) -> None:
        """They are gone."""
        self._stored.removed(host, files)

    def recorded(self, host: SimulatedHost, run: str, notes: RunNotes) -> None:
        """An agent has written down on disk what it knows of a run."""
        if run == self.run:
            self._choices.recorded(host.node, notes.roll_backs)

    # -- what faults do ---------------------------------------------------------------------------

    def lost(self, host: SimulatedHost, *, disk: bool) -> None:
        """A host's memory is gone, and with ``disk`` its disk."""
        self._choices.forgotten(host.node, disk=disk)
        if disk:
            self._stored.lost(host)
        for piece in self._pieces.on(host.node):
            self._pieces.pop(host.node, piece.name)

    def rot(self, rng: Random, hosts: Mapping[str, SimulatedHost]) -> None:
        """Flip a bit of some complete file."""

        def view(piece: TruthPiece) -> memoryview:
            region = hosts[piece.node].memory.named(piece.name)
            assert region is not None
            return region.view

        self._pieces.rot(rng, view)

    def rot_disk(self, rng: Random, hosts: Mapping[str, SimulatedHost]) -> None:
        """Flip a bit of some file on a disk."""

        def view(piece: TruthPiece) -> memoryview:
            platter = hosts[piece.node].platter
            assert platter is not None
            return platter.view(name_of(piece))

        self._stored.pieces.rot(rng, view)

    # -- what trainers do -------------------------------------------------------------------------

    def writes(self, host: SimulatedHost, region: Region) -> None:
        """A rank writes into a slot that it was given, perhaps long ago."""
        piece = self._pieces.find(host.node, region.name)
        if piece is not None and host.memory.named(region.name) is region:
            raise Violation("bytes", f"{host.node}: a slot is written that is {piece.header.shard}")

    def saved(self, shard: ShardId, data: bytes, ranks: int) -> None:
        """One of so many ranks has put these bytes into its slot."""
        self._saved[shard] = data
        self._ranks[shard.generation] = ranks

    def claimed(self, shard: ShardId, digest: bytes) -> None:
        """A rank has saved what it says that all ranks have."""
        self._claims[shard.generation].add(digest)

    def failed(self, shard: ShardId, error: Exception) -> None:
        """A save was given up."""
        if self._strict and shard.run == self.run:
            raise Violation("disk", f"{shard} was not saved, and only disks failed: {error}")

    def committed(self, host: SimulatedHost, generation: Generation) -> None:
        """A trainer on that host was told that a generation is committed."""
        fenced = host.agent and host.agent.core.ledgers.look(self.run).fence >= self._timeline
        left = self._begun_at is None or generation > self._begun_at
        if generation.timeline >= self._timeline:
            self._commit(generation)
        elif fenced and left and generation not in self._committed:
            raise Violation(
                "fencing",
                f"{generation} was committed after timeline {self._timeline} "
                f"had gone back to {self._begun_at}",
            )

    def _commit(self, generation: Generation) -> None:
        if generation in self._committed:
            return
        self._committed.add(generation)
        self.counts.commits += 1
        if len(self._claims[generation]) > 1:
            raise Violation("replicas", f"{generation} was committed, and its ranks disagree")
        for shard in self._shards(generation):
            fragments = self._sealed[shard] - {HOME}
            if shard not in self._saved or len(fragments) < self._least:
                raise Violation(
                    "commit", f"{shard} had {len(fragments)} fragments of {self._least} ever"
                )
            self._owed[shard] = self._pieces.of(shard)
        if self.safe is None or generation > self.safe:
            self.safe = generation
            self._forget()

    def chosen(
        self, generation: Generation | None, answering: Collection[str], wanted: Wanted
    ) -> None:
        """A plan was made from what these nodes say: the safe generation, if they have it.

        Unless somebody chose; and what somebody left on purpose only then.
        """
        if wanted.named or (generation is not None and generation == self._told_to()):
            return
        if generation is not None and (left := self._choices.abandoned(generation, answering)):
            raise Violation("roll-back", f"{generation} was chosen, after going back to {left}")
        self._check_stored(generation, answering)
        if self.safe is None or (generation is not None and generation >= self.safe):
            return
        if self._choices.abandoned(self.safe, answering):
            return  # whoever was told that it is wanted again is away
        for shard in self._reach(self.safe, answering, instead_of=generation):
            if self._told_to() is None:
                self._check_margin(shard, answering)

    def _told_to(self) -> Generation | None:
        """What agents may have been told to go on from by a start that then died."""
        return self._decided if self._decided != self._begun_at else None

    def _check_stored(self, generation: Generation | None, answering: Collection[str]) -> None:
        """What agents were told is on disk: the newest is chosen, or something newer."""
        told = [e for e in self._stored.told if not self._choices.abandoned(e, answering)]
        if told and (generation is None or generation < told[-1]):
            for shard in self._reach(told[-1], answering, instead_of=generation):
                self._stored.check_margin(shard, answering)

    def _reach(
        self, wanted: Generation, nodes: Collection[str], *, instead_of: Generation | None
    ) -> list[ShardId]:
        """The shards that those nodes lack; if that is none, it should have been chosen."""
        lost = [each for each in self._shards(wanted) if not self._restorable(each, nodes)]
        if not lost and self._shards(wanted):
            text = f"{instead_of} was chosen, {wanted} could be restored"
            raise Violation("recovery", text)
        return lost

    def refused(self, generation: Generation, answering: Collection[str], why: str) -> None:
        """All ranks pass over a generation: not the safe one while it could be had."""
        if generation == self.safe and all(
            self._restorable(shard, answering) for shard in self._shards(generation)
        ):
            raise Violation("recovery", f"{generation} was refused and is there: {why}")

    def loaded(
        self, start: TruthStart, rank: int, generation: Generation, parts: Iterable[LoadedPart]
    ) -> None:
        """A rank goes on from these bytes."""
        if start not in self._loaded:
            saved_bytes = sum(len(self._saved[each]) for each in self._shards(generation))
            self._loaded[start] = Loaded(generation, saved_bytes)
        loaded = self._loaded[start]
        for part in parts:
            saved = self._saved.get(part.shard, b"")
            if saved[part.start : part.start + len(part.data)] != part.data:
                raise Violation("bytes", f"{part.shard} is not what was saved")
            if part.shard.generation != generation:
                raise Violation("mixed", f"rank {rank} of {start} read {part.shard}")
            loaded.bytes += len(part.data)
        if loaded.generation != generation:
            raise Violation("mixed", f"rank {rank} of {start} loaded {generation}")
        loaded.ranks += 1
        if loaded.ranks == start.ranks:  # all that was saved, whoever has which part of it
            if loaded.bytes != loaded.saved_bytes:
                text = f"{start} has {loaded.bytes} of {loaded.saved_bytes} bytes"
                raise Violation("bytes", text)
            self.counts.reshaped += self._ranks[generation] != start.ranks

    def assigned(self, region: Region) -> None:
        """A rank has tensors in there: it may be given back, and never taken again."""
        self._assigned.add(region)

    def decides(self, timeline: int, generation: Generation, *, on_purpose: bool) -> None:
        """All ranks can have it, and agents are about to hear that they go on from it.

        ``on_purpose``: somebody named it. Whoever hears so holds to it, even if this start ends
        before all have heard.
        """
        self._decided = generation
        if on_purpose:
            self._choices.made(timeline, generation)

    def begins(
        self, timeline: int, generation: Generation | None, *, on_purpose: bool = False
    ) -> None:
        """All ranks have what they go on from; ``on_purpose``: somebody named it."""
        if timeline < self._timeline:
            return  # stopped in between, and fenced off without knowing
        # An equal one begins where all who answer have lost their memory, and the others are away.
        self._timeline, self._begun_at = timeline, generation
        self._decided = generation
        self.counts.roll_backs += on_purpose
        self.safe = generation
        self.counts.restores += 1
        for shard in [each for each in self._owed if each.generation == generation]:
            self._owed[shard] = self._pieces.of(shard)

    # -- looking ----------------------------------------------------------------------------------

    def is_lost(self) -> bool:
        """Whether no host has the safe generation any more, nor what was told to be on disk."""
        promised = [self.safe] if self.safe is not None else []
        promised += self._stored.told[-1:]
        return bool(promised) and not any(
            all(self._restorable(shard) for shard in self._shards(each)) for each in promised
        )

    def is_whole(self) -> bool:
        """Whether every piece of the safe generation is there, and right."""
        return self.safe is not None and all(
            whole(self._pieces.of(shard)) for shard in self._shards(self.safe)
        )

    def _shards(self, generation: Generation) -> list[ShardId]:
        ranks = self._ranks.get(generation, 0)
        return [ShardId(self.run, generation, rank) for rank in range(ranks)]

    def _restorable(self, shard: ShardId, nodes: Collection[str] | None = None) -> bool:
        """Whether the pieces on these nodes suffice for every row of a shard.

        None: all, also those on disks that cannot be read at the moment.
        """
        on_disk = self._stored.pieces if nodes is None else self._stored
        pieces = [*self._pieces.of(shard), *on_disk.of(shard)]
        return restorable([each for each in pieces if nodes is None or each.node in nodes])

    def _check_margin(self, shard: ShardId, answering: Collection[str]) -> None:
        """Of a shard that was held whole, the loss of any m + 1 nodes loses nothing.

        Of m, where a restart has brought its home to a holder.
        """
        owed = self._owed.get(shard, [])
        if not owed or len({piece.header.index for piece in owed}) <= owed[0].header.n:
            return
        left = [piece for piece in self._pieces.of(shard) if piece.node in answering]
        gone = {piece.node for piece in owed if piece not in left or piece.rotten}
        if len(gone) <= promised_losses(owed):
            raise Violation(
                "margin", f"{shard} is lost with {len(gone)} nodes: {', '.join(sorted(gone))}"
            )

    def _forget(self) -> None:
        """Drop the bytes of generations that nobody can want any more."""
        kept = set(sorted(self._ranks)[-_REMEMBERED:])
        kept |= {shard.generation for shard in self._pieces.shards()}
        kept |= self._stored.generations()
        self._stored.forget(kept)
        tables: tuple[dict[ShardId, Any], ...] = (self._saved, self._sealed, self._owed)
        for table in tables:
            for shard in [each for each in table if each.generation not in kept]:
                del table[shard]
        self._ranks = {each: ranks for each, ranks in self._ranks.items() if each in kept}
        for generation in [each for each in self._claims if each not in kept]:
            del self._claims[generation]
