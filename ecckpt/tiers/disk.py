"""The disk tier: complete files of docs/FORMAT.md under a folder, or nothing.

A file is written under a temporary name, flushed, renamed, and its folder flushed: whatever stops
that at any point, a file that has its name is whole, and only then is it reported. Files are never
modified. Names say what is inside, for people; what counts is the superblock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ecckpt.copying import Buffer
from ecckpt.errors import CorruptFragment, DiskBudgetTooSmall, DiskFull
from ecckpt.fragment import (
    HOME,
    SUPERBLOCK_BYTES,
    Header,
    pack_superblock,
    pack_table,
    parse_superblock,
    parse_table,
)

_SUFFIX = ".ecckpt"
_DRAFT_SUFFIX = ".draft"
# Flushed this often, so that no burst of dirty pages holds up the rest of the machine at the end.
_FLUSH_BYTES = 64 << 20


@dataclass(frozen=True, eq=False, slots=True)
class DiskFile:
    """A complete file of the tier. ``table`` is uint32 (n, rows)."""

    path: Path
    header: Header
    table: np.ndarray

    @property
    def size_bytes(self) -> int:
        """What it counts for in its run's budget."""
        return self.header.file_bytes


class DiskTier:
    """All files of one agent on disk, by run.

    ``write`` and ``discard`` are for one thread; looking is for any. Every method may raise
    ``OSError``: the disk may be gone at any time.
    """

    def __init__(self, folder: Path, *, node: str) -> None:
        self._node = node
        self.folder = folder / "files"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._used_bytes: dict[str, int] = defaultdict(int)
        for draft in self.folder.glob(f"*{_DRAFT_SUFFIX}"):  # nobody else writes here: left over
            draft.unlink()

    def default_budget_bytes(self) -> int:
        """Half of the file system: what a run may use unless told otherwise."""
        size = os.statvfs(self.folder)
        return size.f_frsize * size.f_blocks // 2

    def used_bytes(self, run: str) -> int:
        """Bytes of the run's files."""
        with self._lock:
            return self._used_bytes[run]

    def check_room(self, header: Header, *, budget_bytes: int) -> None:
        """Raise ``DiskBudgetTooSmall`` or ``DiskFull`` if a file has no room."""
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

        ``payload`` yields the payload's bytes in pieces, each used before the next is asked for;
        what it raises goes through. Raises ``DiskBudgetTooSmall`` or ``DiskFull`` before anything
        is written where that can be known, and any other ``OSError`` of the disk. After an error
        nothing of the file is there.
        """
        self.check_room(header, budget_bytes=budget_bytes)
        path = self.folder / _name(header)
        draft = self.folder / f"{secrets.token_hex(8)}{_DRAFT_SUFFIX}"
        try:
            self._write_draft(draft, header, payload, table)
            replaced = path.exists()
            draft.rename(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full(header.file_bytes) from error
            raise
        file = DiskFile(path, header, table)
        if not replaced:
            self._count(file, 1)
        try:
            flush_folder(self.folder)
        except OSError:
            with contextlib.suppress(OSError):
                self.discard(file)  # it may be gone after a loss of power: so it is not there
            raise
        return file

    def found(self) -> Iterator[Path]:
        """Files that lie in the tier's folder, known or not."""
        return iter(sorted(self.folder.glob(f"*{_SUFFIX}")))

    def adopt(self, path: Path) -> DiskFile:
        """A file that is there, by its content; payload unread.

        Raises ``CorruptFragment`` or ``VersionMismatch`` if it is not a complete file of ours.
        """
        with path.open("rb") as file:
            header = parse_superblock(file.read(SUPERBLOCK_BYTES), path.name)
            if header is None:
                raise CorruptFragment(f"{path.name}: begins like no file of ours")
            if path.stat().st_size != header.file_bytes:  # before believing its numbers
                raise CorruptFragment(
                    f"{path.name}: {path.stat().st_size} bytes, {header.file_bytes} expected"
                )
            file.seek(header.trailer_offset)
            table = parse_table(file.read(header.trailer_bytes), header, path.name)
        found = DiskFile(path, header, table)
        self._count(found, 1)
        return found

    def discard(self, file: DiskFile) -> None:
        """Remove a file. That it is gone may be forgotten by a loss of power."""
        with contextlib.suppress(FileNotFoundError):
            file.path.unlink()
        self._count(file, -1)

    def _write_draft(
        self, draft: Path, header: Header, payload: Iterable[Buffer], table: np.ndarray
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(draft, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, header.file_bytes)  # all of it, or none is written
            _write_all(descriptor, pack_superblock(header))
            written = unflushed = 0
            for piece in payload:
                _write_all(descriptor, piece)
                written += len(piece)
                unflushed += len(piece)
                if unflushed >= _FLUSH_BYTES:
                    os.fdatasync(descriptor)
                    unflushed = 0
            assert written == header.payload_bytes, f"{written} bytes of {header.payload_bytes}"
            _write_all(descriptor, pack_table(table))
            os.fsync(descriptor)
            # What was written is not read soon; the page cache is for others.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def _count(self, file: DiskFile, sign: int) -> None:
        with self._lock:
            self._used_bytes[file.header.shard.run] += sign * file.size_bytes

    def _free_bytes(self) -> int:
        size = os.statvfs(self.folder)
        return size.f_frsize * size.f_bavail

    def _full(self, need_bytes: int) -> DiskFull:
        return DiskFull(str(self.folder), need_bytes=need_bytes, free_bytes=self._free_bytes())


def flush_folder(folder: Path) -> None:
    """Make sure that names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_small(path: Path, content: bytes) -> None:
    """Replace a small file as a whole; on return it survives a loss of power."""
    draft = path.with_name(f"{path.name}{_DRAFT_SUFFIX}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    draft.rename(path)
    flush_folder(path.parent)


def _write_all(descriptor: int, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    while view:  # a disk near its limit, or a file-size limit, writes less than asked
        view = view[os.write(descriptor, view) :]


def _piece(header: Header) -> str:
    return "home copy" if header.index == HOME else f"fragment {header.index}"


def _name(header: Header) -> str:
    shard = header.shard
    what = "home" if header.index == HOME else str(header.index)
    return f"{shard.run}@{shard.generation}@{shard.rank}@{what}{_SUFFIX}"
