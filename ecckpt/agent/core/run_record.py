"""What one agent knows of one run, and what may go when. Decides only: no I/O, no locks, no clock.

The rules of retention all live here. Nothing goes before something newer is committed, except
what its own writer gave up, and, when the budget leaves no other way, the tail of a timeline that
a restart has abandoned. On disk the same holds by what is on disk everywhere: a commit in memory
lets nothing go there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ecckpt.errors import Fenced
from ecckpt.format.fragment_file import HOME, Header
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.rollbacks import RollBack, abandoned_by, in_force
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.messages.repair import Guard

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.regions import Region


@dataclass(eq=False, slots=True)
class Entry:
    """A home copy or fragment on this node.

    ``table`` is None until the file is sealed. ``pins`` counts who works on it; a ``doomed`` entry
    goes when the last one is done. ``lent`` keeps it like a pin, but may be taken back: the disk's
    thread looks again after each piece that it copied. ``parity`` holds parity fragments of a home
    while peers pull; ``early``: its data may be pulled already while it is being encoded.
    """

    header: Header
    region: Region
    table: np.ndarray | None
    _: KW_ONLY
    pins: int = 0
    doomed: bool = False
    lent: bool = False
    early: bool = False
    parity: Region | None = None

    @property
    def key(self) -> tuple[ShardId, int]:
        """Where the record keeps it."""
        return self.header.shard, self.header.index


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNotes:
    """What of a run must outlive the agent's process, beyond the files themselves."""

    fence: int = 0
    committed: Generation | None = None
    restored: Generation | None = None
    roll_backs: tuple[RollBack, ...] = ()
    stored: tuple[Generation, ...] = ()
    guard: Guard | None = None
    restored_by: int = 0
    session: str = ""

    @property
    def lasting(self) -> RunNotes:
        """What of it still means something when all memory is gone."""
        return replace(self, committed=None, guard=None)


