"""Files of this node: regions, and what is written down of each run; found again after a kill.

Does what the core decides. The only user of a tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ecckpt.agent.core.actions import Allocate, Borrow, Discard, Recycle
from ecckpt.agent.core.run_record import Entry, RunNotes
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.runtime.run_state_file import pack_notes, unpack_notes
from ecckpt.agent.storage.memory_tier import MemoryTier
from ecckpt.agent.storage.regions import Region, Tmpfs, TmpfsFiles
from ecckpt.errors import CorruptFragment, InvalidMessage
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES, parse_superblock, parse_table

_log = logging.getLogger(__name__)

_STATE_LIMIT_BYTES = 1 << 20  # roll-backs, and all generations that stay on disk


class Shelf:
    """The files under ``root``. Notes of a run are written by one thread at a time."""

    def __init__(self, root: Path, *, node: str, files: Tmpfs | None = None) -> None:
        self._files = files or TmpfsFiles()
        self.tier = MemoryTier(root, node=node, files=self._files)
        self._states = root / "runs"
        self._files.make_folder(self._states)

    def allocate(self, action: Allocate) -> Region:
        """A region whose superblock is void; raises as the tier does."""
        budget_bytes = action.budget_bytes or self.tier.default_budget_bytes()
        return self.tier.allocate(
            action.run, action.size_bytes, budget_bytes=budget_bytes, what=action.what
        )

    def borrow(self, action: Borrow) -> None:
        """A region for a task if one is spare, as ``allocate`` gives it."""
        header = action.taking.message.header
        action.taking.region = self.tier.take_spare(header.shard.run, header.file_bytes)

    def let_go(self, action: Recycle | Discard) -> None:
        """Keep a region for the next taker, or give it back."""
        if isinstance(action, Recycle):
            self.tier.recycle(action.run, action.region)
        else:
            self.tier.discard(action.run, action.region)

    def remember(self, run: str, notes: RunNotes) -> RunNotes:
        """Write down what must outlive the process; returns it. ``OSError`` if that failed."""
        path = self._states / f"{run}.state"
        draft = path.with_suffix(".draft")
        with self._files.draft(draft) as file:
            file.write(pack_notes(notes))
        self._files.rename(draft, path)
        return notes

    # -- what an earlier process left -------------------------------------------------------------

    def adopt(self, ledgers: RunRecords) -> None:
        """Enter what is found here into the ledgers.

        What cannot be adopted is left where it is and named in ``rejected``, never deleted, never
        fatal. Only notes that the system does not let us read now are an ``OSError``: without the
        fence that is on file older writers would be let in, and the file would be written anew.
        """

        def guarded(
            path: Path,
            adopt: Callable[[Path, RunRecords], None],
            fatal: tuple[type[Exception], ...],
        ) -> None:
            try:
                if not self._files.is_file(path):
                    raise InvalidMessage(f"{path.name} is no regular file")
                adopt(path, ledgers)
            except fatal:
                raise
            except Exception as error:
                ledgers.rejected[path.name] = str(error)
                _log.warning("not adopted: %s: %s", path, error)

        for path in self._files.found(self._states, ".state"):
            guarded(path, self._adopt_state, (OSError,))
        for path in self.tier.found():
            guarded(path, self._adopt_region, ())

    def _adopt_state(self, path: Path, ledgers: RunRecords) -> None:
        notes = unpack_notes(self._files.read(path, 0, _STATE_LIMIT_BYTES), path.name)
        ledger = ledgers.of(path.stem)
        ledger.believe(notes)
        ledger.noted = notes

    def _adopt_region(self, path: Path, ledgers: RunRecords) -> None:
        files = self._files
        superblock = files.read(path, 0, SUPERBLOCK_BYTES)
        header = parse_superblock(superblock, path.name)
        if header is None and not any(superblock):
            # Spare, or never finished: and then its writer may still have it mapped.
            files.remove(path)
            return
        if header is None:
            raise CorruptFragment(f"{path.name}: begins like no file of ours")
        if files.size_bytes(path) < header.file_bytes:  # before believing its numbers
            raise CorruptFragment(f"{path.name}: cut off, {header.file_bytes} bytes expected")
        trailer = files.read(path, header.trailer_offset, header.trailer_bytes)
        table = parse_table(trailer, header, path.name)
        run = header.shard.run
        ledgers.of(run)  # before anything is counted for a run that cannot be
        for action in ledgers.adopt(Entry(header, self.tier.adopt(run, path), table)):
            assert isinstance(action, Recycle | Discard)
            self.let_go(action)
