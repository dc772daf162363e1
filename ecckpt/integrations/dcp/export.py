"""Exports a checkpoint as a folder of DCP: ``ecckpt export --to dcp DIR``.

torch's own ``FileSystemWriter`` writes the folder, with its pickled ``.metadata``. Nothing is
unpickled here. ``dcp.load`` reshards the folder like any checkpoint of its own.
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

_HINT_REGISTER = "export from a program that registers it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedDcp:
    """The result of an export: counts, and the length of all tensors in bytes."""

    folder: str
    generation: str
    tensors: int
    values: int
    total_bytes: int


@dataclass(eq=False, slots=True, kw_only=True)
class _FlatState:
    """The state of all ranks by DCP's flat names."""

    compare: bool  # whether values have to be equal on all ranks
    state: dict[str, Any] = field(default_factory=dict)  # values, and meta tensors
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # place in the nested state
    names: dict[str, str] = field(default_factory=dict)  # of tensors: the name in the checkpoint
    problems: list[str] = field(default_factory=list)


def export_dcp(opened: Opened, folder: Path, *, prefix: str = "") -> ExportedDcp:
    """Write all tensors and values whose names begin with ``prefix``, with the prefix removed.

    Tensors are global ones. One tensor is in memory at a time, and each gets its own file. A tied
    tensor is written once per name. A value must be equal on all ranks that have it, unless
    ``Opened.as_rank`` has chosen a rank.

    Args:
        opened: the checkpoint.
        folder: must not exist, or be empty. It appears only when it is complete.
        prefix: of the names to export.

    Raises:
        InvalidConfig: ``folder`` is in use, or no name begins with ``prefix``.
        StateMismatch: ranks have different tensors or values under a name; nothing is written.
        UnsupportedState: tensors in a tuple (DCP does not look into tuples), or an instance of a
            class that is not registered.
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
    return ExportedDcp(
        folder=str(folder),
        generation=generation,
        tensors=len(flat.names),
        values=values,
        total_bytes=total_bytes,
    )


class _Planner(DefaultSavePlanner):
    """Plans with meta tensors, and reads a tensor from the checkpoint when DCP writes it."""

    def __init__(self, opened: Opened, flat: _FlatState) -> None:
        super().__init__()
        self._opened = opened
        self._flat = flat

    def create_local_plan(self) -> SavePlan:
        """Plan as torch does, with the paths of the nested state."""
        self.mappings = dict(self._flat.paths)
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read a tensor; leave values to torch."""
        name = self._flat.names.get(write_item.index.fqn)
        return super().resolve_data(write_item) if name is None else self._opened[name]


def _save(flat: _FlatState, planner: _Planner, folder: Path) -> None:
    # One file per tensor: the writer keeps tensors in memory until their file is complete.
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    try:
        with warnings.catch_warnings():  # a single process is intended here
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(flat.state, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # DCP wraps the errors of planning and reading
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, EcckptError)), error) from error


def _flatten(opened: Opened, prefix: str) -> _FlatState:
    flat = _FlatState(compare=opened.preferred is None)
    ranks = sorted(range(opened.world_size), key=lambda rank: (rank != opened.preferred, rank))
    for rank in ranks:
        names: dict[int, str] = {}

        def stand_in(name: str, names: dict[int, str] = names) -> torch.Tensor:
            tensor = meta_tensor(opened.shape(name), opened.dtype(name))
            names[id(tensor)] = name
            return tensor

        tree = opened.tree_of(rank, stand_in)
        notes = DcpNotes.pop_from(tree)  # present if the shard was saved through DCP: flat already
        state, paths = (tree, notes.paths) if notes else flatten_state_dict(tree)
        for fqn, value in state.items():
            if fqn.startswith(prefix):
                short = fqn[len(prefix) :]
                name = names.get(id(value))
                _add(flat, short, value, name, rank)
                flat.paths.setdefault(short, (short,) if prefix else paths.get(fqn, (fqn,)))
    return flat


def _add(flat: _FlatState, fqn: str, value: Any, name: str | None, rank: int) -> None:
    """Add what one rank has under a flat name; ``name`` is a tensor's name in the checkpoint."""
    if name is None and holds(value, lambda node: isinstance(node, torch.Tensor)):
        raise UnsupportedState(fqn, "tensors in a tuple", hint="use a list or a dict")
    if holds(value, lambda node: type(node) is StoredValue):
        raise UnsupportedState(
            fqn, "an instance of a class that is not registered here", hint=_HINT_REGISTER
        )
    if fqn not in flat.state:
        flat.state[fqn] = value
        if name is not None:
            flat.names[fqn] = name
    elif flat.names.get(fqn) != name:
        flat.problems.append(f"{fqn}: rank {rank} has another kind of entry than lower ranks")
    elif flat.compare and name is None and _bytes(value) != _bytes(flat.state[fqn]):
        flat.problems.append(f"{fqn}: rank {rank} has another value than lower ranks: choose one")


def _bytes(value: Any) -> bytes:
    return pack(Encoder().encode(value, ()))
