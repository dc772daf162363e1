"""What DCP planned, as the state of a shard, and shards as the metadata that DCP plans from.

A shard that DCP's planner filled is a flat dict: DCP's names, each with the tensor (or the boxes of
one) or value that this rank writes, and under ``NOTES`` what the names do not tell. There is no
other metadata: a reader makes DCP's own from the shards of all ranks.
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
_INDEX_MAX = 1 << 20  # of an element of a list: torch makes lists that long from a path
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_OWN_NAME = "give each rank a name of its own for it"


@dataclass(frozen=True, slots=True)
class DcpNotes:
    """What a shard says beside its entries.

    ``values`` are the names that hold values (all others hold tensors), ``paths`` where names stood
    in the nested state, ``digests`` what this rank had under each name that is not sharded, whether
    it was the one to write it or not.
    """

    values: tuple[str, ...] = ()
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    digests: Mapping[str, int] = field(default_factory=dict)

    def render(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "format": _FORMAT,
            "values": list(self.values),
            "paths": {name: list(path) for name, path in self.paths.items()},
            "digests": dict(self.digests),
        }

    @classmethod
    def take(cls, tree: dict[Any, Any]) -> DcpNotes | None:
        """Out of a shard's tree; None if DCP did not plan it. ``CorruptFragment`` if malformed."""
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
            raise CorruptFragment(f"notes of DCP's that cannot be read: {error}") from error

    @staticmethod
    def checked_paths(pairs: Iterable[tuple[Any, Any]]) -> dict[str, tuple[str | int, ...]]:
        """``paths`` from outside; ``TypeError`` or ``ValueError`` if they cannot be some."""
        return {_checked(name, str): _path(name, at) for name, at in pairs}


def check_id(given: str | os.PathLike[str] | None, own: str) -> None:
    """Raise ``InvalidConfig`` for a ``checkpoint_id`` that is not what run and step say."""
    if given is not None and os.fspath(given) != own:
        raise InvalidConfig(
            f"checkpoint_id={os.fspath(given)!r:.80}, but this is {own}",
            hint="leave checkpoint_id out: run and step say which checkpoint it is",
        )


def uncovered(shape: Sizes, boxes: Sequence[tuple[Sizes, Sizes]]) -> str:
    """Why boxes (offset, shape) within a tensor do not fill it, each element once; else empty."""
    full = [(offset, box) for offset, box in boxes if 0 not in box]
    have, need = sum(math.prod(box) for _, box in full), math.prod(shape)
    if have != need or not boxes:
        return f"{have:,} of {need:,} elements were saved"
    if len(full) > 1:
        starts = np.array([offset for offset, _ in full], np.int64)
        ends = starts + np.array([box for _, box in full], np.int64)
        meet = ((starts[:, None] < ends) & (starts < ends[:, None])).all(axis=2)
        if meet.sum() > len(full):
            return "some elements were saved twice, and others not"
    return ""


# -- saving ---------------------------------------------------------------------------------------


def shard_state(
    plan: SavePlan, planner: SavePlanner, *, ranks: int
) -> tuple[dict[str, Any], dict[Path, Sharding], DcpNotes]:
    """The state that this rank's shard holds, the boxes among its tensors, and its notes.

    Where others of so many ``ranks`` have the same names, the notes have digests to compare.

    Tensors are the planner's (``resolve_data``), values are looked up in it: they are not pickled.
    Raises ``UnsupportedState`` for what cannot be stored.
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
    """Names that are not sharded and not the same on all ranks that have them."""
    first: dict[str, tuple[int, int]] = {}
    problems: dict[str, str] = {}
    for rank, own in enumerate(digests):
        for name, digest in own.items():
            owner, known = first.setdefault(name, (rank, digest))
            if known != digest:
                problems.setdefault(
                    name,
                    f"{name}: not the same on rank {owner} and rank {rank}, and DCP keeps one of "
                    f"them; {_OWN_NAME}",
                )
    return list(problems.values())


def _piece(item: WriteItem, planner: SavePlanner) -> tuple[torch.Tensor, Sharding | None]:
    name, data = item.index.fqn, item.tensor_data
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor) or data is None or data.chunk is None:
        raise UnsupportedState(name, "what the planner made of a tensor", hint="give a tensor")
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
    """Where the names of this plan stood; only DCP's own form of that is known."""
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
        raise ValueError(f"a path that does not spell {name!r:.80}")
    for key in keys:
        if type(key) is not str and not (type(key) is int and 0 <= key < _INDEX_MAX):
            raise ValueError(f"{key!r:.40} in the path of {name!r:.80}")
    return keys


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _digests(planner: SavePlanner) -> dict[str, int]:
    """Of all that DCP takes for the same on all ranks, as far as the planner shows its state."""
    digests = {}
    for name, value in getattr(planner, "state_dict", {}).items():
        if isinstance(value, torch.Tensor) and type(value) not in _PLAIN_TENSORS:
            continue  # sharded; or refused when it is to be stored
        _check_value(name, value)
        flat = flatten({name: value})
        digest = zlib.crc32(flat.tree)
        for tensor, path in zip(flat.tensors, flat.paths, strict=True):
            part_of(tensor, path, Shardings())  # refuses what has no plain bytes
            digest = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)} ".encode(), digest)
            digest = zlib.crc32(_raw(tensor), digest)
        digests[name] = digest
    return digests


