"""This node's files on disk, and what is written down there of each run; found again at a start.

Everything here may wait for a disk: only the disk's own thread calls it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ecckpt.agent.core.actions import Remove, Write
from ecckpt.agent.core.archive import TAKEN_BACK
from ecckpt.agent.core.run_record import Entry, RunNotes
from ecckpt.agent.core.tasks import Storing
from ecckpt.agent.runtime.run_state_file import pack_notes, unpack_notes
from ecckpt.agent.runtime.shard_bytes import bad_blocks
from ecckpt.agent.runtime.verify import windows
from ecckpt.agent.storage.disk import FILES, DiskFile, DiskTier, write_small
from ecckpt.agent.storage.volume import Volume
from ecckpt.errors import CorruptFragment, InvalidMessage, NotHeld
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.format.ids import check_name

_log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_NICE = 10
_STATE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DiskInventory:
    """What an earlier process left: notes by run, files, and what is neither, with the reason."""

    notes: dict[str, RunNotes] = field(default_factory=dict)
    files: list[DiskFile] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)


class Disk:
    """Files under ``folder``, which is this node's own."""

    def __init__(self, folder: Path, *, node: str, volume: Volume = FILES) -> None:
        self.folder = folder
        self._node = node
        self._volume = volume
        self._tier: DiskTier | None = None

    @property
    def tier(self) -> DiskTier:
        """The tier, which ``adopt`` makes; ``OSError`` if it could not."""
        if self._tier is None:
            raise OSError(errno.EIO, f"{self.folder} could not be read when the agent started")
        return self._tier

    def adopt(self) -> DiskInventory:
        """Find what is here. What cannot be read is left where it is and named, never deleted."""
        volume = self._volume
        self._tier = DiskTier(self.folder, node=self._node, volume=volume)
        volume.make_folder(self.folder / "runs")
        found = DiskInventory()
        for path in volume.found(self.folder / "runs", ".state"):
            with _guarded(found, path):
                self._check_regular(path)
                raw = volume.read(path, 0, _STATE_LIMIT_BYTES)
                found.notes[check_name("run", path.stem)] = unpack_notes(raw, path.name)
        for path in self._tier.found():
            with _guarded(found, path):
                self._check_regular(path)
                adopted = self._tier.adopt(path)
                check_name("run", adopted.header.shard.run)
                found.files.append(adopted)
        return found

    def write(self, action: Write) -> DiskFile:
        """Write a lent entry; ``NotHeld`` if it is taken back meanwhile.

        ``CorruptFragment`` if it is not right.
        """
        entry = action.entry
        assert entry.table is not None
        budget_bytes = action.storing.message.disk_bytes or self.tier.default_budget_bytes()
        pieces = _pieces(entry, action.storing)
        return self.tier.write(entry.header, pieces, entry.table, budget_bytes=budget_bytes)

    def remove(self, action: Remove) -> None:
        """Remove files; one that cannot be removed is met again at the next start."""
        for file in action.files:
            try:
                self.tier.discard(file)
            except OSError as error:
                _log.warning("could not remove %s: %s", file.path, error)

    def record(self, run: str, notes: RunNotes) -> RunNotes:
        """Write down what must outlive the memory; returns it."""
        write_small(self.folder / "runs" / f"{run}.state", pack_notes(notes), self._volume)
        return notes

    def _check_regular(self, path: Path) -> None:
        if not self._volume.is_file(path):
            raise InvalidMessage(f"{path.name} is no regular file")


def lower_priority() -> None:
    """Make the calling thread one that lets others go first, on the processor and on the disk."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _pieces(entry: Entry, storing: Storing) -> Iterator[memoryview]:
    """The payload, copied piece by piece: at no time does the disk hold the memory itself.

    And proven: what has rotted in memory must not count as stored. ``CorruptFragment`` then.
    """
    header, table = entry.header, entry.table
    assert table is not None
    buffer = memoryview(bytearray(max(_PIECE_BYTES, header.block_bytes)))
    for index, rows, offset, length in windows(header, _PIECE_BYTES):
        piece, start = buffer[:length], SUPERBLOCK_BYTES + offset
        piece[:] = entry.region.view[start : start + length]
        if not entry.lent:  # looked at after copying: what was copied may be another file's
            raise NotHeld(TAKEN_BACK)
        if bad := bad_blocks(header, index, piece, table, rows):
            raise CorruptFragment(
                f"{header.shard}: {len(bad)} blocks of fragment {index} fail their CRC32C in memory"
            )
        yield piece
        storing.copied_bytes = offset + length


@contextmanager
def _guarded(found: DiskInventory, path: Path) -> Iterator[None]:
    """What cannot be adopted is left where it is and named, never deleted, never fatal."""
    try:
        yield
    except Exception as error:
        found.rejected[f"disk/{path.name}"] = str(error)
        _log.warning("not adopted: %s: %s", path, error)
