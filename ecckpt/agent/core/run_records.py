"""All runs of one agent: what enters, what is given up, and what that means for their files.

The only code that changes a record. Changes of files come back as actions, in the order in which
they have to happen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ecckpt.agent.core.actions import (
    Action,
    Discard,
    Noted,
    Record,
    Recycle,
    Release,
    Remember,
    Remove,
)
from ecckpt.agent.core.run_record import Entry, RunNotes, RunRecord
from ecckpt.errors import NotHeld
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header, pack_table
from ecckpt.format.ids import Generation, ShardId, check_name
from ecckpt.policy.survival import UNREADABLE_DISK

if TYPE_CHECKING:
    from ecckpt.agent.runtime.disk_store import DiskInventory
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.regions import Region

_READING = "disk, for now"


class RunRecords:
    """The records by run, and ``rejected``: files that are nobody's, with the reason.

    ``disk``: whether the node has one.
    """

    def __init__(self, node: str, *, disk: bool = False) -> None:
        self.node = node
        self.disk = disk
        self._lent: list[Entry] = []
        self.rejected: dict[str, str] = {}
        self._runs: dict[str, RunRecord] = {}

    def runs(self) -> list[str]:
        """Names of all runs this node knows."""
        return sorted(self._runs)

    def of(self, run: str) -> RunRecord:
        """The run's record, a new one if need be."""
        if run not in self._runs:
            check_name("run", run)
            self._runs[run] = RunRecord(run, rejected=self.rejected)
        return self._runs[run]

    def look(self, run: str) -> RunRecord:
        """The run's record to read: an empty one if the run is not known."""
        return self._runs.get(run) or RunRecord(run, rejected=self.rejected)

    # -- writers ----------------------------------------------------------------------------------

    def admit(self, run: str, writer: int, header: Header | None = None) -> list[Action]:
        """Let a writer of that timeline in, or raise ``Fenced``; slots of older ones go.

        ``header``: of what it is about to save.
        """
        record = self.of(run)
        newer = record.admit(writer)
        if header is not None:
            record.learn_from(header)
        return (self.clear(run) if newer else []) + self.write_notes(record)

    def write_notes(self, record: RunRecord, request: Noted | None = None) -> list[Action]:
        """Have written down what changed, if anything did; then ``request`` is answered."""
        return [] if record.notes == record.noted else [Remember(record.run, request)]

    def copy_notes_to_disk(self, record: RunRecord) -> list[Action]:
        """Have written down on disk what was noted, if anything of it is new there."""
        same = record.noted.lasting == record.recorded
        if same or record.recording or not self.disk:
            return []
        record.recording = True
        return [Record(record.run)]

    def notes_copied(self, run: str, notes: RunNotes | None) -> list[Action]:
        """That was written, or could not be: then it is tried with the next note."""
        record = self.of(run)
        record.recording = False
        if notes is None:
            return []
        record.recorded = notes
        return self.copy_notes_to_disk(record)

    # -- files ------------------------------------------------------------------------------------

    def enter(self, entry: Entry) -> list[Action]:
        """A file, sealed or staged; one that it replaces is given up."""
        entries = self.of(entry.header.shard.run).entries
        older = entries.pop(entry.key, None)
        entries[entry.key] = entry
        return [] if older is None else self._give_up(older)

    def retire(self, entries: Iterable[Entry]) -> list[Action]:
        """Files that may go."""
        actions: list[Action] = []
        for entry in list(entries):
            self._runs[entry.header.shard.run].entries.pop(entry.key, None)
            actions += self._give_up(entry)
        return actions

    def reserve(self, run: str, rank: int, region: Region) -> list[Action]:
        """A slot for what a rank saves next; one that it had is given up."""
        older = self.of(run).unused(rank)
        self.of(run).reserved[rank] = region
        return [Discard(run, each) for each in older]

    def stage(self, header: Header, name: str) -> list[Action]:
        """A shard is in the slot that its rank reserved; ``NotHeld`` if the rank has none such."""
        reserved = self.of(header.shard.run).reserved
        region = reserved.get(header.shard.rank)
        if region is None or region.name != name or region.size_bytes < header.file_bytes:
            raise NotHeld(f"node {self.node} has no slot {name} for {header.shard}")
        del reserved[header.shard.rank]
        return self.enter(Entry(header, region, None))

    def clear(self, run: str, rank: int | None = None) -> list[Action]:
        """Give up the slots that a rank (None: every one) reserved or staged and never sealed."""
        record = self.of(run)
        # Their trainers may still be writing.
        unused: list[Action] = [Discard(run, region) for region in record.unused(rank)]
        return unused + self.retire(record.unfinished(rank))

    def unused(self) -> list[Action]:
        """Give up what all ranks of all runs reserved and have not used yet."""
        return [Discard(run, each) for run in self._runs for each in self._runs[run].unused()]

    def discard(self, run: str, rank: int, generations: Iterable[Generation]) -> list[Action]:
        """Files of generations that their own writer gave up."""
        return self.retire(self.of(run).given_up(rank, set(generations)))

    def forget(self, run: str) -> list[Action]:
        """Drop all files of a run; what somebody works on goes when they are done."""
        record = self.of(run)
        record.forget()
        return [
            *self.clear(run),
            *self.retire(record.entries.values()),
            *self.remove(run, record.files.values()),
            Release(run),
        ]

    def unpin(self, entry: Entry) -> list[Action]:
        """Somebody is done with an entry."""
        entry.pins -= 1
        return self._settled(entry)

    def lend(self, entry: Entry) -> None:
        """Keep an entry for the disk, until it has it or memory is short."""
        entry.lent = True
        self._lent.append(entry)

    def unlend(self, entry: Entry) -> list[Action]:
        """The disk is done with an entry; nothing if it was taken back before."""
        if not entry.lent:
            return []
        entry.lent = False
        self._lent.remove(entry)
        return self._settled(entry)

    def recall(self, run: str | None, size_bytes: int) -> list[Action]:
        """Take back so much of what only the disk keeps, of one run or of all, if there is any.

        What would be written last goes first.
        """
        actions: list[Action] = []
        for entry in reversed(list(self._lent)):
            if size_bytes <= 0:
                break
            if entry.doomed and not entry.pins and run in (None, entry.header.shard.run):
                actions += self.unlend(entry)
                size_bytes -= entry.header.file_bytes
        return actions

    def keep_file(self, file: DiskFile) -> None:
        """A complete file on disk."""
        shard = file.header.shard
        record = self.of(shard.run)
        record.reach(shard.generation.timeline)
        record.files[shard, file.header.index] = file
        record.damaged.pop((shard, file.header.index), None)

    def await_disk(self) -> None:
        """The disk is still being read: nobody takes absence for proof meanwhile."""
        self.rejected[_READING] = "still being read"

    @property
    def awaits_disk(self) -> bool:
        """Whether it is."""
        return _READING in self.rejected

    def lose_disk(self, why: str) -> None:
        """The disk cannot be read."""
        self.rejected.pop(_READING, None)
        self.rejected[UNREADABLE_DISK] = why

    def adopt_disk(self, found: DiskInventory) -> None:
        """What an earlier process left on disk."""
        self.rejected.pop(_READING, None)
        self.rejected.update(found.rejected)
        for run, notes in found.notes.items():
            record = self.of(run)
            record.believe(notes)
            record.recorded = notes
        for file in found.files:
            self.keep_file(file)

    def files(self) -> list[DiskFile]:
        """What is on disk of all runs, the oldest first."""
        found = [file for record in self._runs.values() for file in record.files.values()]
        return sorted(found, key=lambda file: file.header.shard.generation)

    def has_file(self, file: DiskFile) -> bool:
        """Whether that is still what is on disk there."""
        key = file.header.shard, file.header.index
        return self.look(file.header.shard.run).files.get(key) is file

    def note_damage(self, file: DiskFile, why: str) -> bool:
        """A file on disk was found bad; whether that is news."""
        record, key = self.of(file.header.shard.run), (file.header.shard, file.header.index)
        if record.files.get(key) is not file or record.damaged.get(key) == why:
            return False
        record.damaged[key] = why
        return True

    def remove(self, run: str, files: Iterable[DiskFile]) -> list[Action]:
        """Files on disk that may go."""
        gone = tuple(files)
        for file in gone:
            key = (file.header.shard, file.header.index)
            del self._runs[run].files[key]
            self._runs[run].damaged.pop(key, None)
        return [Remove(gone)] if gone else []

    def adopt(self, entry: Entry) -> list[Action]:
        """A complete file that an earlier process left."""
        shard = entry.header.shard
        record = self.of(shard.run)
        record.reach(shard.generation.timeline)
        if record.is_outdated(shard.generation, record.committed):
            return self._free(entry)
        return self.enter(entry)

    def _give_up(self, entry: Entry) -> list[Action]:
        entry.doomed = True
        return self._settled(entry)

    def _settled(self, entry: Entry) -> list[Action]:
        kept = not entry.doomed or entry.pins or entry.lent
        return [] if kept else self._free(entry)

    def _free(self, entry: Entry) -> list[Action]:
        run = entry.header.shard.run
        # Its trainer may still be writing, or has tensors there.
        if entry.table is None or entry.region.assigned:
            return [Discard(run, entry.region)]
        return [Recycle(run, entry.region)]

    # -- looking ----------------------------------------------------------------------------------

    def find(self, shard: ShardId, index: int) -> Entry:
        """The entry, sealed or not; ``NotHeld`` if there is none."""
        entry = self.look(shard.run).find(shard, index)
        if entry is None:
            raise NotHeld(f"node {self.node} has no {_name(index)} of {shard}")
        return entry

    def find_file(self, shard: ShardId, index: int) -> DiskFile:
        """The file on disk; ``NotHeld`` if there is none."""
        file = self.look(shard.run).files.get((shard, index))
        if file is None:
            raise NotHeld(f"node {self.node} has no {_name(index)} of {shard} on disk")
        return file

    def table(self, shard: ShardId) -> bytes:
        """The packed checksum table of a shard of which anything complete is here."""
        record = self.look(shard.run)
        kept: list[Entry | DiskFile] = [*record.entries.values(), *record.files.values()]
        for each in kept:
            if each.header.shard == shard and each.table is not None:
                return pack_table(each.table)
        raise NotHeld(f"node {self.node} has nothing of {shard}")

    def locate_shard(self, shard: ShardId) -> tuple[Region | DiskFile, int, int]:
        """Where the safetensors file lies within a home copy, its offset and length."""
        record = self.look(shard.run)
        entry = record.find(shard, HOME)
        if entry is not None and entry.table is not None:
            return entry.region, SUPERBLOCK_BYTES, entry.header.shard_bytes
        file = record.files.get((shard, HOME))
        if file is not None:
            return file, SUPERBLOCK_BYTES, file.header.shard_bytes
        raise NotHeld(f"node {self.node} has no home copy of {shard}")

    def locate(
        self, shard: ShardId, index: int, *, last: bool = False, early: bool = False
    ) -> tuple[Region | DiskFile, int, int]:
        """Where a fragment lies, its offset and length, also where it is part of a home copy.

        In memory if it is there, else on disk; with ``last`` the other way round, for whoever found
        the first copy damaged. With ``early`` also data of a home copy that is being encoded.
        """
        places = self._places(shard, index, early=early)
        if not places:
            raise NotHeld(f"node {self.node} has no {_name(index)} of {shard}")
        return places[-1 if last else 0]

    def _places(
        self, shard: ShardId, index: int, *, early: bool
    ) -> list[tuple[Region | DiskFile, int, int]]:
        record = self.look(shard.run)
        places: list[tuple[Region | DiskFile, int, int]] = []
        entry = record.find(shard, index)
        if entry is not None and entry.table is not None:
            places.append((entry.region, SUPERBLOCK_BYTES, entry.header.fragment_bytes))
        home = record.find(shard, HOME)
        readable = home is not None and (home.table is not None or (early and home.early))
        if home is not None and readable and index >= 0:
            size_bytes, k = home.header.fragment_bytes, home.header.k
            if index < k:
                places.append((home.region, SUPERBLOCK_BYTES + index * size_bytes, size_bytes))
            elif home.parity is not None and index < home.header.n:
                at = SUPERBLOCK_BYTES + (index - k) * size_bytes
                places.append((home.parity, at, size_bytes))
        file = record.files.get((shard, index))
        if file is not None:
            places.append((file, SUPERBLOCK_BYTES, file.header.fragment_bytes))
        file = record.files.get((shard, HOME))
        if file is not None and 0 <= index < file.header.k:
            size_bytes = file.header.fragment_bytes
            places.append((file, SUPERBLOCK_BYTES + index * size_bytes, size_bytes))
        return places


def _name(index: int) -> str:
    return "home copy" if index == HOME else f"fragment {index}"
