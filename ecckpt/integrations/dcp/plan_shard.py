"""Translates DCP's plans into the state of a shard, and shards into metadata for DCP.

``writer.py`` uses the first half, ``reader.py`` the second, ``export.py`` and ``importer.py`` the
notes. The state of a shard that was saved through DCP is a flat dict (docs/FORMAT.md): under each
of DCP's names the tensor, its boxes, or the value that this rank writes, and ``DcpNotes`` under
``NOTES``. There is no other metadata: a reader makes DCP's from the shards of all ranks.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ecckpt.errors import CorruptFragment, InvalidConfig, StateMismatch, UnsupportedState
from ecckpt.state.paths import Path
from ecckpt.state.tensors.sharding import Sharding, Shardings, box_of, is_dtensor
from ecckpt.state.tensors.tensors import part_of
from ecckpt.state.tree.nodes import StoredTensor
from ecckpt.state.tree.tree import flatten, holds, is_stateful

Sizes = tuple[int, ...]

NOTES = "dcp%notes"
_FORMAT = 1
_INDEX_MAX = 1 << 20  # bounds the list that torch makes from a path with a list index in it
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_HINT_RENAME = "give each rank a name of its own for it"


@dataclass(frozen=True, slots=True)
class DcpNotes:
    """What a shard stores beside its entries.

    Attributes:
        values: the names that have values; all others have tensors.
        paths: the keys in the nested state that a name joins.
        digests: CRC-32 of what this rank had under each name that is not sharded, whether this rank
            was the one to write it or not. They must be equal on all ranks.
    """

    values: tuple[str, ...] = ()
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    digests: Mapping[str, int] = field(default_factory=dict)

    def render(self) -> dict[str, Any]:
        """Return the notes as plain values, which a shard can hold."""
        return {
            "format": _FORMAT,
            "values": list(self.values),
            "paths": {name: list(path) for name, path in self.paths.items()},
            "digests": dict(self.digests),
        }

    @classmethod
    def pop_from(cls, tree: dict[Any, Any]) -> DcpNotes | None:
        """Remove the notes from a shard's tree and parse them.

        None: the shard was not saved through DCP. Raises ``CorruptFragment`` for malformed notes.
        """
        fields = tree.pop(NOTES, None)
        if fields is None:
            return None
        try:
            if fields["format"] != _FORMAT:
                raise ValueError(f"format {fields['format']!r:.20}")
            return cls(
                tuple(_checked(name, str) for name in fields["values"]),
                cls.checked_paths(fields["paths"].items()),
                {
                    _checked(name, str): _checked(digest, int)
                    for name, digest in fields["digests"].items()
                },
            )
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise CorruptFragment(f"the DCP notes of a shard cannot be read: {error}") from error

    @staticmethod
    def checked_paths(pairs: Iterable[tuple[Any, Any]]) -> dict[str, tuple[str | int, ...]]:
        """Check untrusted ``paths``; raises ``TypeError`` or ``ValueError`` for malformed ones."""
        return {_checked(name, str): _path(name, at) for name, at in pairs}


def check_id(given: str | os.PathLike[str] | None, own: str) -> None:
    """Raise ``InvalidConfig`` for a ``checkpoint_id`` other than "run/step"."""
    if given is not None and os.fspath(given) != own:
        raise InvalidConfig(
            f"checkpoint_id={os.fspath(given)!r:.80}, but this is {own}",
            hint="leave checkpoint_id out: run and step identify the checkpoint",
        )


def uncovered(shape: Sizes, boxes: Sequence[tuple[Sizes, Sizes]]) -> str:
    """Return why boxes (offset, shape) do not fill a tensor exactly once; empty if they do."""
    full = [(offset, box) for offset, box in boxes if 0 not in box]
    have, need = sum(math.prod(box) for _, box in full), math.prod(shape)
    if have != need or not boxes:
        return f"{have:,} of {need:,} elements were saved"
    if len(full) > 1:
        starts = np.array([offset for offset, _ in full], np.int64)
        ends = starts + np.array([box for _, box in full], np.int64)
        overlap = ((starts[:, None] < ends) & (starts < ends[:, None])).all(axis=2)
        if overlap.sum() > len(full):  # each box overlaps itself
            return "some elements were saved twice, and others not"
    return ""


# -- saving ---------------------------------------------------------------------------------------


def shard_state(
    plan: SavePlan, planner: SavePlanner, *, ranks: int
) -> tuple[dict[str, Any], dict[Path, Sharding], DcpNotes]:
    """Make the state of this rank's shard from DCP's plan.

    Tensors come from the planner's ``resolve_data``. Values are looked up in the planner: they are
    not pickled.

    Args:
        plan: what this rank writes.
        planner: DCP's planner of this save.
        ranks: number of all ranks. With more than one, the notes have digests to compare.

    Returns:
        The state, the boxes of its tensors by path (see ``plan_shard`` of the snapshot), the notes.

    Raises:
        UnsupportedState: something in the plan cannot be stored.
    """
    pieces: dict[str, list[tuple[torch.Tensor, Sharding | None]]] = {}
    values: dict[str, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        if name == NOTES:
            raise UnsupportedState(name, "an entry of this name", hint="rename it")
        if item.type == WriteItemType.BYTE_IO:
            values[name] = _value(item, planner)
        else:
            pieces.setdefault(name, []).append(_piece(item, planner))
    boxes: dict[Path, Sharding] = {}
    state: dict[str, Any] = {}
    for name, parts in pieces.items():
        single = len(parts) == 1
        state[name] = parts[0][0] if single else [tensor for tensor, _ in parts]
        for index, (_, box) in enumerate(parts):
            if box is not None:
                boxes[(name,) if single else (name, index)] = box
    notes = DcpNotes(tuple(values), _paths(plan), _digests(planner) if ranks > 1 else {})
    return {**state, **values, NOTES: notes.render()}, boxes, notes


def disagreements(digests: Iterable[Mapping[str, int]]) -> list[str]:
    """Compare the digests of all ranks, in order; return a text for each name that differs."""
    first: dict[str, tuple[int, int]] = {}
    problems: dict[str, str] = {}
    for rank, own in enumerate(digests):
        for name, digest in own.items():
            owner, known = first.setdefault(name, (rank, digest))
            if known != digest:
                problems.setdefault(
                    name,
                    f"{name}: not the same on rank {owner} and rank {rank}, and DCP keeps one of "
                    f"them; {_HINT_RENAME}",
                )
    return list(problems.values())


def _piece(item: WriteItem, planner: SavePlanner) -> tuple[torch.Tensor, Sharding | None]:
    name, data = item.index.fqn, item.tensor_data
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor) or data is None or data.chunk is None:
        raise UnsupportedState(
            name,
            f"a {type(tensor).__name__} that the planner returned for a tensor",
            hint="the planner's resolve_data must return a tensor",
        )
    tensor = tensor.detach()
    if tuple(tensor.shape) != tuple(data.chunk.sizes):
        kind = f"a part of shape {list(tensor.shape)} planned as {list(data.chunk.sizes)}"
        raise UnsupportedState(name, kind, hint="the planner must not change shapes")
    whole = item.type == WriteItemType.TENSOR
    return tensor, None if whole else box_of(tuple(data.size), tuple(data.chunk.offsets))


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    name = item.index.fqn
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise UnsupportedState(
            name,
            f"a value of {type(planner).__name__}, which would pickle it",
            hint="derive the planner from DefaultSavePlanner, or give it lookup_object(index)",
        )
    value = look_up(item.index)
    _check_value(name, value)
    return value


def _check_value(name: str, value: Any) -> None:
    if holds(value, lambda node: isinstance(node, torch.Tensor) and is_dtensor(node)):
        raise UnsupportedState(name, "a DTensor inside a value", hint="use a list or a dict")
    if holds(value, is_stateful):
        hint = "put what its state_dict() returns there"
        raise UnsupportedState(name, "an object with a state inside the state", hint=hint)


def _paths(plan: SavePlan) -> dict[str, tuple[str | int, ...]]:
    """Return the place of each planned name in the nested state, if the planner tells it.

    Other planner data than that of DCP's own planner cannot be stored.
    """
    if plan.planner_data is None:
        return {}
    try:
        known = {item.index.fqn: plan.planner_data[item.index.fqn] for item in plan.items}
        return {name: _path(name, path) for name, path in known.items()}
    except (TypeError, ValueError, LookupError) as error:
        kind = f"planner data other than paths of names ({error})"
        raise UnsupportedState("SavePlan.planner_data", kind, hint="leave it out") from error


def _path(name: str, path: Iterable[Any]) -> tuple[str | int, ...]:
    keys = tuple(path)
    if ".".join(map(str, keys)) != name or not keys:
        raise ValueError(f"a path that does not join to {name!r:.80}")
    for key in keys:
        if type(key) is not str and not (type(key) is int and 0 <= key < _INDEX_MAX):
            raise ValueError(f"{key!r:.40} in the path of {name!r:.80}")
    return keys


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not of type {kind.__name__}")
    return value


def _digests(planner: SavePlanner) -> dict[str, int]:
    """Return a CRC-32 of each value and plain tensor in the planner's state.

    DCP assumes that these are equal on all ranks and writes those of one rank. ``disagreements``
    checks it. A planner without ``state_dict`` gives no digests.
    """
    digests = {}
    for name, value in getattr(planner, "state_dict", {}).items():
        if isinstance(value, torch.Tensor) and type(value) not in _PLAIN_TENSORS:
            continue  # sharded, or a class that `_piece` refuses if this rank has to write it
        _check_value(name, value)
        flat = flatten({name: value})
        digest = zlib.crc32(flat.tree)
        for tensor, path in zip(flat.tensors, flat.paths, strict=True):
            part_of(tensor, path, Shardings())  # raises for tensors without plain bytes
            digest = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)} ".encode(), digest)
            digest = zlib.crc32(_raw(tensor), digest)
        digests[name] = digest
    return digests


def _raw(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1): for a single element it keeps whatever stride the tensor has, and torch views
    # only tensors of stride 1 as bytes.
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    raw: Any = flat.numpy()
    return memoryview(raw)


# -- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a generation for DCP.

    Attributes:
        metadata: DCP's, for planning.
        tensors: (name, offset of a box) -> (rank that saved it, name in that rank's shard).
        values: name -> (rank that saved it, node of that rank's tree).
    """

    metadata: Metadata
    tensors: Mapping[tuple[str, tuple[int, ...]], tuple[int, str]]
    values: Mapping[str, tuple[int, Any]]


