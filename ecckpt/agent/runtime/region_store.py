"""The agent's files in tmpfs: regions, and the state file of each run; adopted after a restart.

Performs what the core decides. It is the only user of storage/regions.py in the agent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ecckpt.agent.core.actions import Allocate, Borrow, Discard, FilesRemoved, Recycle
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.records.entry import Entry
from ecckpt.agent.records.run_notes import RunNotes
from ecckpt.agent.runtime.run_state_file import pack_notes, unpack_notes
from ecckpt.agent.storage.memory_tier import MemoryTier
from ecckpt.agent.storage.region import Region
from ecckpt.agent.storage.regions import Tmpfs, TmpfsFiles
from ecckpt.errors import CorruptFragment, InvalidMessage
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES, parse_superblock, parse_table

_log = logging.getLogger(__name__)

_STATE_LIMIT_BYTES = 1 << 20  # roll-backs and stored generations make it long


class RegionStore:
    """The files under ``root``. Only one thread at a time writes the state of a run."""

    def __init__(self, root: Path, *, node: str, files: Tmpfs | None = None) -> None:
        self._files = files or TmpfsFiles()
        self.tier = MemoryTier(root, node=node, files=self._files)
        self._states = root / "runs"
        self._files.make_folder(self._states)
        self._files.keep_room(self._states)
        self._written: set[str] = set()  # runs that should have a state file

    def allocate(self, action: Allocate) -> Region:
        """A region whose superblock is void; raises what the tier raises."""
        budget_bytes = action.budget_bytes or self.tier.default_budget_bytes()
        return self.tier.allocate(
            action.run, action.size_bytes, budget_bytes=budget_bytes, what=action.what
        )

    def borrow(self, action: Borrow) -> None:
        """Give the task a spare region that fits, if there is one."""
        header = action.taking.message.header
        action.taking.region = self.tier.take_spare(header.shard.run, header.file_bytes)

    def let_go(self, action: Recycle | Discard) -> None:
        """Recycle a region for the next allocation, or unlink it."""
        if isinstance(action, Recycle):
            self.tier.recycle(action.run, action.region)
        else:
            self.tier.discard(action.run, action.region)

    def remember(self, run: str, notes: RunNotes) -> RunNotes:
        """Write the notes of a run to its state file; returns them. ``OSError`` if that failed.

        The rename replaces the file as a whole, so an agent that is killed here leaves the old
        notes or the new ones. Neither is flushed: tmpfs survives a process, and does not survive a
        loss of power anyway.
        """
        self._files.remake_folder(self._states)
        path = self._states / f"{run}.state"
        draft = path.with_suffix(".draft")
        packed = pack_notes(notes)
        with self._files.draft_notes(draft, len(packed)) as file:
            file.write(packed)
        self._files.rename(draft, path)
        self._files.keep_room(self._states)
        self._written.add(run)
        return notes

    def find_removed(self) -> FilesRemoved | None:
        """What was removed behind the agent since the last call; None if nothing was."""
        try:
            names = self._files.names(self._states)
            regions = self.tier.find_removed()
        except OSError:  # no descriptor is free, for example: the next call looks again
            return None
        runs = frozenset(run for run in self._written if f"{run}.state" not in names)
        self._written -= runs  # told once; they count again when they are written again
        return FilesRemoved(runs) if regions or runs else None

    # -- what an earlier process left -------------------------------------------------------------

    def adopt(self, records: RunRecords) -> None:
        """Enter what is found here into the records.

        A file that cannot be adopted is named in ``rejected``. It is never deleted, and it does not
        stop the agent. The one exception is a state file that the system cannot read now: that is
        an ``OSError``, because without its fence older writers would be admitted, and the file
        would be overwritten.
        """

        def guarded(
            path: Path,
            adopt: Callable[[Path, RunRecords], None],
            fatal: tuple[type[Exception], ...],
        ) -> None:
            try:
                if not self._files.is_file(path):
                    raise InvalidMessage(f"{path.name} is not a regular file")
                adopt(path, records)
            except fatal:
                raise
            except Exception as error:
                records.reject(path.name, str(error))
                _log.warning("not adopted: %s: %s", path, error)

        for path in self._files.found(self._states, ".state"):
            guarded(path, self._adopt_state, (OSError,))
        for path in self.tier.found():
            guarded(path, self._adopt_region, ())

    def _adopt_state(self, path: Path, records: RunRecords) -> None:
        notes = unpack_notes(self._files.read(path, 0, _STATE_LIMIT_BYTES), path.name)
        record = records.get_or_create(path.stem)
        record.believe(notes)
        record.noted = notes
        self._written.add(path.stem)

    def _adopt_region(self, path: Path, records: RunRecords) -> None:
        files = self._files
        superblock = files.read(path, 0, SUPERBLOCK_BYTES)
        header = parse_superblock(superblock, path.name)
        if header is None and not any(superblock):
            # A spare region, or a slot that was never sealed. It is not recycled, because the
            # trainer of an unsealed slot may still have it mapped.
            files.remove(path)
            return
        if header is None:
            raise CorruptFragment(f"{path.name}: does not begin like an ecckpt file")
        if files.size_bytes(path) < header.file_bytes:  # before trusting its sizes
            raise CorruptFragment(f"{path.name}: cut off, {header.file_bytes} bytes expected")
        trailer = files.read(path, header.trailer_offset, header.trailer_bytes)
        table = parse_table(trailer, header, path.name)
        run = header.shard.run
        records.get_or_create(
            run
        )  # raises for an invalid name, before any memory is counted for it
        for action in records.adopt(
            Entry(header=header, region=self.tier.adopt(run, path), table=table)
        ):
            assert isinstance(action, Recycle | Discard)
            self.let_go(action)
