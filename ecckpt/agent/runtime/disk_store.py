"""This node's files on disk, and the state file of each run there; adopted after a restart.

Every call may wait for the disk, so only the disk's own thread makes them (runtime/driver.py).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ecckpt.agent.core.actions import Remove, Write
from ecckpt.agent.core.tasks import TAKEN_BACK, DiskInventory, Storing
from ecckpt.agent.records.entry import Entry
from ecckpt.agent.records.run_notes import RunNotes
from ecckpt.agent.runtime.run_state_file import pack_notes, unpack_notes
from ecckpt.agent.runtime.shard_bytes import bad_blocks
from ecckpt.agent.runtime.verify import windows
from ecckpt.agent.storage.disk import FILES, DiskFile, DiskTier, write_small
from ecckpt.agent.storage.volume import Volume
from ecckpt.errors import CorruptFragment, InvalidMessage, NotHeld
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.format.ids import check_run

_log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_NICE = 10
_STATE_LIMIT_BYTES = 1 << 20  # as in region_store.py


class Disk:
    """Files under ``folder``, which belongs to this node alone."""

    def __init__(self, folder: Path, *, node: str, volume: Volume = FILES) -> None:
        self.folder = folder
        self._node = node
        self._volume = volume
        self._tier: DiskTier | None = None

    @property
    def tier(self) -> DiskTier:
        """The tier that ``adopt`` made; ``OSError`` if that failed."""
        if self._tier is None:
            raise OSError(errno.EIO, f"{self.folder} could not be read when the agent started")
        return self._tier

    def adopt(self) -> DiskInventory:
        """Find what is here. Files that cannot be read are left alone and named, never deleted."""
        volume = self._volume
        self._tier = DiskTier(self.folder, node=self._node, volume=volume)
        volume.make_folder(self.folder / "runs")
        found = DiskInventory()
        for path in volume.found(self.folder / "runs", ".state"):
            with _guarded(found, path):
                self._check_regular(path)
                raw = volume.read(path, 0, _STATE_LIMIT_BYTES)
                found.notes[check_run(path.stem)] = unpack_notes(raw, path.name)
        for path in self._tier.found():
            with _guarded(found, path):
                self._check_regular(path)
                adopted = self._tier.adopt(path)
                check_run(adopted.header.shard.run)
                found.files.append(adopted)
        return found

    def write(self, action: Write) -> DiskFile:
        """Write a lent entry; on return the file survives a loss of power.

        Raises ``NotHeld`` if the entry is taken back meanwhile, ``CorruptFragment`` if its bytes in
        memory do not match its table.
        """
        entry = action.entry
        assert entry.table is not None
        budget_bytes = action.storing.message.disk_bytes or self.tier.default_budget_bytes()
        pieces = _pieces(entry, action.storing)
        return self.tier.write(entry.header, pieces, entry.table, budget_bytes=budget_bytes)

    def remove(self, action: Remove) -> None:
        """Remove files. One that cannot be removed is adopted again at the next start."""
        for file in action.files:
            try:
                self.tier.discard(file)
            except OSError as error:
                _log.warning("could not remove %s: %s", file.path, error)

    def record(self, run: str, notes: RunNotes) -> RunNotes:
        """Write the lasting notes of a run to its state file; returns them."""
        write_small(self.folder / "runs" / f"{run}.state", pack_notes(notes), self._volume)
        return notes

    def _check_regular(self, path: Path) -> None:
        if not self._volume.is_file(path):
            raise InvalidMessage(f"{path.name} is not a regular file")


def lower_priority() -> None:
    """Let other threads go before the calling one, on the processor and on the disk."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _pieces(entry: Entry, storing: Storing) -> Iterator[memoryview]:
    """The payload of an entry, copied and verified piece by piece.

    Copied, because the disk must never refer to memory that may be recycled at any moment.
    Verified, because a block that has rotted in memory must not count as stored.
    """
    header, table = entry.header, entry.table
    assert table is not None
    buffer = memoryview(bytearray(max(_PIECE_BYTES, header.block_bytes)))
    for index, rows, offset, length in windows(header, _PIECE_BYTES):
        piece, start = buffer[:length], SUPERBLOCK_BYTES + offset
        piece[:] = entry.region.view[start : start + length]
        # Checked after the copy: if the entry was taken back before or during the copy, the bytes
        # may be those of another file. If it is taken back later, the copy is still right.
        if not entry.lent:
            raise NotHeld(TAKEN_BACK)
        if bad := bad_blocks(header, index, piece, table, rows):
            raise CorruptFragment(
                f"{header.shard}: {len(bad)} blocks of fragment {index} fail their CRC32C in memory"
            )
        yield piece
        storing.copied_bytes = offset + length


@contextmanager
def _guarded(found: DiskInventory, path: Path) -> Iterator[None]:
    """Leave what cannot be adopted where it is and name it in ``rejected``."""
    try:
        yield
    except Exception as error:
        found.rejected[f"disk/{path.name}"] = str(error)
        _log.warning("not adopted: %s: %s", path, error)
