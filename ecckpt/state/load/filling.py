"""Filling the tensors of a live state: many in one go and past the caches, where they are plain
memory; beside the caller's stream, where they are on a GPU; by torch, where they are anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from ecckpt.memory.buffers import COPY_THREADS, copy_many
from ecckpt.state.load.assigning import Assigner
from ecckpt.state.tensors.devices import Pair, SideCopies, gpu_of
from ecckpt.state.tensors.sharding import is_dtensor, local_tensor, rebuild_dtensor
from ecckpt.state.tensors.tensors import collapse, fill, is_raw
from ecckpt.state.tree.nodes import StoredTensor

_address_of, _bytes_of = attrgetter("address"), attrgetter("form.size_bytes")


class Fills:
    """Live tensors and the saved ones that go into them, collected and then copied together.

    With an ``assigner``, what it can is not copied.
    """

    def __init__(self, assigner: Assigner | None = None) -> None:
        self._assigner = assigner
        self._unusual: list[tuple[torch.Tensor, StoredTensor]] = []
        self._plain: list[torch.Tensor] = []
        self._sources: list[StoredTensor] = []
        self._addresses: list[int] = []  # of the plain ones

    def add(self, target: torch.Tensor, source: StoredTensor) -> None:
        """Note that ``source``, of the same shape and dtype, goes into ``target``."""
        if is_plain(target) and source.address:
            self.add_plain([target], [target.data_ptr()], [source])
        else:
            self._unusual.append((target, source))

    def add_plain(
        self,
        targets: Sequence[torch.Tensor],
        addresses: Sequence[int],
        sources: Sequence[StoredTensor],
    ) -> None:
        """``add`` for many: each target is raw memory at its address, and so is each source."""
        self._plain += targets
        self._addresses += addresses
        self._sources += sources

    def assigned(self, stored: StoredTensor) -> torch.Tensor | None:
        """A new tensor that is ``stored`` and needs no copy, if there can be one."""
        return None if self._assigner is None else self._assigner.new(stored)

    def run(self) -> None:
        """Copy everything that was noted, or assign it."""
        if self._assigner is not None:
            self._move_plain(self._assigner)
        on_gpus: list[Pair] = []
        others: list[Pair] = []
        for target, stored in self._unusual:
            if target.numel():
                beside = gpu_of(target) is not None and not target.is_inference()
                (on_gpus if beside else others).append((target, stored.data))
        with SideCopies() as copies:
            copies.to_gpus([collapse(target, source) for target, source in on_gpus])
            for target, source in others:
                fill(target, source)
            self._copy_plain()
        for noted in (self._unusual, self._plain, self._sources, self._addresses):
            noted.clear()

    def _move_plain(self, assigner: Assigner) -> None:
        moved: dict[int, torch.Tensor] = {}  # one that has several names is here several times
        left = []
        for index, (target, stored) in enumerate(zip(self._plain, self._sources, strict=True)):
            if id(target) in moved:
                continue
            if assigner.move(target, stored):
                moved[id(target)] = target
            else:
                left.append(index)
        torch.autograd.graph.increment_version(list(moved.values()))
        self._plain = [self._plain[index] for index in left]
        self._sources = [self._sources[index] for index in left]
        self._addresses = [self._addresses[index] for index in left]

    def _copy_plain(self) -> None:
        columns = map(_address_of, self._sources), self._addresses, map(_bytes_of, self._sources)
        rows = np.column_stack([np.fromiter(each, np.int64, len(self._plain)) for each in columns])
        full = rows[:, 2] > 0
        if full.any():
            _copy(rows[full])
            # As after copy_(): a graph that kept one of them must not be used with new values.
            written = list(compress(self._plain, full.tolist()))
            torch.autograd.graph.increment_version(written)


def fresh_tensor(stored: StoredTensor, like: torch.Tensor | None, fills: Fills) -> torch.Tensor:
    """A tensor for a copy of ``stored`` that outlives the shard, where ``like`` is (None: the CPU).

    It is empty until ``fills`` are run, unless they assign it. If it is a part of a global tensor,
    ``like`` must be a DTensor sharded in the same way.
    """
    device = torch.device("cpu") if like is None else like.device
    assigned = fills.assigned(stored) if device.type == "cpu" else None
    if assigned is not None:
        return assigned
    made = torch.empty(stored.shape, dtype=stored.dtype, device=device)
    if stored.sharding is None:
        fills.add(made, stored)
        return made
    assert is_dtensor(like)
    # What is filled is what came of it: DTensors move what is not where their mesh is.
    whole = rebuild_dtensor(made, stored.sharding, like)  # type: ignore[arg-type]
    fills.add(local_tensor(whole), stored)
    return whole


def is_plain(target: torch.Tensor) -> bool:
    """Whether a tensor may be filled by writing bytes into its memory."""
    return is_raw(target) and not target.is_inference()


def _copy(rows: NDArray[np.int64]) -> None:
    """Copy ranges. Of tied tensors the last is enough; what overlaps else goes one by one."""
    ordered = rows[np.argsort(rows[:, 1], kind="stable")]
    last = np.append((ordered[1:, 1:] != ordered[:-1, 1:]).any(axis=1), True)
    ordered = ordered[last]
    begins, ends = ordered[:, 1], ordered[:, 1] + ordered[:, 2]
    if (begins[1:] >= np.maximum.accumulate(ends)[:-1]).all():
        copy_many(ordered, threads=COPY_THREADS)
        return
    for row in rows:
        copy_many(row[None, :])