def _raw(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1): of a single element that keeps any stride, and cannot be viewed as bytes.
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    raw: Any = flat.numpy()
    return memoryview(raw)


# -- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contents:
    """A generation as DCP sees it, and where things are.

    ``tensors`` maps name and offset to the rank that saved this box and its name in that rank's
    shard; ``values`` maps names to ranks and what their shards have there.
    """

    metadata: Metadata
    tensors: Mapping[tuple[str, tuple[int, ...]], tuple[int, str]]
    values: Mapping[str, tuple[int, Any]]


def read_contents(trees: Iterable[dict[Any, Any]]) -> Contents:
    """What the shards of a generation hold, given their trees in the order of the ranks.

    Raises ``StateMismatch`` where ``Checkpointer.save`` wrote them, where ranks disagree on what is
    not sharded, and for boxes that do not make up their tensor.
    """
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    tensors: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    values: dict[str, tuple[int, Any]] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    digests = []
    for rank, tree in enumerate(trees):
        notes = DcpNotes.take(tree)
        if notes is None:
            raise StateMismatch(
                [
                    f"rank {rank}: not saved through DCP: Checkpointer.restore() takes it, and "
                    "ecckpt export --to dcp makes a folder of it"
                ]
            )
        digests.append(notes.digests)
        paths |= notes.paths
        for name, node in tree.items():
            if name in notes.values:
                found[name], values[name] = BytesStorageMetadata(), (rank, node)
                continue
            if node == []:
                raise CorruptFragment(f"{name!r:.80}: no part of it")
            for stored in node if isinstance(node, list) else [node]:
                offset = _add_chunk(found, name, stored)
                tensors[name, offset] = rank, stored.name
    problems = disagreements(digests) + _gaps(found)
    if problems:
        raise StateMismatch(problems)
    planner_data = {name: paths[name] for name in found if name in paths} or None
    return Contents(Metadata(found, planner_data), tensors, values)


def _add_chunk(found: dict[str, Any], name: str, stored: Any) -> tuple[int, ...]:
    if type(name) is not str or type(stored) is not StoredTensor:
        raise CorruptFragment(f"{name!r:.80} is neither a tensor nor noted as a value")
    local = tuple(stored.shape)
    box = stored.sharding or box_of(local, (0,) * len(local))
    shape, offset = box.shape, box.offset or ()
    if not len(offset) == len(local) == len(shape) or any(
        at + size > whole for at, size, whole in zip(offset, local, shape, strict=True)
    ):
        raise CorruptFragment(f"{name!r:.80}: a part that is no box of its tensor")
    known = found.setdefault(
        name,
        TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(shape), []),
    )
    if not isinstance(known, TensorStorageMetadata) or (
        (tuple(known.size), known.properties.dtype) != (shape, stored.dtype)
    ):
        raise StateMismatch([f"{name}: not the same kind of tensor on all ranks that saved it"])
    known.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(local)))
    return offset


def _gaps(found: Mapping[str, Any]) -> list[str]:
    """DCP's planner would leave what no box covers as it is, without a word."""
    problems = []
    for name, about in found.items():
        if isinstance(about, TensorStorageMetadata):
            boxes = [(tuple(each.offsets), tuple(each.sizes)) for each in about.chunks]
            problem = uncovered(tuple(about.size), boxes)
            problems += [f"{name}: {problem}"] if problem else []
    return problems
