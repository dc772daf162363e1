"""A disk that is made up: what the real disk tier writes, with what a loss of power leaves of it.

Files have what was written and how much of that was flushed; names are those seen now and those
that were flushed. A loss of power keeps what was flushed, and of the rest what it likes.
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

_SIZE_BYTES = 1 << 40


class Killed(BaseException):
    """The process that used the disk is gone, at this very step."""


@dataclass(eq=False, slots=True)
class Inode:
    """A file: its bytes, of which the first ``flushed_bytes`` survive a loss of power."""

    data: bytearray = field(default_factory=bytearray)
    flushed_bytes: int = 0


class _Draft:
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
    """A ``Volume``. ``full`` and ``sick`` make every step fail that they can.

    ``steps_left``: after so many more, whoever uses it is killed.
    """

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.full = self.sick = False
        self.slow_s = 0.0
        self.steps_left: int | None = None
        self._names: dict[Path, Inode] = {}
        self._flushed: dict[Path, Inode] = {}

    # -- as the tier sees it ----------------------------------------------------------------------

    def make_folder(self, folder: Path) -> None:
        """Folders need not be made here."""
        self.step()

    def found(self, folder: Path, suffix: str) -> list[Path]:
        """Names in a folder that end so."""
        self.step()
        there = (path for path in self._names if path.parent == folder)
        return sorted(path for path in there if path.name.endswith(suffix))

    def is_file(self, path: Path) -> bool:
        """Whether it is there."""
        return path in self._names

    def size_bytes(self, path: Path) -> int:
        """Its length."""
        return len(self._inode(path).data)

    def read(self, path: Path, offset: int, size_bytes: int) -> bytes:
        """Some of it."""
        self.step()
        return bytes(self._inode(path).data[offset : offset + size_bytes])

    def draft(self, path: Path, size_bytes: int = 0) -> Draft:
        """Begin a file."""
        self.step()
        self.check_room(size_bytes)
        self._names[path] = inode = Inode()
        return _Draft(self, inode)

    def rename(self, path: Path, target: Path) -> None:
        """Give it another name."""
        self.step()
        self._names[target] = self._names.pop(path)

    def remove(self, path: Path) -> None:
        """Remove it."""
        self.step()
        self._names.pop(path, None)

    def flush_names(self, folder: Path) -> None:
        """Names in a folder survive from now on."""
        self.step()
        self._flushed = {path: at for path, at in self._flushed.items() if path.parent != folder}
        self._flushed |= {path: at for path, at in self._names.items() if path.parent == folder}

    def room(self, folder: Path) -> tuple[int, int]:
        """All of it, and what is free."""
        self.step()
        return _SIZE_BYTES, 0 if self.full else _SIZE_BYTES

    # -- as faults see it -------------------------------------------------------------------------

    def step(self) -> None:
        """Something is asked of it."""
        if self.steps_left is not None:
            if not self.steps_left:
                raise Killed
            self.steps_left -= 1
        if self.sick:
            raise OSError(errno.EIO, "input/output error")

    def check_room(self, size_bytes: int) -> None:
        """Whether so much can be written."""
        if self.full and size_bytes:
            raise OSError(errno.ENOSPC, "no space left on device")

    def lasts(self, path: Path) -> bool:
        """Whether a file would survive a loss of power as it is."""
        inode = self._names.get(path)
        whole = inode is not None and inode.flushed_bytes == len(inode.data)
        return whole and self._flushed.get(path) is inode

    def may_have(self, path: Path) -> bool:
        """Whether a file is there, or may be after a loss of power."""
        return path in self._names or path in self._flushed

    def view(self, path: Path) -> memoryview:
        """The bytes of a file, to let them rot."""
        return memoryview(self._inode(path).data)

    def used_bytes(self, run: str) -> int:
        """What lies there of a run."""
        names = ((path.name, inode) for path, inode in self._names.items())
        return sum(len(inode.data) for name, inode in names if name.startswith(f"{run}@"))

    def put(self, path: Path, data: bytearray) -> memoryview:
        """A file that is there at once; what is written to the view is written to it."""
        self._names[path] = Inode(data)
        return memoryview(data)

    def mend(self) -> None:
        """It is well again; what is on it stays as it is."""
        self.full = self.sick = False
        self.slow_s = 0.0

    def forget(self, name: str) -> None:
        """A person removes files of that name."""
        for path in [each for each in self._names if each.name == name]:
            self.remove(path)
            self._flushed.pop(path, None)

    def lose_power(self) -> None:
        """Of what was not flushed, some is left."""
        self.steps_left = None
        names: dict[Path, Inode] = {}
        for path in {**self._flushed, **self._names}:
            choices = [self._flushed.get(path), self._names.get(path)]
            inode = self.rng.choice(choices) if choices[0] is not choices[1] else choices[0]
            if inode is not None:
                names[path] = inode
        for inode in names.values():
            self._tear(inode)
        self._names, self._flushed = names, dict(names)

    def _tear(self, inode: Inode) -> None:
        unflushed_bytes = len(inode.data) - inode.flushed_bytes
        if unflushed_bytes:
            kept = inode.flushed_bytes + self.rng.randrange(unflushed_bytes + 1)
            zeros = self.rng.choice([0, len(inode.data) - kept])
            inode.data[kept:] = bytes(zeros)
            inode.flushed_bytes = len(inode.data)

    def _inode(self, path: Path) -> Inode:
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return self._names[path]
