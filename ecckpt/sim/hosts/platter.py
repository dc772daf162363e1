"""A simulated disk: a ``Volume`` of bytes that knows what a loss of power leaves of them.

The real disk tier (agent/storage/disk.py) runs on it unchanged. A platter knows for each file how
much of it was flushed, and which names were flushed. A loss of power keeps all that was flushed,
and a random part of the rest.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from ecckpt.agent.storage.volume import Draft
from ecckpt.memory.buffers import Buffer

_SIZE_BYTES = 1 << 40  # more than any simulated run writes


class Killed(BaseException):
    """The process that uses the disk is killed at this step."""


@dataclass(eq=False, slots=True)
class Inode:
    """A file. Its first ``flushed_bytes`` bytes survive a loss of power."""

    data: bytearray = field(default_factory=bytearray)
    flushed_bytes: int = 0


class _Draft:
    """A ``Draft`` on a platter: a file that is being written."""

    def __init__(self, volume: Platter, inode: Inode) -> None:
        self._volume, self._inode = volume, inode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def write(self, data: Buffer) -> None:
        raw = bytes(data)
        try:
            self._volume.step()
        except Killed:
            # A kill in the middle of write(2) leaves a prefix of the data.
            raw = raw[: self._volume.rng.randrange(len(raw) + 1)]
            self._inode.data += raw
            raise
        self._volume.check_room(len(raw))
        self._inode.data += raw

    def flush_data(self) -> None:
        self._volume.step()
        self._inode.flushed_bytes = len(self._inode.data)

    def flush(self) -> None:
        self.flush_data()


class Platter:
    """A simulated disk of one host.

    While ``full``, writes fail with ENOSPC. While ``sick``, every step fails with EIO. ``slow_s``
    is the most that the disk adds to an action. After ``steps_left`` more steps the process that
    uses the disk is killed; None: never.
    """

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.full = self.sick = False
        self.slow_s = 0.0
        self.steps_left: int | None = None
        self._names: dict[Path, Inode] = {}  # as a process sees them
        self._flushed: dict[Path, Inode] = {}  # as they are certain to be after a loss of power

    # -- the Volume that the disk tier uses -------------------------------------------------------

    def make_folder(self, folder: Path) -> None:
        """Nothing to do: folders exist as soon as a file is in them."""
        self.step()

    def remake_folder(self, folder: Path) -> None:
        """Folders are never removed here."""

    def names(self, folder: Path) -> frozenset[str]:
        """Of what is there now, without a step: power is not lost by looking."""
        return frozenset(path.name for path in self._names if path.parent == folder)

    def found(self, folder: Path, suffix: str) -> list[Path]:
        """The files of a folder whose names end so."""
        self.step()
        in_folder = (path for path in self._names if path.parent == folder)
        return sorted(path for path in in_folder if path.name.endswith(suffix))

    def is_file(self, path: Path) -> bool:
        """Whether the file exists."""
        return path in self._names

    def size_bytes(self, path: Path) -> int:
        """The length of the file."""
        return len(self._inode(path).data)

    def read(self, path: Path, offset: int, size_bytes: int) -> bytes:
        """Some bytes of a file."""
        self.step()
        return bytes(self._inode(path).data[offset : offset + size_bytes])

    def draft(self, path: Path, size_bytes: int = 0) -> Draft:
        """Create a file, in place of one of the same name."""
        self.step()
        self.check_room(size_bytes)
        self._names[path] = inode = Inode()
        return _Draft(self, inode)

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file, in place of one with the new name."""
        self.step()
        self._names[target] = self._names.pop(path)

    def remove(self, path: Path) -> None:
        """Remove a file if it exists."""
        self.step()
        self._names.pop(path, None)

    def flush_names(self, folder: Path) -> None:
        """Make the names in a folder survive a loss of power, as fsync of the folder does."""
        self.step()
        elsewhere = {p: inode for p, inode in self._flushed.items() if p.parent != folder}
        here = {path: inode for path, inode in self._names.items() if path.parent == folder}
        self._flushed = elsewhere | here

    def room(self, folder: Path) -> tuple[int, int]:
        """The size of the disk, and how much of it is free."""
        self.step()
        return _SIZE_BYTES, 0 if self.full else _SIZE_BYTES

    # -- for faults, operators and the truth ------------------------------------------------------

    def step(self) -> None:
        """Count one step; raise what a kill or a sick disk raises at it."""
        if self.steps_left is not None:
            if not self.steps_left:
                raise Killed
            self.steps_left -= 1
        if self.sick:
            raise OSError(errno.EIO, "input/output error")

    def check_room(self, size_bytes: int) -> None:
        """Raise ``OSError`` if this many bytes cannot be written."""
        if self.full and size_bytes:
            raise OSError(errno.ENOSPC, "no space left on device")

    def is_durable(self, path: Path) -> bool:
        """Whether a file is sure to survive a loss of power in full."""
        inode = self._names.get(path)
        whole = inode is not None and inode.flushed_bytes == len(inode.data)
        return whole and self._flushed.get(path) is inode

    def may_have(self, path: Path) -> bool:
        """Whether a file exists, or may exist again after a loss of power."""
        return path in self._names or path in self._flushed

    def view(self, path: Path) -> memoryview:
        """The bytes of a file, writable so that they can rot."""
        return memoryview(self._inode(path).data)

    def used_bytes(self, run: str) -> int:
        """How many bytes the files of a run have."""
        names = ((path.name, inode) for path, inode in self._names.items())
        return sum(len(inode.data) for name, inode in names if name.startswith(f"{run}@"))

    def put(self, path: Path, data: bytearray) -> memoryview:
        """A file that is there at once; what is written to the view is written to it."""
        self._names[path] = Inode(data)
        return memoryview(data)

    def mend(self) -> None:
        """End all faults of the disk. Rotten bytes stay rotten."""
        self.full = self.sick = False
        self.slow_s = 0.0

    def delete(self, name: str) -> None:
        """Remove all files of that name, as an operator would."""
        for path in [path for path in self._names if path.name == name]:
            self.remove(path)
            self._flushed.pop(path, None)

    def lose_power(self) -> None:
        """Keep what was flushed, and a random part of what was not."""
        self.steps_left = None
        names: dict[Path, Inode] = {}
        for path in {**self._flushed, **self._names}:
            # A name whose folder was not flushed may have reached the disk or not.
            choices = [self._flushed.get(path), self._names.get(path)]
            inode = self.rng.choice(choices) if choices[0] is not choices[1] else choices[0]
            if inode is not None:
                names[path] = inode
        for inode in names.values():
            self._tear(inode)
        self._names, self._flushed = names, dict(names)

    def _tear(self, inode: Inode) -> None:
        """Cut the unflushed end of a file at a random place, or replace it by zeros."""
        unflushed_bytes = len(inode.data) - inode.flushed_bytes
        if unflushed_bytes:
            kept = inode.flushed_bytes + self.rng.randrange(unflushed_bytes + 1)
            # A file system may have written the length before the data: zeros are left then.
            zeros = self.rng.choice([0, len(inode.data) - kept])
            inode.data[kept:] = bytes(zeros)
            inode.flushed_bytes = len(inode.data)

    def _inode(self, path: Path) -> Inode:
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return self._names[path]
