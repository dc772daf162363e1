"""A checkpoint as a folder of ``torch.distributed.checkpoint``: ``ecckpt export --to dcp DIR``.

torch's own ``FileSystemWriter`` writes it, its pickled ``.metadata`` included; nothing is unpickled
here. ``dcp.load`` then reshards as it does with any checkpoint of its own.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from ecckpt.client.read.open import Opened
from ecckpt.errors import EcckptError, InvalidConfig, StateMismatch, UnsupportedState
from ecckpt.integrations.atomic_folder import finished_folder, require_unused
from ecckpt.integrations.dcp.plan_shard import DcpNotes
from ecckpt.state.file.shard import meta_tensor
from ecckpt.state.tree.encoding import Encoder
from ecckpt.state.tree.nodes import StoredValue
from ecckpt.state.tree.tree import holds
from ecckpt.state.tree.values import pack

_WAY = "export from a program that registers it"


@dataclass(frozen=True, slots=True)
class ExportedDcp:
    """What was written."""

    folder: str
    generation: str
    tensors: int
    values: int
    total_bytes: int


@dataclass(eq=False, slots=True)
class _Flat:
    """The state by DCP's names: meta tensors and values; where each stood; the tensors' names."""

    compare: bool
    state: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def export_dcp(opened: Opened, folder: Path, *, prefix: str = "") -> ExportedDcp:
    """Write what begins with ``prefix``, without it: global tensors, and values.

    One tensor is in memory at a time, and has a file of its own; names that are tied are written
    for each. A value that several ranks have must be the same, or ``Opened.as_rank`` chooses.
    ``folder`` must not exist, or be empty, and is not seen before it is whole.

    Raises:
        InvalidConfig: ``folder`` is in use, or nothing begins with ``prefix``.
        StateMismatch: tensors or values that ranks disagree on; nothing is written.
        UnsupportedState: tensors in a tuple, where DCP does not look for any.
    """
    require_unused(folder)
    flat = _flatten(opened, prefix)
    if flat.problems:
        raise StateMismatch(flat.problems)
    if not flat.state:
        raise InvalidConfig(f"nothing in run {opened.run!r} begins with {prefix!r}")
    with finished_folder(folder) as unfinished:
        _save(flat, _Planner(opened, flat), unfinished)
    total_bytes = sum(flat.state[name].nbytes for name in flat.names)
    values = len(flat.state) - len(flat.names)
    generation = str(opened.generation)
    return ExportedDcp(str(folder), generation, len(flat.names), values, total_bytes)


class _Planner(DefaultSavePlanner):
    """Plans with meta tensors, and reads each when it is to be written."""

    def __init__(self, opened: Opened, flat: _Flat) -> None:
        super().__init__()
        self._opened = opened
        self._flat = flat

    def create_local_plan(self) -> SavePlan:
        """As torch does, with the paths that the state had before it was flat."""
        self.mappings = dict(self._flat.paths)
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor, read now; values as torch makes them."""
        name = self._flat.names.get(write_item.index.fqn)
        return super().resolve_data(write_item) if name is None else self._opened[name]


def _save(flat: _Flat, planner: _Planner, folder: Path) -> None:
    # A file per tensor: the writer keeps what it wrote until its file is full.
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    try:
        with warnings.catch_warnings():  # that there is one process only is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(flat.state, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # what was raised while planning or reading
        causes = [cause for cause, _ in error.failures.values()]
        raise next((each for each in causes if isinstance(each, EcckptError)), error) from error


def _flatten(opened: Opened, prefix: str) -> _Flat:
    flat = _Flat(compare=opened.preferred is None)
    ranks = sorted(range(opened.world_size), key=lambda rank: (rank != opened.preferred, rank))
    for rank in ranks:
        names: dict[int, str] = {}

        def stand_in(name: str, names: dict[int, str] = names) -> torch.Tensor:
            tensor = meta_tensor(opened.shape(name), opened.dtype(name))
            names[id(tensor)] = name
            return tensor

        tree = opened.tree_of(rank, stand_in)
        notes = DcpNotes.take(tree)  # DCP flattened it already
        state, paths = (tree, notes.paths) if notes else flatten_state_dict(tree)
        for fqn, value in state.items():
            if fqn.startswith(prefix):
                short = fqn[len(prefix) :]
                name = names.get(id(value))
                _add(flat, short, value, name, rank)
                flat.paths.setdefault(short, (short,) if prefix else paths.get(fqn, (fqn,)))
    return flat


def _add(flat: _Flat, fqn: str, value: Any, name: str | None, rank: int) -> None:
    if name is None and holds(value, lambda node: isinstance(node, torch.Tensor)):
        raise UnsupportedState(fqn, "tensors in a tuple", hint="use a list or a dict")
    if holds(value, lambda node: type(node) is StoredValue):
        raise UnsupportedState(fqn, "an instance of a class that is not registered here", hint=_WAY)
    if fqn not in flat.state:
        flat.state[fqn] = value
        if name is not None:
            flat.names[fqn] = name
    elif flat.names.get(fqn) != name:
        flat.problems.append(f"{fqn}: rank {rank} has something else there than those before")
    elif flat.compare and name is None and _bytes(value) != _bytes(flat.state[fqn]):
        flat.problems.append(f"{fqn}: rank {rank} has another value than those before: choose one")


def _bytes(value: Any) -> bytes:
    return pack(Encoder().encode(value, ()))
