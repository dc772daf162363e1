"""The disk tier: complete files of docs/FORMAT.md under a folder, or none.

How a file is written; a crash or a loss of power may come between any two steps:

    draft created and allocated          left over: removed at the next start
      |  superblock, payload, table      data flushed every _FLUSH_BYTES
      |  flush the file                  all bytes are on disk, under a name that does not count
      |  rename to the final name        the file is whole if it has this name
      v  flush the folder                the name survives a loss of power: only now it is reported

Files are never modified. Names are for people; only the superblock says what a file is. Used by
runtime/disk_store.py, and by simulations over a simulated file system.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ecckpt.agent.storage.volume import FileSystem, Volume
from ecckpt.errors import CorruptFragment, DiskBudgetTooSmall, DiskFull
from ecckpt.format.fragment_file import (
    HOME,
    SUPERBLOCK_BYTES,
    Header,
    pack_superblock,
    pack_table,
    parse_superblock,
    parse_table,
)
from ecckpt.memory.buffers import Buffer

_SUFFIX = ".ecckpt"
_DRAFT_SUFFIX = ".draft"
# Flushed this often: one flush of everything at the end would block other writers of the machine.
_FLUSH_BYTES = 64 << 20

FILES = FileSystem()


@dataclass(frozen=True, eq=False, slots=True)
class DiskFile:
    """A complete file of the tier. ``table`` is uint32 (n, rows)."""

    path: Path
    header: Header
    table: np.ndarray

    @property
    def size_bytes(self) -> int:
        """What the file counts for in its run's budget."""
        return self.header.file_bytes


class DiskTier:
    """All files of one agent on disk, by run.

    Only one thread calls ``write`` and ``discard``; any thread may call the others. Every method
    may raise ``OSError``, because a disk may fail at any time.
    """

    def __init__(self, folder: Path, *, node: str, volume: Volume = FILES) -> None:
        self._node = node
        self._volume = volume
        self.folder = folder / "files"
        volume.make_folder(self.folder)
        self._lock = threading.Lock()
        self._used_bytes: dict[str, int] = defaultdict(int)
        for draft in volume.found(self.folder, _DRAFT_SUFFIX):  # from an earlier agent
            volume.remove(draft)

    def default_budget_bytes(self) -> int:
        """Half of the file system: what a run may use unless it says otherwise."""
        return self._volume.room(self.folder)[0] // 2

    def used_bytes(self, run: str) -> int:
        """Bytes of the run's files."""
        with self._lock:
            return self._used_bytes[run]

    def check_room(self, header: Header, *, budget_bytes: int) -> None:
        """Raise ``DiskBudgetTooSmall`` or ``DiskFull`` if there is no room for a file."""
        run, what = header.shard.run, f"{_piece(header)} of {header.shard}"
        need_bytes = self.used_bytes(run) + header.file_bytes
        if need_bytes > budget_bytes:
            raise DiskBudgetTooSmall(
                self._node, need_bytes=need_bytes, have_bytes=budget_bytes, what=what
            )
        free_bytes = self._free_bytes()
        if free_bytes < header.file_bytes:
            raise DiskFull(str(self.folder), need_bytes=header.file_bytes, free_bytes=free_bytes)

    def write(
        self, header: Header, payload: Iterable[Buffer], table: np.ndarray, *, budget_bytes: int
    ) -> DiskFile:
        """Write a file; on return it survives a loss of power.

        ``payload`` yields the payload in pieces, each written before the next is asked for; an
        error that it raises passes through. Raises ``DiskBudgetTooSmall`` or ``DiskFull``, before
        anything is written if that can be known, and any other ``OSError`` of the disk. After an
        error the file is not there.
        """
        self.check_room(header, budget_bytes=budget_bytes)
        path = self.folder / _name(header)
        draft = self.folder / f"{secrets.token_hex(8)}{_DRAFT_SUFFIX}"
        try:
            self._write_draft(draft, header, payload, table)
            replaced = self._volume.is_file(path)  # then its bytes are counted already
            self._volume.rename(draft, path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._volume.remove(draft)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full(header.file_bytes) from error
            raise
        file = DiskFile(path, header, table)
        if not replaced:
            self._count(file, 1)
        try:
            self._volume.flush_names(self.folder)
        except OSError:
            with contextlib.suppress(OSError):
                # Its name may not survive a loss of power, so it must not count as stored.
                self.discard(file)
            raise
        return file

    def found(self) -> Iterator[Path]:
        """Files in the tier's folder, whether this process knows them or not."""
        return iter(self._volume.found(self.folder, _SUFFIX))

    def adopt(self, path: Path) -> DiskFile:
        """Take over a file that is there. Its payload is not read.

        Raises ``CorruptFragment`` or ``VersionMismatch`` if it is not a complete file of this
        format.
        """
        volume = self._volume
        header = parse_superblock(volume.read(path, 0, SUPERBLOCK_BYTES), path.name)
        if header is None:
            raise CorruptFragment(f"{path.name}: does not begin like an ecckpt file")
        size_bytes = volume.size_bytes(path)
        if size_bytes != header.file_bytes:  # before trusting its sizes
            raise CorruptFragment(f"{path.name}: {size_bytes} bytes, {header.file_bytes} expected")
        trailer = volume.read(path, header.trailer_offset, header.trailer_bytes)
        found = DiskFile(path, header, parse_table(trailer, header, path.name))
        self._count(found, 1)
        return found

    def discard(self, file: DiskFile) -> None:
        """Remove a file. A loss of power may undo that."""
        self._volume.remove(file.path)
        self._count(file, -1)

    def _write_draft(
        self, draft: Path, header: Header, payload: Iterable[Buffer], table: np.ndarray
    ) -> None:
        with self._volume.draft(draft, header.file_bytes) as file:
            file.write(pack_superblock(header))
            written = unflushed = 0
            for piece in payload:
                file.write(piece)
                written += len(piece)
                unflushed += len(piece)
                if unflushed >= _FLUSH_BYTES:
                    file.flush_data()
                    unflushed = 0
            assert written == header.payload_bytes, f"{written} bytes of {header.payload_bytes}"
            file.write(pack_table(table))
            file.flush()

    def _count(self, file: DiskFile, sign: int) -> None:
        with self._lock:
            self._used_bytes[file.header.shard.run] += sign * file.size_bytes

    def _free_bytes(self) -> int:
        return self._volume.room(self.folder)[1]

    def _full(self, need_bytes: int) -> DiskFull:
        return DiskFull(str(self.folder), need_bytes=need_bytes, free_bytes=self._free_bytes())


def write_small(path: Path, content: bytes, volume: Volume = FILES) -> None:
    """Replace a small file as a whole; on return the new content survives a loss of power."""
    draft = path.with_name(f"{path.name}{_DRAFT_SUFFIX}")
    with volume.draft(draft) as file:
        file.write(content)
        file.flush()
    volume.rename(draft, path)
    volume.flush_names(path.parent)


def _piece(header: Header) -> str:
    return "home copy" if header.index == HOME else f"fragment {header.index}"


def _name(header: Header) -> str:
    shard = header.shard
    what = "home" if header.index == HOME else str(header.index)
    return f"{shard.run}@{shard.generation}@{shard.rank}@{what}{_SUFFIX}"
