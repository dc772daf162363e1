"""The shards of a saved world, each read only as far as it is needed."""

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

# Same-sized integers: copying them is copying bits, whatever the dtype can do by itself.
_RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# A part of a global tensor (None: no part of any), and the shape of what is stored.
Form = tuple[Sharding | None, tuple[int, ...]]


class RangeReader(Protocol):
    """Where the bytes of a shard come from: proven, or an ``EcckptError``.

    ``data`` is as long as the shard; what was not required are zeros. ``is_near``: it costs less
    than others. ``digest``: equal for two shards only if these bytes of both are equal.
    """

    data: memoryview

    @property
    def is_near(self) -> bool:
        """Whether reading it costs less than reading others."""

    def require(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Bring the byte ranges [start, end) into ``data``."""

    def digest(self, start: int, end: int) -> bytes:
        """What is equal for equal bytes, if the shards are laid out alike."""

    def release(self) -> None:
        """Give back the memory of what was brought; ``data`` is zeros again."""


class SavedShard:
    """One shard of the saved world. Reads its header at once, anything else when asked to.

    Raises what its reader does, and ``CorruptFragment``, ``VersionMismatch`` as ``read_shard``.
    """

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        size_bytes = len(reader.data)
        self._bring([(0, min(8, size_bytes))])
        self._bring([(0, header_bytes(reader.data[:8], size_bytes))])
        self._index = read_index(reader.data)
        self._runs: dict[str, list[tuple[Common, torch.Tensor]]] = defaultdict(list)
        self._wholes: list[tuple[str, torch.Tensor]] = []

    @property
    def is_near(self) -> bool:
        """Whether its bytes are on this node."""
        return self._reader.is_near

    def values(self) -> Shard:
        """The shard with its values read; of its tensors nothing need be there yet."""
        self._bring([self._index.values])
        return read_values(self._index, self._reader.data)

    def bring(self, names: Iterable[str]) -> None:
        """Read these tensors whole."""
        self._bring([self._place(name) for name in names])

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as a view: zeros, until it is brought."""
        return self._index.tensors[self.stored_name(name)]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._index.tensors.form(self.stored_name(name)).dtype

    def stored_name(self, name: str) -> str:
        """The name under which a tied tensor is stored."""
        return self._index.notes.aliases.get(name, name)

    def form(self, name: str) -> Form:
        """Which part of a global tensor this shard has under ``name``, and that part's shape."""
        stored = self.stored_name(name)
        tensors = self._index.tensors
        # Another stage of a pipeline has other names.
        shape = tuple(tensors.form(stored).shape) if stored in tensors else ()
        return self._index.notes.shardings.get(stored), shape

    def differing(self, other: SavedShard, names: Iterable[str]) -> list[str]:
        """Those of ``names`` whose tensors are not the same in both, bit for bit.

        Reads only those that the checksums do not show to be equal.
        """
        doubtful = []
        for name in names:
            mine, theirs = (each._place(name) for each in (self, other))
            if self._reader.digest(*mine) != other._reader.digest(*theirs):
                doubtful.append(name)
        self.bring(doubtful)
        other.bring(doubtful)
        return [name for name in doubtful if not same_bytes(self.tensor(name), other.tensor(name))]

    # -- copying parts ----------------------------------------------------------------------------

    def plan_copy(self, name: str, common: Common, target: torch.Tensor) -> None:
        """Have ``copy_planned`` copy a box of a tensor into its place in ``target``."""
        stored = self.stored_name(name)
        is_whole = self._index.tensors.form(stored).shape == common.shape == target.shape
        if is_whole and is_plain(target):  # the usual case, and thousands of them are one copy
            self._wholes.append((stored, target))
        else:
            self._runs[stored].append((common, target))

    def copy_planned(self) -> None:
        """Read what the planned copies need, in as few requests as can be, and copy it."""
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
            fills.add(target, source)
        fills.run()
        self._wholes.clear()

    def release(self) -> None:
        """Give back the memory of what was read. Views of tensors are zeros from now on."""
        self._reader.release()

    def _place(self, name: str) -> tuple[int, int]:
        return self._index.tensors.place(self.stored_name(name))

    def _bring(self, ranges: list[tuple[int, int]]) -> None:
        if ranges:
            starts, ends = np.array(ranges, np.int64).T
            self._reader.require(starts, ends)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.itemsize in _RAW_DTYPES:
        return tensor.view(_RAW_DTYPES[tensor.itemsize])
    return torch.view_as_real(tensor)  # complex128, the only one of 16 bytes


def _box(tensor: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    for dim, (at, size) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor
