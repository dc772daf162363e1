"""The records of all runs of one agent, and the files that enter and leave them.

This is the only code that changes a ``RunRecord``'s entries. What has to happen to files comes back
as actions, in the order in which the driver must perform them. Used by all parts of the core.
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
    Warn,
)
from ecckpt.agent.records.entry import Entry
from ecckpt.agent.records.places import places_of, shard_place_of
from ecckpt.agent.records.rejected_files import RejectedFiles
from ecckpt.agent.records.run_notes import RunNotes
from ecckpt.agent.records.run_record import RunRecord
from ecckpt.errors import InvalidMessage, NotHeld, TwoHistories
from ecckpt.format.fragment_file import HOME, Header, pack_table
from ecckpt.format.ids import Generation, RunWriter, ShardId, check_run, is_run
from ecckpt.policy.survival import UNREAD_DISK, UNREADABLE_DISK

if TYPE_CHECKING:
    from ecckpt.agent.core.tasks import DiskInventory
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.agent.storage.region import Region


class RunRecords:
    """The records by run, and ``rejected``: files of unknown runs that were not adopted, and why.

    ``disk``: whether the node has a disk.
    """

    def __init__(self, node: str, *, disk: bool = False) -> None:
        self.node = node
        self.disk = disk
        self._lent: list[Entry] = []
        self._rejected = RejectedFiles()
        self.rejected = self._rejected.everywhere
        self._runs: dict[str, RunRecord] = {}

    def runs(self) -> list[str]:
        """Names of all runs that this node knows."""
        return sorted(self._runs.keys() | self._rejected.runs())

    def reject(self, name: str, why: str) -> None:
        """Note that a file was not adopted. It concerns the run in its name, else every run."""
        self._rejected.add(name, why)

    def get_or_create(self, run: str) -> RunRecord:
        """The record of a run, to change it; created if the run is not known yet."""
        if run not in self._runs:
            check_run(run)
            rejected = self._rejected.for_run(run, kept=True)
            self._runs[run] = RunRecord(run=run, rejected=rejected)
        return self._runs[run]

    def get(self, run: str) -> RunRecord:
        """The record of a run, to read it; an empty one, not kept, if the run is not known.

        A name without identity finds the run that has this name. Raises ``TwoHistories`` if
        several have it.
        """
        full = self.full_name(run)
        return self._runs.get(full) or RunRecord(run=full, rejected=self._rejected.for_run(full))

    def full_name(self, run: str) -> str:
        """The full name of the run that is meant; ``run`` itself if none is known."""
        if run in self._runs:
            return run
        known = self.identities(run)
        if len(known) > 1:
            raise TwoHistories(run, dict.fromkeys(known, f"node {self.node}"))
        others = [each for each in self.runs() if is_run(each, run)]
        return next(iter(known or others), run)

    def identities(self, run: str) -> tuple[str, ...]:
        """Full names of the runs that are meant, of those that have or had a generation here."""
        records = [record for name, record in self._runs.items() if is_run(name, run)]
        return tuple(sorted(each.run for each in records if each.knows_generations))

    # -- writers ----------------------------------------------------------------------------------

    def admit(self, run: str, writer: RunWriter, header: Header | None = None) -> list[Action]:
        """Admit a writer of that timeline, or raise ``Fenced``.

        If the timeline is new here, the unsealed slots of older writers are dropped. ``header``
        describes what the writer is about to save; its ``parent`` tells what the timeline
        continues.
        """
        record = self.get_or_create(run)
        newer = record.admit(writer)
        if header is not None:
            record.learn_from(header)
        return (self.clear(run) if newer else []) + self.write_notes(record)

    def reach(self, run: str, timeline: int) -> list[Action]:
        """A peer serves a newer timeline: fence this node's writers, that must end, too."""
        record = self.get_or_create(run)
        return [*self.clear(run), *self.write_notes(record)] if record.reach(timeline) else []

    def write_notes(self, record: RunRecord, request: Noted | None = None) -> list[Action]:
        """Have the run's notes written to tmpfs if they changed; then ``request`` is answered."""
        return [] if record.notes == record.noted else [Remember(record.run, request)]

    def copy_notes_to_disk(self, record: RunRecord) -> list[Action]:
        """Have the written notes copied to disk, if their lasting part differs there."""
        same = record.noted.lasting == record.recorded
        if same or record.recording or not self.disk:
            return []
        record.recording = True
        return [Record(record.run)]

    def notes_copied(self, run: str, notes: RunNotes | None) -> list[Action]:
        """End a copy of notes to disk; ``notes`` is None if it failed.

        After a failure the notes are copied with the next change; after a success at once, if they
        changed meanwhile.
        """
        record = self.get_or_create(run)
        record.recording = False
        if notes is None:
            return []
        record.recorded = notes
        return self.copy_notes_to_disk(record)

    # -- files ------------------------------------------------------------------------------------

    def enter(self, entry: Entry) -> list[Action]:
        """Enter a file, sealed or staged; the file that it replaces is dropped."""
        entries = self.get_or_create(entry.header.shard.run).entries
        older = entries.pop(entry.key, None)
        entries[entry.key] = entry
        return [] if older is None else self._give_up(older)

    def retire(self, entries: Iterable[Entry]) -> list[Action]:
        """Drop entries."""
        actions: list[Action] = []
        for entry in list(entries):
            self._runs[entry.header.shard.run].entries.pop(entry.key, None)
            actions += self._give_up(entry)
        return actions

    def reserve(self, header: Header, region: Region) -> list[Action]:
        """Note the slot for a rank's next save; the slot that it had reserved before is dropped."""
        run, rank = header.shard.run, header.shard.rank
        older = self.get_or_create(run).unused(rank)
        self.get_or_create(run).reserved[rank] = region, header
        return [Discard(run, each) for each in older]

    def stage(self, header: Header, name: str) -> list[Action]:
        """Enter the shard that a rank has put into its reserved slot; see ``take_slot``."""
        region = self.get_or_create(header.shard.run).take_slot(header, name)
        return self.enter(Entry(header=header, region=region, table=None))

    def clear(self, run: str, rank: int | None = None) -> list[Action]:
        """Drop the slots that a rank (None: every rank) reserved, or staged and never sealed."""
        record = self.get_or_create(run)
        # Discard, not recycle: the trainers may still have the slots mapped and write to them.
        unused: list[Action] = [Discard(run, region) for region in record.unused(rank)]
        return unused + self.retire(record.unfinished(rank))

    def drop_removed(self, states: Iterable[str]) -> list[Action]:
        """Drop what lies in regions that were removed, and write these runs' notes again.

        Such an entry is lost although it is still mapped here: no peer can pull it, and the next
        agent would not find it. Home copies that a job has pinned go when the job has ended.
        """
        actions: list[Action] = []
        for run, record in self._runs.items():
            lost = [entry for entry in record.entries.values() if entry.region.removed]
            slots = [rank for rank, (each, _) in record.reserved.items() if each.removed]
            if lost or slots:
                text = f"run {run}: {len(lost)} files and {len(slots)} slots were removed by "
                actions.append(Warn(f"{text}another process (RemoveIPC of logind, a cleaner?)"))
            actions += [Discard(run, record.reserved.pop(rank)[0]) for rank in slots]
            actions += self.retire(lost)
        return [*actions, *(Remember(run) for run in sorted(states))]

    def unused(self) -> list[Action]:
        """Drop all slots of all runs that were reserved and not staged."""
        return [Discard(run, each) for run in self._runs for each in self._runs[run].unused()]

    def discard(self, run: str, rank: int, generations: Iterable[Generation]) -> list[Action]:
        """Drop a rank's files of generations that the rank gave up."""
        return self.retire(self.get_or_create(run).given_up(rank, set(generations)))

    def revoke(self, run: str, generation: Generation) -> list[Action]:
        """Drop a generation in memory that its writer will not commit, of all ranks.

        Raises ``Fenced``, and ``InvalidMessage`` if it is committed.
        """
        record = self.get(run)
        record.check_writer(generation.writer)
        if record.committed is not None and record.committed >= generation:
            raise InvalidMessage(f"{generation} is committed, as far as {record.committed} is")
        shards = record.entries.items()
        return self.retire([each for (at, _), each in shards if at.generation == generation])

    def forget(self, run: str) -> list[Action]:
        """Drop all files of a run. A pinned entry is given up when its last pin goes."""
        record = self.get_or_create(run)
        record.forget()
        return [
            *self.clear(run),
            *self.retire(record.entries.values()),
            *self.remove(run, record.files.values()),
            Release(run),
        ]

    def unpin(self, entry: Entry) -> list[Action]:
        """Release one pin of an entry."""
        entry.pins -= 1
        return self._settled(entry)

    def lend(self, entry: Entry) -> None:
        """Keep an entry for the disk until it is written, or memory is short."""
        entry.lent = True
        self._lent.append(entry)

    def unlend(self, entry: Entry) -> list[Action]:
        """The write of an entry has ended; nothing follows if the entry was taken back before."""
        if not entry.lent:
            return []
        entry.lent = False
        self._lent.remove(entry)
        return self._settled(entry)

    def recall(self, run: str | None, size_bytes: int) -> list[Action]:
        """Take back entries that only a pending write keeps, until ``size_bytes`` are free.

        Of one run, or of all for None. The entry that would be written last goes first. A write
        that has begun notices after its current piece and fails.
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
        """Enter a complete file on disk."""
        shard = file.header.shard
        record = self.get_or_create(shard.run)
        record.reach(shard.generation.timeline)
        record.files[shard, file.header.index] = file
        record.damaged.pop((shard, file.header.index), None)

    def await_disk(self) -> None:
        """Note that the disk is still being read.

        It is named in ``rejected``, so that no restore treats files that are not read yet as lost.
        """
        self.rejected[UNREAD_DISK] = "still being read"

    @property
    def awaits_disk(self) -> bool:
        """Whether the disk is still being read."""
        return UNREAD_DISK in self.rejected

    def lose_disk(self, why: str) -> None:
        """Note that the disk cannot be read."""
        self.rejected.pop(UNREAD_DISK, None)
        self.rejected[UNREADABLE_DISK] = why

    def adopt_disk(self, found: DiskInventory) -> None:
        """Enter the files and notes that an earlier process left on disk."""
        self.rejected.pop(UNREAD_DISK, None)
        for name, why in found.rejected.items():
            self.reject(name, why)
        for run, notes in found.notes.items():
            record = self.get_or_create(run)
            record.believe(notes)
            record.recorded = notes
        for file in found.files:
            self.keep_file(file)

    def files(self) -> list[DiskFile]:
        """Files on disk of all runs, the oldest generation first."""
        found = [file for record in self._runs.values() for file in record.files.values()]
        return sorted(found, key=lambda file: file.header.shard.generation)

    def has_file(self, file: DiskFile) -> bool:
        """Whether this is still the file of its fragment on disk."""
        key = file.header.shard, file.header.index
        return self.get(file.header.shard.run).files.get(key) is file

    def note_damage(self, file: DiskFile, why: str) -> bool:
        """Note that a file on disk was found bad; True if that is new."""
        record, key = (
            self.get_or_create(file.header.shard.run),
            (file.header.shard, file.header.index),
        )
        if record.files.get(key) is not file or record.damaged.get(key) == why:
            return False
        record.damaged[key] = why
        return True

    def remove(self, run: str, files: Iterable[DiskFile]) -> list[Action]:
        """Remove files from disk; they leave the record at once."""
        gone = tuple(files)
        for file in gone:
            key = (file.header.shard, file.header.index)
            del self._runs[run].files[key]
            self._runs[run].damaged.pop(key, None)
        return [Remove(gone)] if gone else []

    def adopt(self, entry: Entry) -> list[Action]:
        """Enter a complete file that an earlier process left in memory.

        Its generation proves that its timeline began. If a commit that the notes know of has
        outdated it, the earlier process was killed before it could drop the file: it is dropped
        now.
        """
        shard = entry.header.shard
        record = self.get_or_create(shard.run)
        record.reach(shard.generation.timeline)
        if record.is_outdated(shard.generation, record.committed):
            return self._free(entry)
        return self.enter(entry)

    def _give_up(self, entry: Entry) -> list[Action]:
        entry.doomed = True
        return self._settled(entry)

    def _settled(self, entry: Entry) -> list[Action]:
        """Free a doomed entry once it has neither a pin nor a pending write."""
        kept = not entry.doomed or entry.pins or entry.lent
        return [] if kept else self._free(entry)

    def _free(self, entry: Entry) -> list[Action]:
        run = entry.header.shard.run
        # Never recycle a region that a trainer may still write to, or that has tensors in it.
        if entry.table is None or entry.region.assigned or entry.region.removed:
            return [Discard(run, entry.region)]
        return [Recycle(run, entry.region)]

    # -- looking ----------------------------------------------------------------------------------

    def find(self, shard: ShardId, index: int) -> Entry:
        """The entry, sealed or not; ``NotHeld`` if there is none."""
        entry = self.get(shard.run).find(shard, index)
        if entry is None:
            raise NotHeld(f"node {self.node} has no {_name(index)} of {shard}")
        return entry

    def find_file(self, shard: ShardId, index: int) -> DiskFile:
        """The file on disk; ``NotHeld`` if there is none."""
        file = self.get(shard.run).files.get((shard, index))
        if file is None:
            raise NotHeld(f"node {self.node} has no {_name(index)} of {shard} on disk")
        return file

    def table(self, shard: ShardId) -> bytes:
        """The packed checksum table of a shard of which any complete file is here."""
        record = self.get(shard.run)
        kept: list[Entry | DiskFile] = [*record.entries.values(), *record.files.values()]
        for each in kept:
            if each.header.shard == shard and each.table is not None:
                return pack_table(each.table)
        raise NotHeld(f"node {self.node} has nothing of {shard}")

    def locate_shard(self, shard: ShardId) -> tuple[Region | DiskFile, int, int]:
        """Where the safetensors file lies within a home copy: the file, offset and length."""
        place = shard_place_of(self.get(shard.run), shard)
        if place is None:
            raise NotHeld(f"node {self.node} has no home copy of {shard}")
        return place

    def locate(
        self, shard: ShardId, index: int, *, last: bool = False, early: bool = False
    ) -> tuple[Region | DiskFile, int, int]:
        """Where a fragment lies, alone or as part of a home copy: the file, offset and length.

        The copy in memory is preferred. With ``last`` the last choice is returned instead, for a
        reader that found the first damaged: memory may have rotted where the disk has not. With
        ``early``, data of a home copy that is being encoded is served as well.
        """
        places = places_of(self.get(shard.run), shard, index, early=early)
        if not places:
            raise NotHeld(f"node {self.node} has no {_name(index)} of {shard}")
        return places[-1 if last else 0]


def _name(index: int) -> str:
    return "home copy" if index == HOME else f"fragment {index}"
