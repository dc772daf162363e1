"""Saving: a state is planned (what goes where, values snapshotted) and then written into a slot."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

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


class _PlanColumns(NamedTuple):
    """What decides the places of the tensors, by index; ``owners`` gives what each is tied to.

    Columns, because a call or an object for each of 20,000 tensors would show in every save.
    """

    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    owners: list[int]
    shardings: dict[int, Sharding]


class _Layout(NamedTuple):
    """The part of a plan that outlives it: places and names, no tensors."""

    paths: tuple[Path, ...]
    covered: frozenset[int]  # indices of the tensors that all ranks are said to have
    columns: _PlanColumns
    names: bytes  # packed
    owned: NDArray[np.int64]  # indices of the tensors that are stored
    entries: list[TensorEntry]  # of those
    places: NDArray[np.int64]  # of those: begin and bytes
    header: str
    data_bytes: int
    claimed: tuple[int, ...]  # those of the covered ones that are stored in shares
    claimed_bytes: NDArray[np.int64]
    claimed_names: tuple[str, ...]
    claimed_form: bytes


class ShardPlan:
    """What ``write`` will put where, made by ``plan_shard``.

    Holds references to the state's tensors until ``write`` returns. Kept afterwards, it serves as
    ``previous`` for the next plan. ``claim``, once written, is what other ranks must have as well.
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
        self._make_claim(threads)
        self._parts, self._values = None, b""  # a plan kept as `previous` is small

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
    def of(
        cls,
        state: dict[Any, Any],
        previous: Self | None,
        boxes: Mapping[Path, Sharding],
        replicas: Replicas | None,
    ) -> Self:
        """See ``plan_shard``."""
        flat = flatten(state)
        shardings = previous._shardings if previous else Shardings()
        layout = previous._layout if previous else None
        if layout is not None and layout.paths != flat.paths:
            layout = None
        covered = layout.covered if layout else _covered(state, flat.paths, replicas)
        parts = Parts.of(flat.tensors, flat.paths, shardings, replicas, covered)
        if boxes:
            parts.shardings.update(
                (index, boxes[path]) for index, path in enumerate(flat.paths) if path in boxes
            )
        columns = _PlanColumns(parts.dtypes, parts.shapes, parts.owners(), parts.shardings)
        if layout is None or layout.columns != columns:
            layout = _arrange(flat.paths, covered, columns)
        # An array of two, of which the first is packed already.
        values = b"\x92" + layout.names + msgpack.packb(flat.tree)
        return cls(layout, parts, values, shardings)


def plan_shard(
    state: dict[Any, Any],
    *,
    previous: ShardPlan | None = None,
    boxes: Mapping[Path, Sharding] | None = None,
    replicas: Replicas | None = None,
) -> ShardPlan:
    """Plan the shard of ``state``: a dict of tensors, values and objects, nested at will.

    Values are captured now, tensors by ``ShardPlan.write``; ``state_dict()`` is called on modules,
    optimizers and the like. ``previous``, the plan of an earlier save, spares the work on names and
    header if they are still the same (and must be of the same ``replicas``); it is never needed for
    correctness. ``boxes`` says of plain tensors, by their paths, which part of a global tensor they
    are. Of the plain tensors that ``replicas`` names a share is stored. Raises
    ``UnsupportedState``, with the path, for what cannot be stored, before anything is written, and
    ``InvalidConfig`` for ``replicas`` that name nothing.
    """
    with collector_paused():
        return ShardPlan.of(state, previous, boxes or {}, replicas)


def _covered(
    state: dict[Any, Any], paths: tuple[Path, ...], replicas: Replicas | None
) -> frozenset[int]:
    if replicas is None or not replicas.patterns:
        return frozenset()
    replicas.check(state)
    return frozenset(index for index, path in enumerate(paths) if replicas.covers(path))


def _arrange(paths: tuple[Path, ...], covered: frozenset[int], columns: _PlanColumns) -> _Layout:
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
    shardings = {
        names[index]: columns.shardings[index] for index in owned if index in columns.shardings
    }
    entries = arrange(described, shardings)
    notes = ShardNotes(
        dtypes=dtypes,
        aliases={
            names[index]: names[owner]
            for index, owner in enumerate(columns.owners)
            if owner != index
        },
        shardings=shardings,
    )
    places = [(entry.begin, entry.end - entry.begin) for entry in entries]
    claimed = [
        index
        for index in owned
        if (part := columns.shardings.get(index)) is not None and part.plain
    ]
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
        claimed=tuple(claimed),
        claimed_bytes=np.array(
            [
                columns.dtypes[index].itemsize * math.prod(columns.shardings[index].shape)
                for index in claimed
            ],
            np.int64,
        ),
        claimed_names=tuple(names[index] for index in claimed),
        claimed_form=form_of(
            [
                (names[index], columns.dtypes[index], columns.shardings[index].shape)
                for index in claimed
            ]
        ),
    )
