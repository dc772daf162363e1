"""Saving a state in two steps: ``plan_shard`` lays the shard out, ``ShardPlan.write`` copies it.

``client/save`` plans while it waits for a slot, and writes into the slot. A plan has the values of
the state already; tensors are copied by ``write``. Names, layout and header of a plan are reused by
the next one, because they rarely change between saves.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray

from ecckpt.errors import InvalidBuffer, UnsupportedState, WrongOrder
from ecckpt.memory.buffers import copy_many
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.state.file.layout import (
    HEADER_BYTES_MAX,
    TensorEntry,
    arrange,
    render_entries,
    render_header,
)
from ecckpt.state.file.metadata import ShardNotes
from ecckpt.state.paths import Path, tensor_names
from ecckpt.state.snapshot.parts import Parts
from ecckpt.state.snapshot.replicas import Claim, Replicas, checksums, form_of
from ecckpt.state.tensors.devices import Pair, SideCopies, gpu_of
from ecckpt.state.tensors.dtypes import BYTES_NAMES, CODE_OF
from ecckpt.state.tensors.sharding import Sharding, Shardings
from ecckpt.state.tree.tree import flatten

_V = TypeVar("_V")


class _PlanColumns(NamedTuple):
    """Everything that the layout of a shard depends on, one list per attribute.

    If these are equal to those of the previous plan, its layout is reused. They are columns,
    because a call or an object per tensor is noticeable in each save of 20,000 tensors.

    ``owners`` has for each tensor the index of the tensor that it is tied to, or its own;
    ``orders`` the order in memory of tensors that are not in C order.
    """

    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    owners: list[int]
    shardings: dict[int, Sharding]
    orders: dict[int, tuple[int, ...]]


class _Layout(NamedTuple):
    """The part of a plan that the next plan may reuse. It holds no tensors.

    "Covered" tensors are declared equal on all ranks; "claimed" are the covered ones whose equality
    is checked (``replicas.py``): those stored in shares, and scalars.
    """

    paths: tuple[Path, ...]  # of all tensors
    covered: frozenset[int]  # indices
    columns: _PlanColumns
    names: bytes  # of all tensors, as msgpack
    owned: NDArray[np.int64]  # indices of the stored tensors: all without ties
    entries: list[TensorEntry]  # of the stored tensors
    places: NDArray[np.int64]  # of the stored tensors: (begin in the data, length), in bytes
    header: str  # JSON without the values blob
    data_bytes: int  # of all tensors
    claimed: tuple[int, ...]  # indices
    claimed_bytes: NDArray[np.int64]  # length of each whole tensor
    claimed_names: tuple[str, ...]
    claimed_form: bytes  # digest of names, dtypes and shapes


class ShardPlan:
    """The layout of one shard, and the state that ``write`` copies into it; see ``plan_shard``.

    It holds references to the tensors of the state until ``write`` returns. Afterwards it serves as
    ``previous`` of the next plan.

    Attributes:
        shard_bytes: length of the shard.
        claim: after ``write``, the checksums of the tensors declared equal on all ranks, to be
            compared with those of other ranks; None if there are none.
    """

    def __init__(self, layout: _Layout, parts: Parts, values: bytes, shardings: Shardings) -> None:
        self._layout = layout
        self._parts: Parts | None = parts
        self._values = values
        self._shardings = shardings
        self.claim: Claim | None = None
        self._header = render_header(
            layout.header, data_bytes=layout.data_bytes, values_bytes=len(values)
        )
        if len(self._header) > HEADER_BYTES_MAX:
            raise UnsupportedState("state", "this many tensors", hint="store them in fewer tensors")
        self.shard_bytes = len(self._header) + layout.data_bytes + len(values)

    def write(self, target: memoryview | mmap.mmap, *, threads: int = 1) -> None:
        """Write the shard into the first ``shard_bytes`` of ``target``; then release the tensors.

        No tensor of the state may change its shape or storage between ``plan_shard`` and this call.
        When it returns all bytes are copied, those of GPUs included, and the state may change.

        Args:
            target: a writable buffer; the caller owns it.
            threads: the largest number of threads that copy.

        Raises:
            InvalidBuffer: ``target`` is too short or read-only.
            WrongOrder: the plan has been written before.
        """
        if self._parts is None:
            raise WrongOrder(
                "this plan has been written already", hint="call plan_shard() for each save"
            )
        buffer = memoryview(target).cast("B")
        if buffer.readonly or len(buffer) < self.shard_bytes:
            raise InvalidBuffer(
                f"cannot write a shard of {self.shard_bytes} bytes into "
                f"{len(buffer)} {'read-only' if buffer.readonly else 'writable'} bytes"
            )
        data_start, data_bytes = len(self._header), self._layout.data_bytes
        buffer[:data_start] = self._header
        buffer[data_start + data_bytes : self.shard_bytes] = self._values
        if data_bytes:
            self._write_tensors(buffer[data_start : data_start + data_bytes], threads)
        self._make_claim(threads)
        # The client keeps the plan as `previous`: without these it is small and holds no tensors.
        self._parts, self._values = None, b""

    def _write_tensors(self, data: memoryview, threads: int) -> None:
        assert self._parts is not None
        layout = self._layout
        raw = np.array(self._parts.raw, bool)[layout.owned]
        sources = np.array(self._parts.addresses, np.int64)[layout.owned]
        begins, sizes = layout.places.T
        places = torch.frombuffer(data, dtype=torch.uint8)
        on_gpus: list[Pair] = []
        others: list[Pair] = []
        for index in np.flatnonzero(~raw & (sizes > 0)):
            local, entry = self._parts.locals[layout.owned[index]], layout.entries[index]
            place = places[entry.begin : entry.end].view(local.dtype).view(local.shape)
            (others if gpu_of(local) is None else on_gpus).append((place, local.detach()))
        # The copies from GPUs are queued first: they proceed while this thread copies CPU memory.
        with SideCopies() as copies:
            copies.to_host(on_gpus, data)
            for place, local in others:
                place.copy_(local)  # resolves strides, conjugation and negation
            targets = begins + np.frombuffer(data, np.uint8).ctypes.data
            rows = np.column_stack((sources, targets, sizes))[raw & (sizes > 0)]
            if len(rows):
                copy_many(rows, threads=threads)

    def _make_claim(self, threads: int) -> None:
        assert self._parts is not None
        layout = self._layout
        if layout.claimed:
            wholes = [self._parts.wholes[index] for index in layout.claimed]
            sums = checksums(wholes, layout.claimed_bytes, threads=threads)
            self.claim = Claim(layout.claimed_names, layout.claimed_form, sums)

    @classmethod
    def of_state(
        cls,
        state: dict[Any, Any],
        previous: Self | None,
        boxes: Mapping[Path, Sharding],
        replicas: Replicas | None,
    ) -> Self:
        """Make a plan; ``plan_shard`` documents the arguments."""
        flat = flatten(state)
        shardings = previous._shardings if previous else Shardings()
        layout = previous._layout if previous else None
        if layout is not None and layout.paths != flat.paths:
            layout = None
        covered = layout.covered if layout else _covered(state, flat.paths, replicas)
        parts = Parts.of_tensors(flat.tensors, flat.paths, shardings, replicas, covered)
        if boxes:
            parts.shardings.update(
                (index, boxes[path]) for index, path in enumerate(flat.paths) if path in boxes
            )
        columns = _PlanColumns(
            parts.dtypes, parts.shapes, parts.owners(), parts.shardings, parts.layouts()
        )
        if layout is None or layout.columns != columns:
            layout = _arrange(flat.paths, covered, columns, claimed=parts.wholes)
            parts.require_memory(flat.paths)
        elif 0 in parts.addresses:
            # Not for all tensors at each save, which takes too long: a storage that is taken away
            # between saves leaves no address. Empty tensors have none either.
            parts.require_memory(flat.paths)
        # The values blob is a msgpack array of two, [names, tree]: its head (0x92), the names as
        # the layout has packed them, and the tree.
        values = b"\x92" + layout.names + msgpack.packb(flat.tree)
        return cls(layout, parts, values, shardings)


def plan_shard(
    state: dict[Any, Any],
    *,
    previous: ShardPlan | None = None,
    boxes: Mapping[Path, Sharding] | None = None,
    replicas: Replicas | None = None,
) -> ShardPlan:
    """Plan the shard of a state.

    Values are captured by this call, tensors by ``ShardPlan.write``. It calls ``state_dict()`` of
    modules, optimizers and other objects that have one.

    Args:
        state: a dict of tensors, values and objects, nested as you like; owned by the caller.
        previous: the plan of an earlier save with the same ``replicas``. It saves the work on names
            and header if these have not changed; the result does not depend on it.
        boxes: which part of a global tensor a plain tensor is, by its path.
        replicas: the plain tensors that are equal on all ranks: this rank stores a share of each.

    Raises:
        UnsupportedState: something in the state cannot be stored; the message has its path.
        InvalidConfig: a pattern in ``replicas`` names nothing in the state.
    """
    with collector_paused():
        return ShardPlan.of_state(state, previous, boxes or {}, replicas)


def _covered(
    state: dict[Any, Any], paths: tuple[Path, ...], replicas: Replicas | None
) -> frozenset[int]:
    if replicas is None or not replicas.patterns:
        return frozenset()
    replicas.check(state)
    return frozenset(index for index, path in enumerate(paths) if replicas.covers(path))


def _by_name(values: Mapping[int, _V], names: Sequence[str], owned: Sequence[int]) -> dict[str, _V]:
    return {names[index]: values[index] for index in owned if index in values}


def _arrange(
    paths: tuple[Path, ...],
    covered: frozenset[int],
    columns: _PlanColumns,
    *,
    claimed: Collection[int],
) -> _Layout:
    try:
        names = tensor_names(paths)
    except ValueError as error:
        raise UnsupportedState("state", str(error), hint="rename one of their keys") from error
    owned = [index for index, owner in enumerate(columns.owners) if owner == index]
    described = []
    dtypes: dict[str, str] = {}
    for index in owned:
        dtype, shape = columns.dtypes[index], tuple(columns.shapes[index])
        align_bytes = dtype.itemsize
        if dtype in BYTES_NAMES:
            dtypes[names[index]] = BYTES_NAMES[dtype]
            shape, dtype = (*shape, align_bytes), torch.uint8
        described.append((names[index], CODE_OF[dtype], shape, align_bytes))
    shardings = _by_name(columns.shardings, names, owned)
    entries = arrange(described, shardings)
    notes = ShardNotes(
        dtypes=dtypes,
        aliases={
            names[index]: names[owner]
            for index, owner in enumerate(columns.owners)
            if owner != index
        },
        shardings=shardings,
        layouts=_by_name(columns.orders, names, owned),
    )
    places = [(entry.begin, entry.end - entry.begin) for entry in entries]
    claims = [index for index in owned if index in claimed]
    forms = [(names[index], columns.dtypes[index], _shape(columns, index)) for index in claims]
    return _Layout(
        paths=paths,
        covered=covered,
        columns=columns,
        names=msgpack.packb(names),
        owned=np.array(owned, np.int64),
        entries=entries,
        places=np.array(places, np.int64).reshape(-1, 2),
        header=render_entries(entries, notes.render()),
        data_bytes=max((entry.end for entry in entries), default=0),
        claimed=tuple(claims),
        claimed_bytes=np.array([_whole_bytes(dtype, shape) for _, dtype, shape in forms], np.int64),
        claimed_names=tuple(name for name, *_ in forms),
        claimed_form=form_of(forms),
    )


def _shape(columns: _PlanColumns, index: int) -> tuple[int, ...]:
    """The shape of the whole tensor that a rank may store a share of."""
    sharding = columns.shardings.get(index)
    return tuple(columns.shapes[index]) if sharding is None else sharding.shape


def _whole_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)
