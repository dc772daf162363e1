"""The agent's files in tmpfs: regions, and the state file of each run; adopted after a restart.

Performs what the core decides. It is the only user of storage/regions.py in the agent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ecckpt.agent.core.actions import Allocate, Borrow, Discard, Recycle
from ecckpt.agent.core.run_record import Entry, RunNotes
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.runtime.run_state_file import pack_notes, unpack_notes
from ecckpt.agent.storage.regions import MemoryTier, Region
from ecckpt.errors import CorruptFragment, InvalidMessage
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES, parse_superblock, parse_table

_log = logging.getLogger(__name__)

_STATE_LIMIT_BYTES = 1 << 20  # roll-backs and stored generations make it long


class RegionStore:
    """The files under ``root``. Only one thread at a time writes the state of a run."""

    def __init__(self, root: Path, *, node: str) -> None:
        self.tier = MemoryTier(root, node=node)
        self._states = root / "runs"
        self._states.mkdir(mode=0o700, exist_ok=True)

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
        path = self._states / f"{run}.state"
        draft = path.with_suffix(".draft")
        draft.write_bytes(pack_notes(notes))
        draft.replace(path)
        return notes

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
                if not path.is_file():
                    raise InvalidMessage(f"{path.name} is not a regular file")
                adopt(path, records)
            except fatal:
                raise
            except Exception as error:
                records.rejected[path.name] = str(error)
                _log.warning("not adopted: %s: %s", path, error)

        for path in sorted(self._states.glob("*.state")):
            guarded(path, self._adopt_state, (OSError,))
        for path in self.tier.found():
            guarded(path, self._adopt_region, ())

    def _adopt_state(self, path: Path, records: RunRecords) -> None:
        with path.open("rb") as file:
            notes = unpack_notes(file.read(_STATE_LIMIT_BYTES), path.name)
        record = records.of(path.stem)
        record.believe(notes)
        record.noted = notes

    def _adopt_region(self, path: Path, records: RunRecords) -> None:
        with path.open("rb") as file:
            superblock = file.read(SUPERBLOCK_BYTES)
            header = parse_superblock(superblock, path.name)
            if header is None and not any(superblock):
                # A spare region, or a slot that was never sealed. It is not recycled, because the
                # trainer of an unsealed slot may still have it mapped.
                path.unlink()
                return
            if header is None:
                raise CorruptFragment(f"{path.name}: does not begin like an ecckpt file")
            if path.stat().st_size < header.file_bytes:  # before trusting its sizes
                raise CorruptFragment(f"{path.name}: cut off, {header.file_bytes} bytes expected")
            file.seek(header.trailer_offset)
            table = parse_table(file.read(header.trailer_bytes), header, path.name)
        run = header.shard.run
        records.of(run)  # raises for an invalid name, before any memory is counted for it
        for action in records.adopt(Entry(header, self.tier.adopt(run, path), table)):
            assert isinstance(action, Recycle | Discard)
            self.let_go(action)