def read_contents(trees: Iterable[dict[Any, Any]]) -> Contents:
    """Make DCP's metadata from the trees of all shards, in the order of the ranks.

    Raises:
        StateMismatch: the generation was not saved through DCP, ranks differ in something that is
            not sharded, or boxes do not fill their tensor.
        CorruptFragment: a tree that ``shard_state`` cannot have made.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    tensors: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    values: dict[str, tuple[int, Any]] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    digests = []
    for rank, tree in enumerate(trees):
        notes = DcpNotes.pop_from(tree)
        if notes is None:
            raise StateMismatch(
                [
                    f"rank {rank}: not saved through DCP: load it with Checkpointer.restore(), or "
                    "make a DCP folder with ecckpt export --to dcp"
                ]
            )
        digests.append(notes.digests)
        paths |= notes.paths
        for name, node in tree.items():
            if name in notes.values:
                entries[name], values[name] = BytesStorageMetadata(), (rank, node)
                continue
            if node == []:
                raise CorruptFragment(f"{name!r:.80}: a tensor without boxes")
            for stored in node if isinstance(node, list) else [node]:
                offset = _add_chunk(entries, name, stored)
                tensors[name, offset] = rank, stored.name
    problems = disagreements(digests) + _gaps(entries)
    if problems:
        raise StateMismatch(problems)
    planner_data = {name: paths[name] for name in entries if name in paths} or None
    return Contents(Metadata(entries, planner_data), tensors, values)


def _add_chunk(entries: dict[str, Any], name: str, stored: Any) -> tuple[int, ...]:
    """Add a stored box to DCP's metadata of its tensor; return the offset of the box."""
    if type(name) is not str or type(stored) is not StoredTensor:
        raise CorruptFragment(f"{name!r:.80} is neither a tensor nor noted as a value")
    local = tuple(stored.shape)
    box = stored.sharding or box_of(local, (0,) * len(local))
    shape, offset = box.shape, box.offset or ()
    if not len(offset) == len(local) == len(shape) or any(
        begin + size > whole for begin, size, whole in zip(offset, local, shape, strict=True)
    ):
        raise CorruptFragment(f"{name!r:.80}: a part is not a box of its tensor")
    known = entries.setdefault(
        name,
        TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(shape), []),
    )
    if not isinstance(known, TensorStorageMetadata) or (
        (tuple(known.size), known.properties.dtype) != (shape, stored.dtype)
    ):
        raise StateMismatch([f"{name}: not the same kind of tensor on all ranks that saved it"])
    known.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(local)))
    return offset


def _gaps(entries: Mapping[str, Any]) -> list[str]:
    """Return a text for each tensor that its boxes do not fill.

    DCP's load planner does not check it: elements without a box would keep their live values.
    """
    problems = []
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            problem = uncovered(tuple(entry.size), boxes)
            problems += [f"{name}: {problem}"] if problem else []
    return problems
