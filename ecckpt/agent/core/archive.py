"""Writing generations from memory to this node's disk: one generation of a run at a time.

The storing of one generation (``Storing``), driven by repeated ``Store`` requests of rank 0:

    Store of a generation --> its entries are lent to the disk: waiting, fragments first
                                  |
                                  v
         +--------------> write one file (at most one for each run)
         |                        |-- written -------> DiskFile entered in the record
         |                        |-- no room -------> old attempts removed, then written once more
         |                        +-- failed --------> problem in ``Stored``
         +-- next file -----------+
    Store of another generation, or forget --> waiting entries are unlent; the current write goes on

Entries are lent to the disk, not pinned. If a newer save needs their memory first, they are taken
back, and ``Stored`` names that as a problem. Saves never wait for the disk.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ecckpt.agent.core.actions import Action, Reply, Warn, Write
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.tasks import TAKEN_BACK, Storing
from ecckpt.agent.records.entry import Entry
from ecckpt.agent.records.run_record import RunRecord
from ecckpt.errors import DiskBudgetTooSmall, DiskFull, InvalidMessage
from ecckpt.protocol.messages.disk import Piece, Retain, Store, Stored
from ecckpt.protocol.messages.node import Done

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile

_PROBLEMS = 8  # kept for each generation


class Archiver:
    """The storing of each run. ``problem`` says why the disk cannot be used; empty if it can."""

    def __init__(self, records: RunRecords, *, problem: str) -> None:
        self._records = records
        self._problem = problem
        self._storing: dict[str, Storing] = {}
        self._writing: dict[str, Entry] = {}  # by run: at most one write each, also if it hangs

    def handle_request(self, message: Store | Retain) -> list[Action]:
        """Handle a ``Store`` or a ``Retain``."""
        return self._store(message) if isinstance(message, Store) else self._retain(message)

    def _store(self, message: Store) -> list[Action]:
        """Begin to store a generation, or answer how far it is."""
        record = self._records.get_or_create(message.run)
        record.check_writer(message.generation.writer)
        if not self._records.disk:
            return [Reply(Stored(False, (), 0, ()))]
        actions: list[Action] = []
        storing = self._storing.get(message.run)
        if storing is None or storing.message.generation != message.generation:
            actions = self._begin_generation(record, message)
        return [Reply(self.stored(message.run)), *actions]

    def stored(self, run: str) -> Stored:
        """How far the generation is whose storing began last."""
        storing = self._storing.get(run)
        if storing is None:
            return Stored(self._records.disk, (), 0, ())
        generation = storing.message.generation
        pieces = tuple(
            Piece(shard.rank, index)
            for shard, index in self._records.get(run).files
            if shard.generation == generation
        )
        left = list(storing.waiting)
        # The file that is being written may belong to the generation before.
        writing = self._writing.get(run)
        if writing is not None and writing.header.shard.generation == generation:
            left.append(writing)
        waiting_bytes = sum(entry.header.file_bytes for entry in left)
        waiting_bytes -= storing.copied_bytes
        return Stored(True, pieces, waiting_bytes, tuple(storing.problems))

    def _retain(self, message: Retain) -> list[Action]:
        """Note which generations are on disk everywhere, then remove superseded files.

        The files are removed when the notes are written (``Core._remembered``). An agent that is
        killed in between has lost no file, and knows the same of the newer generations.
        """
        record = self._records.get_or_create(message.run)
        record.check_writer(message.writer)
        if list(message.generations) != sorted(set(message.generations)) or not message.generations:
            raise InvalidMessage(f"{len(message.generations)} generations, not oldest first")
        record.retain(message.generations)
        noted = self._records.write_notes(record, message)
        return noted or [
            Reply(Done()),
            *self._records.remove(message.run, record.superseded()),
        ]

    def written(self, write: Write, file: DiskFile) -> list[Action]:
        """A file is on disk; it is removed again if the run was forgotten meanwhile."""
        # Entered in any case: ``remove`` takes files out of the record.
        self._records.keep_file(file)
        run = file.header.shard.run
        forgotten = (
            file.header.shard.generation.timeline < self._records.get_or_create(run).forgotten
        )
        gone = self._records.remove(run, [file]) if forgotten else []
        return [*gone, *self._finish_write(write)]

    def failed(self, write: Write, error: Exception) -> list[Action]:
        """A file could not be written. For want of room, remove old attempts and try once more."""
        run, storing = write.entry.header.shard.run, write.storing
        if not write.again and isinstance(error, DiskBudgetTooSmall | DiskFull):
            attempts = self._records.remove(run, self._records.get_or_create(run).attempts())
            if attempts:
                return [*attempts, Write(storing, write.entry, again=True)]
        warned = [] if storing.problems else [Warn(f"storing {write.entry.header.shard}: {error}")]
        self._add_problem(storing, str(error))
        return [*warned, *self._finish_write(write)]

    def stop(self, run: str) -> list[Action]:
        """Unlend what is waiting of a run; a write that is under way goes on."""
        actions: list[Action] = []
        storing = self._storing.get(run)
        while storing is not None and storing.waiting:
            actions += self._records.unlend(storing.waiting.popleft())
        return actions

    def _begin_generation(self, record: RunRecord, message: Store) -> list[Action]:
        actions = self.stop(record.run)
        actions += self._records.remove(record.run, record.discarded(set(message.discard)))
        storing = Storing(message, deque())
        self._storing[record.run] = storing
        if self._problem:
            self._add_problem(storing, self._problem)
            return actions
        storing.waiting.extend(record.to_store(message.generation))
        for entry in storing.waiting:
            self._records.lend(entry)
        return actions + self._write_next(record.run)

    def _write_next(self, run: str) -> list[Action]:
        storing = self._storing[run]
        while storing.waiting and run not in self._writing:
            entry = storing.waiting.popleft()
            if entry.lent:  # else its memory was taken back for a save
                self._writing[run] = entry
                storing.copied_bytes = 0
                return [Write(storing, entry)]
            self._add_problem(storing, TAKEN_BACK)
        return []

    def _finish_write(self, write: Write) -> list[Action]:
        run = write.entry.header.shard.run
        del self._writing[run]
        write.storing.copied_bytes = 0
        return [*self._records.unlend(write.entry), *self._write_next(run)]

    def _add_problem(self, storing: Storing, problem: str) -> None:
        if len(storing.problems) < _PROBLEMS and problem not in storing.problems:
            storing.problems.append(problem)
