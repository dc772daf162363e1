"""Saving: a state is planned (what goes where, values snapshotted) and then written into a slot."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple, Self

import msgpack
import numpy as np
import torch

from ecckpt.copying import copy_many
from ecckpt.errors import InvalidBuffer, UnsupportedState, WrongOrder
from ecckpt.state.dtypes import BYTES_NAMES, CODE_OF
from ecckpt.state.layout import (
    HEADER_BYTES_MAX,
    Entry,
    arrange,
    render_entries,
    render_header,
)
from ecckpt.state.metadata import Notes
from ecckpt.state.paths import Path, tensor_names
from ecckpt.state.sharding import Sharding, Shardings
from ecckpt.state.tensors import Part, is_raw, memory_key, part_of, share_of
from ecckpt.state.tree import flatten


class _Slot(NamedTuple):
    """What decides a tensor's place; ``owner`` indexes the tensor it is tied to, or itself."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    owner: int
    sharding: Sharding | None


class _Layout(NamedTuple):
    """The part of a plan that outlives it: places and names, no tensors."""

    paths: tuple[Path, ...]
    slots: list[_Slot]
    names: list[str]
    entries: dict[int, Entry]  # by index of the owner
    header: str
    data_bytes: int


class ShardPlan:
    """What ``write`` will put where, made by ``plan_shard``.

    Holds references to the state's tensors until ``write`` returns. Kept afterwards, it serves as
    ``previous`` for the next plan.
    """

    def __init__(
        self, layout: _Layout, parts: list[Part], values: bytes, shardings: Shardings
    ) -> None:
        self._layout = layout
        self._parts: list[Part] | None = parts
        self._values = values
        self._shardings = shardings
        self._header = render_header(
            layout.header, data_bytes=layout.data_bytes, values_bytes=len(values)
        )
        if len(self._header) > HEADER_BYTES_MAX:
            raise UnsupportedState("state", "this many tensors", hint="store them in fewer tensors")
        self.shard_bytes = len(self._header) + layout.data_bytes + len(values)

    def write(self, target: memoryview | mmap.mmap, *, threads: int = 1) -> None:
        """Fill the first ``shard_bytes`` of ``target``, once; then forget the state's tensors.

        The caller owns ``target`` throughout. Raises ``InvalidBuffer`` if it is too short or
        read-only, ``WrongOrder`` on a second call. Nothing in the state may change its shape or
        storage between ``plan_shard`` and this call; after it the state may change at will.
        """
        if self._parts is None:
            raise WrongOrder("this plan is written already", hint="plan_shard() for each save")
        buffer = memoryview(target).cast("B")
        if buffer.readonly or len(buffer) < self.shard_bytes:
            raise InvalidBuffer(
                f"a shard of {self.shard_bytes} bytes into "
                f"{len(buffer)} {'read-only' if buffer.readonly else 'writable'} bytes"
            )
        data_start, data_bytes = len(self._header), self._layout.data_bytes
        buffer[:data_start] = self._header
        buffer[data_start + data_bytes : self.shard_bytes] = self._values
        if data_bytes:
            self._write_tensors(buffer[data_start : data_start + data_bytes], threads)
        self._parts, self._values = None, b""  # a plan kept as `previous` is small

    def _write_tensors(self, data: memoryview, threads: int) -> None:
        assert self._parts is not None
        address = np.frombuffer(data, np.uint8).ctypes.data
        rows: list[tuple[int, int, int]] = []
        for index, entry in self._layout.entries.items():
            local = self._parts[index].local
            if entry.begin == entry.end:
                continue
            if is_raw(local):
                rows.append((local.data_ptr(), address + entry.begin, entry.end - entry.begin))
            else:
                _write_tensor(data, entry, local)
        if rows:
            copy_many(np.array(rows, np.int64), threads=threads)

    @classmethod
    def of(cls, state: dict[Any, Any], previous: Self | None) -> Self:
        """See ``plan_shard``."""
        flat = flatten(state)
        shardings = previous._shardings if previous else Shardings()
        parts = [
            share_of(part_of(tensor, path, shardings))
            for tensor, path in zip(flat.tensors, flat.paths, strict=True)
        ]
        slots = _slots(parts)
        layout = previous._layout if previous else None
        if layout is None or layout.paths != flat.paths or layout.slots != slots:
            layout = _arrange(flat.paths, slots)
        return cls(layout, parts, msgpack.packb([layout.names, flat.tree]), shardings)


def plan_shard(state: dict[Any, Any], *, previous: ShardPlan | None = None) -> ShardPlan:
    """Plan the shard of ``state``: a dict of tensors, values and objects, nested at will.

    Values are captured now, tensors by ``ShardPlan.write``; ``state_dict()`` is called on modules,
    optimizers and the like. ``previous``, the plan of an earlier save, spares the work on names and
    header if they are still the same; it is never needed for correctness. Raises
    ``UnsupportedState``, with the path, for what cannot be stored, before anything is written.
    """
    return ShardPlan.of(state, previous)


def _slots(parts: list[Part]) -> list[_Slot]:
    owners: dict[Any, int] = {}
    slots = []
    for index, part in enumerate(parts):
        key = memory_key(part)
        owner = index if key is None else owners.setdefault(key, index)
        slots.append(_Slot(part.local.dtype, tuple(part.local.shape), owner, part.sharding))
    return slots


def _arrange(paths: tuple[Path, ...], slots: list[_Slot]) -> _Layout:
    try:
        names = tensor_names(paths)
    except ValueError as error:
        raise UnsupportedState("state", str(error), hint="rename one of their keys") from error
    owners = [index for index, slot in enumerate(slots) if slot.owner == index]
    described = []
    dtypes: dict[str, str] = {}
    for index in owners:
        dtype, shape, _, _ = slots[index]
        align_bytes = dtype.itemsize
        if dtype in BYTES_NAMES:
            dtypes[names[index]] = BYTES_NAMES[dtype]
            shape, dtype = (*shape, align_bytes), torch.uint8
        described.append((names[index], CODE_OF[dtype], shape, align_bytes))
    shardings = {names[i]: part for i in owners if (part := slots[i].sharding) is not None}
    entries = arrange(described, shardings)
    notes = Notes(
        dtypes=dtypes,
        aliases={
            names[index]: names[slot.owner]
            for index, slot in enumerate(slots)
            if slot.owner != index
        },
        shardings=shardings,
    )
    return _Layout(
        paths=paths,
        slots=slots,
        names=names,
        entries=dict(zip(owners, entries, strict=True)),
        header=render_entries(entries, notes.render()),
        data_bytes=max((entry.end for entry in entries), default=0),
    )


def _write_tensor(data: memoryview, entry: Entry, local: torch.Tensor) -> None:
    """For other devices and layouts: torch's copy resolves strides, conjugation and negation."""
    place = torch.frombuffer(data, dtype=torch.uint8)[entry.begin : entry.end]
    place.view(local.dtype).view(local.shape).copy_(local.detach())
