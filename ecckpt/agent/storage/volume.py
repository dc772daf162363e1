"""What the disk tier asks of a file system: the steps that a loss of power may come between.

They stand behind one type so that the simulator can put a made-up disk under the real tier, and
tear it between any two of them. Everything here may raise ``OSError``.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from ecckpt.memory.buffers import Buffer


class Draft(Protocol):
    """A file that is being written; leaving its context closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def write(self, data: Buffer) -> None:
        """Write all of it behind what was written before."""

    def flush_data(self) -> None:
        """On return what was written so far survives a loss of power, if the file does."""

    def flush(self) -> None:
        """On return the whole file does, by whatever name survives."""


class Volume(Protocol):
    """A file system."""

    def make_folder(self, folder: Path) -> None:
        """Make it with those above it, for this user alone, unless it is there."""

    def found(self, folder: Path, suffix: str) -> list[Path]:
        """What lies there under names that end so, in order."""

    def is_file(self, path: Path) -> bool:
        """Whether it is there, and a regular file."""

    def size_bytes(self, path: Path) -> int:
        """Its length."""

    def read(self, path: Path, offset: int, size_bytes: int) -> bytes:
        """Some of it; less where it ends."""

    def draft(self, path: Path, size_bytes: int = 0) -> Draft:
        """Begin a file in place of what has the name, with room for so much or an error."""

    def rename(self, path: Path, target: Path) -> None:
        """Give it that name, in place of what has it."""

    def remove(self, path: Path) -> None:
        """Remove it; nothing if it is not there."""

    def flush_names(self, folder: Path) -> None:
        """On return the names in it survive a loss of power."""

    def room(self, folder: Path) -> tuple[int, int]:
        """Bytes of it all, and those that are free."""


class _FileDraft:
    def __init__(self, path: Path, size_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        try:
            if size_bytes:  # all of it, or none is written
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
        while view:  # a disk near its limit, or a file-size limit, writes less than asked
            view = view[os.write(self._descriptor, view) :]

    def flush_data(self) -> None:
        os.fdatasync(self._descriptor)

    def flush(self) -> None:
        os.fsync(self._descriptor)
        # What was written is not read soon; the page cache is for others.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class FileSystem:
    """The operating system's."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

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
