"""``SavedShard``: one shard of the saved world, of which only the needed byte ranges are read.

``reshape.py`` and ``integrations/dcp/reader.py`` use it; ``client/read/shard_reader.py`` implements
its ``RangeReader``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ecckpt.state.file.header import header_bytes
from ecckpt.state.file.shard import Shard, read_index, read_values
from ecckpt.state.load.filling import Fills, is_plain
from ecckpt.state.tensors.boxes import Common, byte_runs
from ecckpt.state.tensors.sharding import Sharding
from ecckpt.state.tensors.tensors import same_bytes

# Integers of the same size. torch cannot copy boxes of all dtypes, and copies integers bit by bit.
_RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# The place in a global tensor (None: not a part of one), and the shape of what is stored.
Form = tuple[Sharding | None, tuple[int, ...]]


class RangeReader(Protocol):
    """Reads byte ranges of one shard. It checks them (CRC32C), or raises an ``EcckptError``.

    ``data`` is a buffer as long as the shard, owned by the reader; ranges that were not required
    are zeros.
    """

    data: memoryview

    @property
    def is_near(self) -> bool:
        """Whether the shard is on this node, so that reading it costs less than others."""

    def require(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Read the byte ranges [start, end) into ``data``; both arrays have shape (ranges,)."""

    def digest(self, start: int, end: int) -> bytes:
        """Return a digest of a byte range, without reading it.

        Two shards with equal digests have equal bytes there. Different digests say nothing: they
        also depend on the layout of the shards.
        """

    def release(self) -> None:
        """Return the memory of the ranges to the system; ``data`` has zeros again."""


class SavedShard:
    """One shard of the saved world.

    The constructor reads the header; methods read anything else when they need it. All of them
    raise what the reader raises, and ``CorruptFragment`` and ``VersionMismatch`` as ``read_shard``.
    """

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        size_bytes = len(reader.data)
        self._read([(0, min(8, size_bytes))])
        self._read([(0, header_bytes(reader.data[:8], size_bytes))])
        self._index = read_index(reader.data)
        self._runs: dict[str, list[tuple[Common, torch.Tensor]]] = defaultdict(list)
        self._wholes: list[tuple[str, torch.Tensor]] = []

    @property
    def is_near(self) -> bool:
        """Whether the shard is on this node."""
        return self._reader.is_near

    def values(self) -> Shard:
        """Read the values blob and return the shard; its tensors are zeros until they are read."""
        self._read([self._index.values])
        return read_values(self._index, self._reader.data)

    def read_tensors(self, names: Iterable[str]) -> None:
        """Read all bytes of the named tensors."""
        self._read([self._place(name) for name in names])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of a tensor: zeros until it is read, valid until ``release``."""
        return self._index.tensors[self.stored_name(name)]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._index.tensors.form(self.stored_name(name)).dtype

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor is stored under; another one only for an alias."""
        return self._index.notes.aliases.get(name, name)

    def form(self, name: str) -> Form:
        """Return the sharding of a tensor of this shard (None: not a part), and its shape."""
        stored = self.stored_name(name)
        tensors = self._index.tensors
        # A shard may lack the name: the stages of a pipeline have different tensors.
        shape = tuple(tensors.form(stored).shape) if stored in tensors else ()
        return self._index.notes.shardings.get(stored), shape

    def differing(self, other: SavedShard, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` whose tensors differ in any bit.

        Only tensors with different digests are read and compared.
        """
        doubtful = []
        for name in names:
            mine, theirs = self._place(name), other._place(name)
            if self._reader.digest(*mine) != other._reader.digest(*theirs):
                doubtful.append(name)
        self.read_tensors(doubtful)
        other.read_tensors(doubtful)
        return [name for name in doubtful if not same_bytes(self.tensor(name), other.tensor(name))]

    # -- copying parts ----------------------------------------------------------------------------

    def plan_copy(self, name: str, common: Common, target: torch.Tensor) -> None:
        """Plan the copy of a box of a tensor to its place in ``target``; see ``copy_planned``.

        The caller owns ``target`` and keeps it alive.
        """
        stored = self.stored_name(name)
        is_whole = self._index.tensors.form(stored).shape == common.shape == target.shape
        # The usual case: a fast path that copies thousands of whole tensors in one call.
        if is_whole and is_plain(target):
            self._wholes.append((stored, target))
        else:
            self._runs[stored].append((common, target))

    def copy_planned(self) -> None:
        """Read the ranges of all planned copies in one call of the reader, and copy them."""
        runs = [
            (*byte_runs(source.shape, common.source, common.shape, source.itemsize), name)
            for name, copies in self._runs.items()
            for common, _ in copies
            for source in (self.tensor(name),)
        ]
        places = [self._place(name) for name, _ in self._wholes]
        begins, ends = np.array(places, np.int64).reshape(-1, 2).T
        starts = [offsets + self._place(name)[0] for offsets, _, name in runs]
        stops = [start + size for start, (_, size, _) in zip(starts, runs, strict=True)]
        full = ends > begins
        if runs or full.any():
            self._reader.require(
                np.concatenate([*starts, begins[full]]), np.concatenate([*stops, ends[full]])
            )
        for name, copies in self._runs.items():
            source = _raw(self.tensor(name))
            for common, target in copies:
                _box(_raw(target), common.target, common.shape).copy_(
                    _box(source, common.source, common.shape)
                )
        self._copy_wholes()
        self._runs.clear()

    def _copy_wholes(self) -> None:
        fills = Fills()
        stored = self._index.tensors.stored([name for name, _ in self._wholes], {})
        for (_, target), source in zip(self._wholes, stored, strict=True):
            fills.add_fill(target, source)
        fills.fill_all()
        self._wholes.clear()

    def release(self) -> None:
        """Return the memory of the shard to the system; views of its tensors become zeros."""
        self._reader.release()

    def _place(self, name: str) -> tuple[int, int]:
        return self._index.tensors.place(self.stored_name(name))

    def _read(self, ranges: list[tuple[int, int]]) -> None:
        if ranges:
            starts, ends = np.array(ranges, np.int64).T
            self._reader.require(starts, ends)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.itemsize in _RAW_DTYPES:
        return tensor.view(_RAW_DTYPES[tensor.itemsize])
    return torch.view_as_real(tensor)  # complex128, the only dtype of 16 bytes


def _box(tensor: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    for dim, (begin, size) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor
