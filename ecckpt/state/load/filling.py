"""``Fills``: copies saved tensors into live ones, each kind in the fastest way.

- plain CPU memory: all in one call of ``copy_many``, which bypasses the caches
- GPU memory: on a side stream (``devices.py``)
- other layouts: by torch's ``copy_``

``fit.py``, ``rebuilding.py`` and ``reshard/saved_shard.py`` use it.
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
from ecckpt.state.tensors.tensors import collapse, empty_in_order, fill, is_raw
from ecckpt.state.tree.nodes import StoredTensor

_address_of, _bytes_of = attrgetter("address"), attrgetter("form.size_bytes")


class Fills:
    """Pairs of target and stored tensor, collected first and then copied together.

    With an ``assigner``, targets that it can assign are not copied.
    """

    def __init__(self, assigner: Assigner | None = None) -> None:
        self._assigner = assigner
        self._unusual: list[tuple[torch.Tensor, StoredTensor]] = []  # not plain memory
        # Three columns of plain memory: targets, what goes into them, and the targets' addresses.
        self._plain: list[torch.Tensor] = []
        self._sources: list[StoredTensor] = []
        self._addresses: list[int] = []

    def add_fill(self, target: torch.Tensor, source: StoredTensor) -> None:
        """Add a target and the stored tensor, of the same shape and dtype, that goes into it."""
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
        """Add many targets in plain memory at the given addresses; so are the sources."""
        self._plain += targets
        self._addresses += addresses
        self._sources += sources

    def assigned(self, stored: StoredTensor) -> torch.Tensor | None:
        """Make a tensor over the memory of ``stored``; None if it has to be copied."""
        return None if self._assigner is None else self._assigner.new_tensor(stored)

    def fill_all(self) -> None:
        """Copy or assign everything that was added, and forget it."""
        if self._assigner is not None:
            self._move_plain(self._assigner)
        on_gpus: list[Pair] = []
        others: list[Pair] = []
        for target, stored in self._unusual:
            if target.numel():
                beside = gpu_of(target) is not None and not target.is_inference()
                (on_gpus if beside else others).append((target, stored.data))
        # The copies to GPUs are queued first: they proceed while this thread fills CPU memory.
        with SideCopies() as copies:
            copies.to_gpus([collapse(target, source) for target, source in on_gpus])
            for target, source in others:
                fill(target, source)
            self._copy_plain()
        for column in (self._unusual, self._plain, self._sources, self._addresses):
            column.clear()

    def _move_plain(self, assigner: Assigner) -> None:
        moved: dict[int, torch.Tensor] = {}  # by id: a tied tensor occurs once per name
        left = []
        for index, (target, stored) in enumerate(zip(self._plain, self._sources, strict=True)):
            if id(target) in moved:
                continue
            if assigner.move(target, stored):
                moved[id(target)] = target
            else:
                left.append(index)
        # As an in-place write would: autograd must refuse a graph that saved the old values.
        torch.autograd.graph.increment_version(list(moved.values()))
        self._plain = [self._plain[index] for index in left]
        self._sources = [self._sources[index] for index in left]
        self._addresses = [self._addresses[index] for index in left]

    def _copy_plain(self) -> None:
        columns = map(_address_of, self._sources), self._addresses, map(_bytes_of, self._sources)
        rows = np.column_stack(
            [np.fromiter(column, np.int64, len(self._plain)) for column in columns]
        )
        full = rows[:, 2] > 0
        if full.any():
            _copy(rows[full])
            # As copy_() does: autograd must refuse a graph that saved the old values.
            written = list(compress(self._plain, full.tolist()))
            torch.autograd.graph.increment_version(written)


def fresh_tensor(
    stored: StoredTensor,
    like: torch.Tensor | None,
    fills: Fills,
    order: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Make a tensor for ``stored`` that outlives the shard, on the device of ``like``.

    Its content is undefined until ``fills.fill_all()``, unless the assigner made it.

    Args:
        stored: the saved tensor.
        like: gives the device, and for a part of a global tensor the mesh; it then is a DTensor
            with the saved sharding. None: the CPU.
        fills: the copy is added here.
        order: of its dimensions in memory (``memory_order``).
    """
    device = torch.device("cpu") if like is None else like.device
    assigned = fills.assigned(stored) if device.type == "cpu" and order is None else None
    if assigned is not None:
        return assigned
    local = empty_in_order(stored.shape, order, dtype=stored.dtype, device=device)
    if stored.sharding is None:
        fills.add_fill(local, stored)
        return local
    assert is_dtensor(like)
    whole = rebuild_dtensor(local, stored.sharding, like)  # type: ignore[arg-type]
    # Not `local`: a DTensor copies its local tensor to the device of its mesh if that is another.
    fills.add_fill(local_tensor(whole), stored)
    return whole


def is_plain(target: torch.Tensor) -> bool:
    """Return whether a tensor may be filled by writing bytes into its memory.

    Not an inference tensor: torch forbids writes to it outside inference mode.
    """
    return is_raw(target) and not target.is_inference()


def _copy(rows: NDArray[np.int64]) -> None:
    """Copy ranges, rows of (source, target, length), with the effect of copying them in order.

    Of ranges with the same target and length (tied tensors) only the last is copied. If targets
    still overlap, ``copy_many`` may not copy them together, so they are copied one by one.
    """
    ordered = rows[np.argsort(rows[:, 1], kind="stable")]
    last = np.append((ordered[1:, 1:] != ordered[:-1, 1:]).any(axis=1), True)
    ordered = ordered[last]
    begins, ends = ordered[:, 1], ordered[:, 1] + ordered[:, 2]
    if (begins[1:] >= np.maximum.accumulate(ends)[:-1]).all():
        copy_many(ordered, threads=COPY_THREADS)
        return
    for row in rows:
        copy_many(row[None, :])
