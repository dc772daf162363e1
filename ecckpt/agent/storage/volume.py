"""The operations of a file system that the disk tier uses, one for each step of a write.

A loss of power may come between any two of them. They stand behind a type so that the simulator can
run the real tier on a simulated disk and lose power anywhere. All may raise ``OSError``.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from ecckpt.memory.buffers import Buffer


class Draft(Protocol):
    """A file that is being written. Leaving its context closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def write(self, data: Buffer) -> None:
        """Append all of these bytes."""

    def flush_data(self) -> None:
        """On return, all bytes written so far survive a loss of power, if the file does."""

    def flush(self) -> None:
        """On return, the whole file survives a loss of power, under whichever name survives."""


class Volume(Protocol):
    """A file system."""

    def make_folder(self, folder: Path) -> None:
        """Make the folder and its parents, accessible to this user alone, if it is not there."""

    def remake_folder(self, folder: Path) -> None:
        """Make a folder again that was removed under this process; its parent must be there."""

    def names(self, folder: Path) -> frozenset[str]:
        """The names of all files in the folder; empty if the folder is not there."""

    def found(self, folder: Path, suffix: str) -> list[Path]:
        """The paths in the folder whose names end with the suffix, sorted."""

    def is_file(self, path: Path) -> bool:
        """Whether the path is there and a regular file."""

    def size_bytes(self, path: Path) -> int:
        """The length of a file."""

    def read(self, path: Path, offset: int, size_bytes: int) -> bytes:
        """Bytes of a file from ``offset``; fewer at its end."""

    def draft(self, path: Path, size_bytes: int = 0) -> Draft:
        """Create a file, or empty an existing one. Allocates ``size_bytes`` or raises."""

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file, replacing a file of the new name."""

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""

    def flush_names(self, folder: Path) -> None:
        """On return, the names in the folder survive a loss of power."""

    def room(self, folder: Path) -> tuple[int, int]:
        """Bytes of the whole file system, and those that are free."""


class _FileDraft:
    def __init__(self, path: Path, size_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        try:
            if size_bytes:  # a disk without room fails here, before anything is written
                os.posix_fallocate(self._descriptor, 0, size_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:  # near the limit of a disk or a file size, ``write`` writes less than asked
            view = view[os.write(self._descriptor, view) :]

    def flush_data(self) -> None:
        os.fdatasync(self._descriptor)

    def flush(self) -> None:
        os.fsync(self._descriptor)
        # The file is not read soon: leave the page cache to others.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class FileSystem:
    """The file system of the operating system."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remake_folder(self, folder: Path) -> None:
        # Without its parents: a root that is gone is the agent's end (runtime/daemon.py).
        folder.mkdir(mode=0o700, exist_ok=True)

    def names(self, folder: Path) -> frozenset[str]:
        try:
            with os.scandir(folder) as files:
                return frozenset(file.name for file in files)
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()

    def found(self, folder: Path, suffix: str) -> list[Path]:
        return sorted(folder.glob(f"*{suffix}"))

    def is_file(self, path: Path) -> bool:
        return path.is_file()

    def size_bytes(self, path: Path) -> int:
        return path.stat().st_size

    def read(self, path: Path, offset: int, size_bytes: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size_bytes)

    def draft(self, path: Path, size_bytes: int = 0) -> Draft:
        return _FileDraft(path, size_bytes)

    def rename(self, path: Path, target: Path) -> None:
        path.rename(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def flush_names(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def room(self, folder: Path) -> tuple[int, int]:
        size = os.statvfs(folder)
        return size.f_frsize * size.f_blocks, size.f_frsize * size.f_bavail