@dataclass(eq=False, slots=True)
class RunRecord:
    """One run on one node.

    ``noted`` is what was last written down of it, ``recorded`` the same on disk, where it is
    ``recording`` at most once at a time.
    ``stored`` are the generations, oldest first, that are on disk everywhere and stay; ``files``
    is what is on this node's disk, ``damaged`` what of it was found bad, and why. ``guard`` says
    who holds for this node's ranks. ``restored`` is what timeline ``restored_by`` goes on from;
    ``session`` has begun the timeline of the fence, if that is known. Timelines before
    ``forgotten`` were dropped on purpose.
    """

    run: str
    _: KW_ONLY
    fence: int = 0
    session: str = ""
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
    reserved: dict[int, Region] = field(default_factory=dict)  # by rank: a slot for what comes next
    rejected: dict[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> RunNotes:
        """What should be written down of it now."""
        return RunNotes(
            fence=self.fence,
            committed=self.committed,
            restored=self.restored,
            roll_backs=self.roll_backs,
            stored=self.stored,
            guard=self.guard,
            restored_by=self.restored_by,
            session=self.session,
        )

    def believe(self, notes: RunNotes) -> None:
        """Take over what an earlier process wrote down, where it knew more."""
        if notes.restored is not None and notes.restored_by >= self.restored_by:
            self.restored, self.restored_by = notes.restored, notes.restored_by
        if notes.fence > self.fence:
            self.fence, self.session = notes.fence, notes.session
        self.committed = notes.committed or self.committed
        self.guard = notes.guard or self.guard
        self.stored = max(self.stored, notes.stored, key=lambda stored: stored[-1:])
        self.learn_roll_backs(notes.roll_backs)

    def check_writer(self, writer: int) -> None:
        """Raise ``Fenced`` for a writer of an older timeline."""
        if writer < self.fence:
            raise Fenced(timeline=writer, current=self.fence)

    def admit(self, writer: int) -> bool:
        """Let a writer of that timeline in; True if it is the first of a newer one.

        Raises ``Fenced`` for a writer of an older timeline.
        """
        self.check_writer(writer)
        return self.reach(writer)

    def reach(self, timeline: int) -> bool:
        """Somebody writes in that timeline; whether this node did not know of it."""
        newer = timeline > self.fence
        if newer:
            self.fence, self.session = timeline, ""
        return newer

    def begin_timeline(self, timeline: int, session: str) -> bool:
        """Let a session begin a timeline; True if this is news.

        Raises ``Fenced`` if a newer one has begun, or this one by another session: of two starts
        that overlap, at most one has a timeline.
        """
        if timeline == self.fence and self.session not in ("", session):
            raise Fenced(timeline=timeline, current=self.fence)
        newer = self.admit(timeline)
        self.session = session
        return newer

    def forget(self) -> None:
        """Know nothing any more but that a timeline has begun."""
        self.forgotten = self.fence
        self.committed = self.restored = self.guard = None
        self.roll_backs, self.stored = (), ()

    def went_on_from(self, generation: Generation) -> None:
        """The newest timeline goes on from there."""
        self.restored, self.restored_by = generation, self.fence

    def learn_from(self, header: Header) -> None:
        """What a writer of the newest timeline saves tells what that goes on from."""
        if header.parent is not None and header.shard.generation.timeline == self.fence:
            self.went_on_from(header.parent)

    def learn_roll_backs(self, roll_backs: Iterable[RollBack]) -> None:
        """Note roll-backs that somebody knows of."""
        self.roll_backs = in_force((*self.roll_backs, *roll_backs))

    def find(self, shard: ShardId, index: int) -> Entry | None:
        """The entry of that fragment (or home copy), sealed or not."""
        return self.entries.get((shard, index))

    def held(self, shard: ShardId) -> list[int]:
        """Indices of what is complete here of a shard, in memory or on disk (-1: home copy)."""
        found = {entry.header.index for entry in self._sealed() if entry.header.shard == shard}
        on_disk = self.files.keys() - self.damaged.keys()
        return sorted(found | {index for each, index in on_disk if each == shard})

    def inventory(self, node: str) -> Inventory:
        """Everything sealed, as recovery sees it."""
        return Inventory(
            node,
            Headers.of(entry.header for entry in self._sealed()),
            Headers.of(file.header for file in self.files.values()),
            self.stored,
            self.committed,
            self.fence,
            self.roll_backs,
            dict(self.rejected),
        )

    def commit(self, generation: Generation) -> None:
        """Take note that a generation is safe.

        Raises ``Fenced`` if its timeline was replaced meanwhile.
        """
        self.check_writer(generation.timeline)
        if self.committed is None or generation > self.committed:
            self.committed = generation

    def guarded(self) -> list[Entry]:
        """Home copies that holders must not lose: what is committed, what the run went back to.

        The newest generation first.
        """
        homes = [
            entry
            for entry in self._sealed()
            if entry.header.index == HOME
            and entry.header.shard.generation in (self.committed, self.restored)
        ]
        homes.sort(key=lambda entry: entry.header.shard.rank)
        return sorted(homes, key=lambda entry: entry.header.shard.generation, reverse=True)

    def outdated(self) -> list[Entry]:
        """What is older than the committed generation.

        By what was written down: after a kill in between, nothing is missed.
        """
        return [
            entry
            for (shard, _), entry in self.entries.items()
            if self.is_outdated(shard.generation, self.noted.committed)
        ]

    def is_outdated(self, generation: Generation, committed: Generation | None) -> bool:
        """Whether a commit lets it go: of what is older, all but what the run has gone back to.

        That, too, goes with the first commit of the timeline that began there. Nothing does while
        a restart is under way that may yet choose what is older than the newest committed.
        """
        if committed is None or generation >= committed:
            return False
        if committed.timeline >= self.fence:
            return True
        return self._start is not None and generation != self._start

    @property
    def _start(self) -> Generation | None:
        """What the newest timeline goes on from, once that is known."""
        return self.restored if self.restored_by == self.fence else None

    def given_up(self, rank: int, generations: Collection[Generation]) -> list[Entry]:
        """Entries of generations that their own writer abandoned (never of the committed one)."""
        return [
            entry
            for (shard, _), entry in self.entries.items()
            if shard.rank == rank
            and shard.generation in generations
            and shard.generation != self.committed
        ]

    def unfinished(self, rank: int | None = None) -> list[Entry]:
        """Slots reserved and not sealed, and that nobody works on: their writer is gone."""
        return [
            entry
            for (shard, index), entry in self.entries.items()
            if index == HOME
            and entry.table is None
            and not entry.pins
            and rank in (None, shard.rank)
        ]

    def unused(self, rank: int | None = None) -> list[Region]:
        """Take back the slot that a rank reserved and staged nothing in; of all ranks for None."""
        ranks = [each for each in self.reserved if rank in (None, each)]
        return [self.reserved.pop(each) for each in ranks]

    def abandoned(self) -> list[Entry]:
        """The tail of an older timeline beyond the point that a restart went back to.

        The committed generation is among it only if somebody went back before it on purpose.
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
        """What else older timelines have left: neither committed nor gone on from."""
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
        """What is here of a generation, and not on disk: fragments first, which are what counts."""
        found = [
            entry
            for entry in self._sealed()
            if entry.header.shard.generation == generation and entry.key not in self.files
        ]
        return sorted(found, key=lambda entry: entry.header.index == HOME)

    def retain(self, generations: tuple[Generation, ...]) -> None:
        """Take note of what is on disk everywhere, and stays."""
        if not self.stored or generations[-1] >= self.stored[-1]:
            self.stored = generations

    def superseded(self) -> list[DiskFile]:
        """Files older than the newest generation that is on disk everywhere, and not kept.

        By what was written down, and never what the run has gone back to and not yet left.
        """
        stored = self.noted.stored
        return [
            file
            for (shard, _), file in self.files.items()
            if stored
            and shard.generation not in stored
            and self.is_outdated(shard.generation, stored[-1])
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
        """Files of older timelines that were never on disk everywhere, and never will be.

        And those of generations that somebody went back before on purpose.
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
