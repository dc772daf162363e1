"""The record of one run on one agent, and the rules of what may be dropped when.

Decides only: no I/O, no locks, no clock. run_records.py makes actions on files of the decisions.

Retention: an entry is dropped only when something newer is committed, with three exceptions. Its
own writer may give it up (``discard``), ``forget`` drops the whole run, and when memory is short,
what a restart left behind on older timelines is dropped. On disk the same holds, but what counts
there is what is on disk everywhere (``stored``): a commit in memory removes no file from disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ecckpt.agent.records.entry import Entry
from ecckpt.agent.records.run_notes import NOT_KNOWN_S, RunNotes
from ecckpt.errors import Fenced, InvalidMessage, NotHeld, OlderStart
from ecckpt.format.fragment_file import HOME, Header
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation, RunWriter, ShardId
from ecckpt.policy.rollbacks import RollBack, abandoned_by, in_force
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.messages.repair import Guard

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.region import Region


@dataclass(eq=False, slots=True, kw_only=True)
class RunRecord:
    """One run on one node.

    fence               the newest timeline that a writer used; older writers are refused
    session             the session that began that timeline; empty if not known
    born_s              when that session was started, by the agent's clock; ``NOT_KNOWN_S``, which
                        is before every start, if that is not known
    forgotten           files of timelines before this one were dropped by ``forget``
    committed           the newest generation known to be committed
    restored            the generation that timeline ``restored_by`` continues
    roll_backs          restores of an older state that was asked for, newest first
    stored              generations, oldest first, that are on disk everywhere and are kept
    guard               the last ``Guard``: which nodes hold fragments for this node's ranks
    noted, recorded     the notes as last written to tmpfs, and to disk
    recording           a write of notes to disk is under way; there is at most one at a time
    files, damaged      files on this node's disk, and those found bad, with the reason
    reserved            by rank, the slot for its next save, and the header it was asked for with
    rejected            files that could not be adopted: this run's, or of an unknown run
    """

    run: str
    _: KW_ONLY
    fence: int = 0
    session: str = ""
    born_s: float = NOT_KNOWN_S
    forgotten: int = 0
    committed: Generation | None = None
    restored: Generation | None = None
    restored_by: int = 0
    roll_backs: tuple[RollBack, ...] = ()
    stored: tuple[Generation, ...] = ()
    guard: Guard | None = None
    noted: RunNotes = field(default_factory=RunNotes)
    recorded: RunNotes = field(default_factory=RunNotes)
    recording: bool = False
    entries: dict[tuple[ShardId, int], Entry] = field(default_factory=dict)
    files: dict[tuple[ShardId, int], DiskFile] = field(default_factory=dict)
    damaged: dict[tuple[ShardId, int], str] = field(default_factory=dict)
    reserved: dict[int, tuple[Region, Header]] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> RunNotes:
        """The notes as they should be written now."""
        return RunNotes(
            fence=self.fence,
            committed=self.committed,
            restored=self.restored,
            roll_backs=self.roll_backs,
            stored=self.stored,
            guard=self.guard,
            restored_by=self.restored_by,
            session=self.session,
            born_s=self.born_s,
        )

    def believe(self, notes: RunNotes) -> None:
        """Merge the notes that an earlier process wrote, where they know more."""
        if notes.restored is not None and notes.restored_by >= self.restored_by:
            self.restored, self.restored_by = notes.restored, notes.restored_by
        if notes.fence > self.fence:
            self.fence, self.session, self.born_s = notes.fence, notes.session, notes.born_s
        self.committed = notes.committed or self.committed
        self.guard = notes.guard or self.guard
        self.stored = max(self.stored, notes.stored, key=lambda stored: stored[-1:])
        self.learn_roll_backs(notes.roll_backs)

    def is_fenced(self, writer: RunWriter) -> bool:
        """Whether that is a writer of an older timeline, or of one that another session began."""
        if writer.timeline != self.fence:
            return writer.timeline < self.fence
        return "" not in (self.session, writer.session) and self.session != writer.session

    def check_writer(self, writer: RunWriter) -> None:
        """Raise ``Fenced`` for a writer that is fenced."""
        if self.is_fenced(writer):
            raise Fenced(timeline=writer.timeline, current=self.fence)

    def admit(self, writer: RunWriter) -> bool:
        """Admit a writer; True if it is the first of a newer timeline.

        Raises ``Fenced`` as ``check_writer``.
        """
        self.check_writer(writer)
        newer = self.reach(writer.timeline)
        self.session = self.session or writer.session
        return newer

    def reach(self, timeline: int) -> bool:
        """Raise the fence to a timeline that is in use; True if that is new to this node."""
        newer = timeline > self.fence
        if newer:
            self.fence, self.session, self.born_s = timeline, "", NOT_KNOWN_S
        return newer

    def check_age(self, writer: RunWriter, born_s: float) -> None:
        """Raise ``OlderStart`` if another session that is younger has begun a timeline."""
        if writer.session != self.session and self.born_s > born_s:
            raise OlderStart(timeline=writer.timeline, current=self.fence)

    def begin_timeline(self, writer: RunWriter, born_s: float) -> bool:
        """Let a session, whose start was at ``born_s``, begin a timeline; True if it is new here.

        Raises ``Fenced`` if a newer timeline has begun, or another session began this one: of two
        starts of a run that overlap, at most one gets a timeline. Raises ``OlderStart`` if a start
        that is younger has begun any: one that was stopped and goes on does not replace its
        successor.
        """
        self.check_age(writer, born_s)
        newer = self.admit(writer)
        if self.born_s == NOT_KNOWN_S or born_s < self.born_s:  # a message takes time: the least
            self.born_s = born_s
        return newer

    @property
    def knows_generations(self) -> bool:
        """Whether it has or had any generation."""
        return any((self.entries, self.files, self.stored, self.committed, self.restored))

    def forget(self) -> None:
        """Forget everything of the run but the fence."""
        self.forgotten = self.fence
        self.committed = self.restored = self.guard = None
        self.roll_backs, self.stored = (), ()

    def went_on_from(self, generation: Generation) -> None:
        """Note the generation that the newest timeline continues."""
        self.restored, self.restored_by = generation, self.fence

    def learn_from(self, header: Header) -> None:
        """Take from a header of the newest timeline which generation that timeline continues."""
        if header.parent is not None and header.shard.generation.timeline == self.fence:
            self.went_on_from(header.parent)

    def learn_roll_backs(self, roll_backs: Iterable[RollBack]) -> None:
        """Merge roll-backs that a request or an earlier process knew of."""
        self.roll_backs = in_force((*self.roll_backs, *roll_backs))

    def find(self, shard: ShardId, index: int) -> Entry | None:
        """The entry of that fragment or home copy, sealed or not."""
        return self.entries.get((shard, index))

    def held(self, shard: ShardId) -> list[int]:
        """Indices of a shard's complete files that are not known to be damaged (-1: home copy)."""
        in_memory = {entry.key for entry in self._sealed() if not entry.damage}
        found = in_memory | (self.files.keys() - self.damaged.keys())
        return sorted(index for each, index in found if each == shard)

    def inventory(self, node: str) -> Inventory:
        """All sealed files, as the planning of a restore needs them (policy/survival.py)."""
        return Inventory(
            node=node,
            headers=Headers.from_headers(entry.header for entry in self._sealed()),
            disk=Headers.from_headers(file.header for file in self.files.values()),
            stored=self.stored,
            committed=self.committed,
            fence=self.fence,
            roll_backs=self.roll_backs,
            rejected=dict(self.rejected),
        )

    def commit(self, generation: Generation) -> None:
        """Note that a generation is committed; ``Fenced`` if its timeline was replaced."""
        self.check_writer(generation.writer)
        if self.committed is None or generation > self.committed:
            self.committed = generation

    def guarded(self) -> list[Entry]:
        """Home copies whose fragments are repaired: committed and restored, the newest first."""
        homes = [
            entry
            for entry in self._sealed()
            if entry.header.index == HOME
            and entry.header.shard.generation in (self.committed, self.restored)
        ]
        homes.sort(key=lambda entry: entry.header.shard.rank)
        return sorted(homes, key=lambda entry: entry.header.shard.generation, reverse=True)

    def outdated(self) -> list[Entry]:
        """Entries that the committed generation allows to drop, if this node has some of it.

        By the *written* notes: an agent that starts after a kill drops the same entries. A node
        without any file of the committed generation keeps what it has: nothing that it can see
        takes the place of its files.
        """
        committed = self.noted.committed
        if committed is None or not self._has_some_of(committed):
            return []
        return [
            entry
            for (shard, _), entry in self.entries.items()
            if self.is_outdated(shard.generation, committed)
        ]

    def _has_some_of(self, generation: Generation) -> bool:
        in_memory = (entry.header.shard for entry in self._sealed())
        return any(shard.generation == generation for shard in in_memory) or any(
            shard.generation == generation for shard, _ in self.files
        )

    def is_outdated(self, generation: Generation, committed: Generation | None) -> bool:
        """Whether a commit allows to drop that generation.

        It does for every older one, except the generation that the run restored: that goes with the
        first commit of the timeline that continues it. While a restart is under way nothing goes:
        it may choose a generation older than the committed.
        """
        if committed is None or generation >= committed:
            return False
        if committed.timeline >= self.fence:
            return True
        return self._start is not None and generation != self._start

    @property
    def _start(self) -> Generation | None:
        """The generation that the newest timeline continues; None while that is not known."""
        return self.restored if self.restored_by == self.fence else None

    def given_up(self, rank: int, generations: Collection[Generation]) -> list[Entry]:
        """Entries of generations that their own writer gave up, never of the committed one."""
        return [
            entry
            for (shard, _), entry in self.entries.items()
            if shard.rank == rank
            and shard.generation in generations
            and shard.generation != self.committed
        ]

    def unfinished(self, rank: int | None = None) -> list[Entry]:
        """Staged entries, of one rank or all, that are not pinned: their writer is gone."""
        return [
            entry
            for (shard, index), entry in self.entries.items()
            if index == HOME
            and entry.table is None
            and not entry.pins
            and rank in (None, shard.rank)
        ]

    def take_slot(self, header: Header, name: str) -> Region:
        """Give the slot of that name, which the rank has reserved, for the shard of the header.

        Raises ``NotHeld`` if the rank has no such slot or it is too small, and ``InvalidMessage``
        if it was reserved for another kind of shard.
        """
        region, asked = self.reserved.get(header.shard.rank, (None, header))
        if region is None or region.name != name or region.size_bytes < header.file_bytes:
            raise NotHeld(f"there is no slot {name} for {header.shard}")
        if _kind_of(header) != _kind_of(asked):
            text = f"{header.shard}: reserved as {_kind_of(asked)}, staged as {_kind_of(header)}"
            raise InvalidMessage(text)
        del self.reserved[header.shard.rank]
        return region

    def unused(self, rank: int | None = None) -> list[Region]:
        """Take back the slots that a rank (None: all) reserved and staged nothing in."""
        ranks = [each for each in self.reserved if rank in (None, each)]
        return [self.reserved.pop(each)[0] for each in ranks]

    def abandoned(self) -> list[Entry]:
        """Entries newer than the generation that a restart went back to, on older timelines.

        The committed generation is among them only if a roll-back abandons it.
        """
        start = self._start
        if start is None:
            return []
        return [
            entry
            for (shard, _), entry in self.entries.items()
            if start < shard.generation
            and shard.generation.timeline < self.fence
            and (
                shard.generation != self.committed
                or abandoned_by(shard.generation, self.roll_backs)
            )
        ]

    def leftover(self) -> list[Entry]:
        """Other entries of older timelines: neither committed nor restored."""
        start = self._start
        if start is None:
            return []
        return [
            entry
            for (shard, _), entry in self.entries.items()
            if shard.generation.timeline < self.fence
            and shard.generation not in (self.committed, start)
        ]

    # -- on disk ----------------------------------------------------------------------------------

    def to_store(self, generation: Generation) -> list[Entry]:
        """Entries not on disk yet, fragments first: they decide whether it counts as stored."""
        found = [
            entry
            for entry in self._sealed()
            if entry.header.shard.generation == generation and entry.key not in self.files
        ]
        return sorted(found, key=lambda entry: entry.header.index == HOME)

    def retain(self, generations: tuple[Generation, ...]) -> None:
        """Note which generations are on disk everywhere and are kept."""
        if not self.stored or generations[-1] >= self.stored[-1]:
            self.stored = generations

    def superseded(self) -> list[DiskFile]:
        """Files older than the newest generation that is on disk everywhere, and not kept.

        By the written notes, and only if this node has some of that generation, as in
        ``outdated``; never what the run restored and still needs.
        """
        stored = self.noted.stored
        if not stored or all(shard.generation != stored[-1] for shard, _ in self.files):
            return []
        return [
            file
            for (shard, _), file in self.files.items()
            if shard.generation not in stored and self.is_outdated(shard.generation, stored[-1])
        ]

    def discarded(self, generations: Collection[Generation]) -> list[DiskFile]:
        """Files of generations whose storing was given up."""
        return [
            file
            for (shard, _), file in self.files.items()
            if shard.generation in generations
            and shard.generation not in self.stored
            and shard.generation != self.restored
        ]

    def attempts(self) -> list[DiskFile]:
        """Files of older timelines whose generation was never on disk everywhere.

        Their writers are fenced. Generations that a roll-back abandons are among them; the
        restored generation is not.
        """
        start = self._start
        if start is None:
            return []
        return [
            file
            for (shard, _), file in self.files.items()
            if shard.generation.timeline < self.fence
            and shard.generation != start
            and (
                shard.generation not in self.stored
                or abandoned_by(shard.generation, self.roll_backs)
            )
        ]

    def _sealed(self) -> Iterator[Entry]:
        return (entry for entry in self.entries.values() if entry.table is not None)


def _kind_of(header: Header) -> tuple[object, ...]:
    """What a slot is reserved for; step and sizes need not be known by then."""
    shard = header.shard
    writer = shard.generation.writer
    return writer, header.world_size, header.index, header.k, header.m, header.home
