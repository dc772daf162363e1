"""The truth of a run: what really exists, compared with what was promised of it.

``Truth`` raises ``Violation`` where the two differ. It is the ``Witness`` of all agents, and is
told of every fault, save and restore. It follows each file that agents complete and free, and uses
nothing that agents say of themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from random import Random
from typing import TYPE_CHECKING

from ecckpt.agent.core.actions import Allocate, Discard, Event, Recycle
from ecckpt.client.restore.protocol import Wanted
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.disk import Retain, Store
from ecckpt.protocol.messages.save import Commit
from ecckpt.sim.run_config import Rules
from ecckpt.sim.truth.counts import Counts
from ecckpt.sim.truth.disk import TruthDisk
from ecckpt.sim.truth.loads import LoadedPart, TruthLoads, TruthStart
from ecckpt.sim.truth.pieces import (
    TruthPiece,
    TruthPieces,
    is_restorable,
    is_whole,
    unexpected_loss,
)
from ecckpt.sim.truth.rollbacks import TruthRollBacks
from ecckpt.sim.truth.saves import TruthSaves
from ecckpt.sim.truth.violation import Violation

if TYPE_CHECKING:
    from ecckpt.agent.core.run_records import RunRecords
    from ecckpt.agent.records.entry import Entry
    from ecckpt.agent.records.run_notes import RunNotes
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.region import Region
    from ecckpt.sim.hosts.interfaces import HostView


class Truth:
    """Of one run.

    ``safe`` is the generation that a restart must not fall behind: the newest committed one, or the
    one that the last restore went on from. With ``strict`` only disks fail, so no save may fail.
    """

    def __init__(self, run: str, rules: Rules, *, strict: bool) -> None:
        self.run = run
        self.safe: Generation | None = None
        self.counts = Counts()
        self._strict = strict
        self._saves = TruthSaves(run, rules.least)
        self._shards = self._saves.shards
        self._pieces = TruthPieces()
        self._disk = TruthDisk(run, rules)
        self._roll_backs = TruthRollBacks()
        # The pieces of each shard at its commit, or when a timeline last began at its generation.
        self._promised: dict[ShardId, list[TruthPiece]] = {}
        self._committed: set[Generation] = set()
        self._timeline, self._session = 0, ""
        self._begun_at: Generation | None = None  # what the newest timeline went on from
        # The same, from the moment that rank 0 decides it. Agents may know it before
        # ``timeline_begun`` is called, or although that is never called.
        self._decided: Generation | None = None
        self._loads = TruthLoads()
        self._assigned: set[Region] = set()  # regions that hold tensors of a rank

    # -- the Witness of agents and hosts ----------------------------------------------------------

    def sealed(self, host: HostView, entry: Entry) -> None:
        """A file in memory is complete."""
        if entry.header.shard.run != self.run:
            return
        self._pieces.add(TruthPiece(host.node, entry.region.name, entry.header))
        self._saves.sealed(entry.header.shard, entry.header.index)

    def memory_freeing(self, host: HostView, action: Recycle | Discard) -> None:
        """A region is about to be freed: the safe generation must remain restorable.

        A region with tensors of a rank may be discarded, but not recycled: another task would
        overwrite the tensors.
        """
        if isinstance(action, Recycle) and action.region in self._assigned:
            text = f"{host.node} recycles {action.region.name}, which holds tensors of a rank"
            raise Violation("bytes", text)
        piece = self._pieces.find(host.node, action.region.name)
        if piece is None:
            return
        shard = piece.header.shard
        before = is_restorable(self._pieces.of(shard))
        self._pieces.pop(host.node, action.region.name)
        if not before or shard.generation != self.safe or self._pending_decision() is not None:
            return
        if not is_restorable(self._pieces.of(shard)):
            text = f"{host.node} freed a piece without which {shard} cannot be restored"
            raise Violation("retention", text)

    def memory_adopted(self, host: HostView, records: RunRecords) -> None:
        """A new agent must know all files in memory that are right."""
        known = {entry.region.name for entry in records.get(self.run).entries.values()}
        unknown = [piece for piece in self._pieces.on(host.node) if piece.name not in known]
        for piece in unknown:
            self._pieces.pop(host.node, piece.name)
            if not piece.rotten:
                raise Violation("adoption", f"{host.node} did not adopt {piece.header.shard}")

    def event_handled(self, host: HostView, event: Event) -> None:
        """An agent has handled an event: it must not accept a commit of a fenced writer.

        A commit or ``Retain`` of the current timeline is counted.
        """
        if isinstance(event, Retain) and event.run == self.run:
            if event.writer.timeline >= self._timeline:
                shards = self._shards(event.generations[-1])
                self.counts.stored += self._disk.retention_told(event, shards)
            return
        if not isinstance(event, Commit) or event.run != self.run:
            return
        assert host.records is not None
        fence = host.records.get(self.run).fence
        if event.generation.timeline < fence:
            text = f"{host.node} is fenced at {fence} and accepted {event.generation}"
            raise Violation("fencing", text)
        if event.generation.timeline >= self._timeline:
            self._commit(event.generation)

    def notes_written(self, host: HostView, run: str, notes: RunNotes) -> None:
        """An agent has written to tmpfs what it knows of a run."""
        if run == self.run:
            self._roll_backs.written_to_memory(host.node, notes.roll_backs)

    def allocated(self, host: HostView, action: Allocate) -> None:
        """A region was allocated: the run must stay within its budget."""
        used_bytes = host.memory.used_bytes(action.run)
        if used_bytes > host.budget_bytes:
            text = f"{host.node} uses {used_bytes} bytes, the budget is {host.budget_bytes}"
            raise Violation("budget", text)

    def disk_written(self, host: HostView, file: DiskFile, message: Store) -> None:
        """An agent reports a file as written to disk."""
        self._disk.disk_written(host, file, message)

    def disk_adopted(self, host: HostView, records: RunRecords) -> None:
        """An agent has taken over the files on its disk."""
        self._disk.disk_adopted(host, records)

    def disk_unreadable(self, host: HostView) -> None:
        """An agent does not know what is on its disk."""
        self._disk.disk_unreadable(host)

    def disk_removing(self, host: HostView, files: Iterable[DiskFile]) -> None:
        """An agent is about to remove files from its disk."""
        self._disk.disk_removing(host, files, self._roll_backs.was_abandoned)

    def disk_removed(self, host: HostView, files: Iterable[DiskFile]) -> None:
        """An agent has tried to remove files from its disk."""
        self._disk.disk_removed(host, files)

    def disk_notes_written(self, host: HostView, run: str, notes: RunNotes) -> None:
        """An agent has written to disk what it knows of a run."""
        if run == self.run:
            self._roll_backs.written_to_disk(host.node, notes.roll_backs)

    def host_failing(self, host: HostView, *, disk: bool) -> None:
        """A host loses its memory, and with ``disk`` also its disk."""
        self._roll_backs.host_lost(host.node, disk=disk)
        if disk:
            self._disk.disk_lost(host)
        for piece in self._pieces.on(host.node):
            self._pieces.pop(host.node, piece.name)

    def rot(self, rng: Random, hosts: Mapping[str, HostView]) -> None:
        """Flip a bit of a random complete file in memory."""
        self._pieces.rot(rng, lambda piece: hosts[piece.node].memory.region_view(piece.name))

    def rot_disk(self, rng: Random, hosts: Mapping[str, HostView]) -> None:
        """Flip a bit of a random file on a disk."""
        self._disk.rot(rng, hosts)

    # -- reports of ranks that save ---------------------------------------------------------------

    def slot_writing(self, host: HostView, region: Region) -> None:
        """A rank is about to write into a slot that it mapped, perhaps long ago.

        The slot must not be a complete file by now.
        """
        piece = self._pieces.find(host.node, region.name)
        if piece is not None and host.memory.named(region.name) is region:
            raise Violation("bytes", f"{host.node}: a rank overwrites {piece.header.shard}")

    def state_saved(self, shard: ShardId, data: bytes, *, ranks: int, claim: bytes | None) -> None:
        """A rank, one of ``ranks``, has copied these bytes into its slot.

        ``claim`` is the digest of the tensors in it that the rank declares replicated, if any.
        """
        self._saves.saved(shard, data, ranks)
        if claim is not None:
            self._saves.claimed(shard, claim)

    def save_failed(self, shard: ShardId, error: Exception) -> None:
        """A save was given up, which must not happen while only disks fail."""
        if self._strict and shard.run == self.run:
            raise Violation("disk", f"{shard} was not saved though only disks failed: {error}")

    def commit_reported(self, host: HostView, generation: Generation) -> None:
        """A rank on that host was told that a generation is committed.

        That must not happen if the host's agent was fenced by a timeline that began at something
        older.
        """
        # Before this host's agent was fenced, an older session may rightly have committed.
        records = host.records
        fenced = records is not None and records.get(self.run).fence >= self._timeline
        discarded = self._begun_at is None or generation > self._begun_at
        if generation.timeline >= self._timeline:
            self._commit(generation)
        elif fenced and discarded and generation not in self._committed:
            raise Violation(
                "fencing",
                f"{generation} was committed after timeline {self._timeline} "
                f"began at {self._begun_at}",
            )

    def _commit(self, generation: Generation) -> None:
        """A generation is committed for the first time: its shards must have enough fragments."""
        if generation in self._committed:
            return
        self._committed.add(generation)
        self.counts.commits += 1
        self._saves.check_commit(generation)
        for shard in self._shards(generation):
            self._promised[shard] = self._pieces.of(shard)
        if self.safe is None or generation > self.safe:
            self.safe = generation
            self._forget_old()

    # -- reports of ranks that restore ------------------------------------------------------------

    def plan_chosen(
        self, generation: Generation | None, answering: Collection[str], wanted: Wanted
    ) -> None:
        """Rank 0 has planned a restore from the answers of these nodes.

        The choice must be at least the safe generation if these nodes have it, and must not be one
        that a roll-back abandons. A caller who named a generation may choose any.
        """
        if wanted.named or (generation is not None and generation == self._pending_decision()):
            return
        if generation is not None:
            roll_back = self._roll_backs.abandoned(generation, answering)
            if roll_back is not None:
                text = f"{generation} was chosen, which {roll_back} abandons"
                raise Violation("roll-back", text)
        self._check_disk(generation, answering)
        if self.safe is None or (generation is not None and generation >= self.safe):
            return
        if self._roll_backs.abandoned(self.safe, answering):
            return  # a later roll-back wants it again, but only unreachable agents know of that one
        for shard in self._lost_shards(self.safe, answering, instead_of=generation):
            if self._pending_decision() is None:
                self._check_margin(shard, answering)

    def _pending_decision(self) -> Generation | None:
        """The generation that a restore decided on, if ``timeline_begun`` did not follow.

        The restore may have died after some agents were told, so a later restart may go on from it.
        """
        return self._decided if self._decided != self._begun_at else None

    def _check_disk(self, generation: Generation | None, answering: Collection[str]) -> None:
        """The choice must be at least the newest generation that agents were told is on disk."""
        abandoned = self._roll_backs.abandoned
        told = [stored for stored in self._disk.told if not abandoned(stored, answering)]
        if told and (generation is None or generation < told[-1]):
            for shard in self._lost_shards(told[-1], answering, instead_of=generation):
                self._disk.check_margin(shard, answering)

    def _lost_shards(
        self, wanted: Generation, nodes: Collection[str], *, instead_of: Generation | None
    ) -> list[ShardId]:
        """The shards of ``wanted`` that cannot be restored from these nodes.

        If there are none, ``wanted`` should have been chosen.
        """
        shards = self._shards(wanted)
        lost = [shard for shard in shards if not self._is_restorable(shard, nodes)]
        if shards and not lost:
            text = f"{instead_of} was chosen though {wanted} could be restored"
            raise Violation("recovery", text)
        return lost

    def generation_refused(
        self, generation: Generation, answering: Collection[str], why: str
    ) -> None:
        """All ranks pass over a generation: not over the safe one if that can be restored."""
        if generation == self.safe and all(
            self._is_restorable(shard, answering) for shard in self._shards(generation)
        ):
            text = f"{generation} was refused though it could be restored: {why}"
            raise Violation("recovery", text)

    def rank_loaded(
        self, start: TruthStart, rank: int, generation: Generation, parts: Iterable[LoadedPart]
    ) -> None:
        """A rank goes on from these bytes, which must be what was saved."""
        last = self._loads.add(
            start,
            rank,
            parts,
            generation=generation,
            saved=self._saves.contents,
            shards=self._shards(generation),
        )
        self.counts.reshaped += last and self._saves.ranks[generation] != start.ranks

    def tensors_assigned(self, region: Region) -> None:
        """A rank keeps tensors in this region: it may be discarded, never recycled."""
        self._assigned.add(region)

    def restore_decided(self, timeline: int, generation: Generation, *, on_purpose: bool) -> None:
        """All ranks can load the generation, and agents are about to be told of it.

        ``on_purpose``: it was asked for by name. An agent that is told so records the roll-back,
        even if this restore dies before it has told all agents.
        """
        self._decided = generation
        if on_purpose:
            self._roll_backs.add(timeline, generation)

    def timeline_begun(
        self, start: TruthStart, generation: Generation | None, *, on_purpose: bool = False
    ) -> None:
        """All ranks have loaded what they go on from; ``on_purpose``: it was asked for by name."""
        # Before the first commit, nodes that have seen no earlier start may begin at a lower one.
        anew = self.safe is None and start.session > self._session
        if start.timeline < self._timeline and not anew:
            return  # rank 0 was stalled and does not know yet that a newer session fenced it off
        # An equal timeline may begin where all agents that answer have lost their memory and all
        # others are unreachable.
        self._timeline, self._session = start.timeline, start.session
        self._begun_at = generation
        self._decided = generation
        self.counts.roll_backs += on_purpose
        self.safe = generation
        self.counts.restores += 1
        for shard in [shard for shard in self._promised if shard.generation == generation]:
            self._promised[shard] = self._pieces.of(shard)

    # -- queries ----------------------------------------------------------------------------------

    def is_lost(self) -> bool:
        """Whether no host has the safe generation any more, nor the newest that is on disk."""
        promised = [self.safe] if self.safe is not None else []
        promised += self._disk.told[-1:]
        return bool(promised) and not any(
            all(self._is_restorable(shard) for shard in self._shards(generation))
            for generation in promised
        )

    def is_whole(self) -> bool:
        """Whether all pieces of the safe generation exist and are right."""
        return self.safe is not None and all(
            is_whole(self._pieces.of(shard)) for shard in self._shards(self.safe)
        )

    def _is_restorable(self, shard: ShardId, nodes: Collection[str] | None = None) -> bool:
        """Whether the pieces on these nodes suffice for every row of a shard.

        With None: the pieces on all nodes, including disks that cannot be read at the moment.
        """
        on_disk = self._disk.pieces if nodes is None else self._disk
        pieces = [*self._pieces.of(shard), *on_disk.of(shard)]
        return is_restorable([piece for piece in pieces if nodes is None or piece.node in nodes])

    def _check_margin(self, shard: ShardId, answering: Collection[str]) -> None:
        """A shard that was held whole must survive the loss of any m + 1 nodes.

        Whole: the home copy and all n fragments. Of any m nodes only, where a restart has moved the
        home to a holder.
        """
        promised = self._promised.get(shard, [])
        if not promised or len({piece.header.index for piece in promised}) <= promised[0].header.n:
            return  # it was committed before all n fragments and the home copy were held
        reachable = [piece for piece in self._pieces.of(shard) if piece.node in answering]
        loss = unexpected_loss(promised, reachable)
        if loss:
            raise Violation("margin", f"{shard} is lost with only {loss}")

    def _forget_old(self) -> None:
        """Drop the bytes of generations that can no longer be restored or compared."""
        kept = self._saves.remembered()
        kept |= {shard.generation for shard in self._pieces.shards()}
        kept |= self._disk.generations()
        self._disk.forget(kept)
        self._saves.forget(kept)
        for shard in [shard for shard in self._promised if shard.generation not in kept]:
            del self._promised[shard]
