"""``Reader``: DCP's ``StorageReader``; reads the boxes that DCP asks for from all ranks' shards.

Users import it from ``ecckpt.integrations.torch_dcp``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ecckpt.client.checkpointer import Checkpointer
from ecckpt.client.read.shard_reader import ShardReader
from ecckpt.client.restore.found import FoundGeneration
from ecckpt.errors import InvalidConfig, NothingToRestore, StateMismatch
from ecckpt.integrations.dcp.plan_shard import Contents, check_id, read_contents
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.protocol.fan_out import PARALLEL_HEADERS, call_each
from ecckpt.state.paths import Path, describe
from ecckpt.state.reshard.saved_shard import SavedShard
from ecckpt.state.tensors.boxes import Common
from ecckpt.state.tree.nodes import StoredTensor, replace_tensors
from ecckpt.state.tree.resolving import resolve

_log = logging.getLogger(__name__)

_NAMES_SHOWN = 8  # a warning lists at most so many names


class Reader(StorageReader):
    """Reads what ``Writer`` saved, on any number of ranks.

    All ranks make one at each start of the program, before the first save. Making it begins a new
    timeline, as ``Checkpointer.restore`` does, and chooses the newest generation that survives (or
    that of ``step``). Each rank reads the boxes that DCP asks for, from this node or its peers, and
    decodes those whose holders are lost; the CRC32C of each block is checked. One reader may serve
    several ``dcp.load``, until the run commits a newer checkpoint.

    Values are not pickled; they are put where DCP's ``DefaultLoadPlanner`` would put them. A tensor
    must have the dtype that it was saved with, because DCP would convert it silently.

    Args:
        checkpointer: of this rank.
        step: the training step to load (default: the newest).

    Attributes:
        step: of the chosen generation; None if the run has never saved anything.
        generation, saved_by, margin, rejected: as in ``Restored``.

    Raises:
        NothingToRestore, RankTimeout: on all ranks alike.
    """

    def __init__(self, checkpointer: Checkpointer, *, step: int | None = None) -> None:
        super().__init__()
        self._run = checkpointer.run
        self._found: FoundGeneration | None = checkpointer.find(step=step)
        self._saved: list[SavedShard] = []
        self._contents: Contents | None = None
        self._is_coordinator = False
        found = self._found
        self.generation = found.generation if found else None
        self.step = found.generation.step if found else None
        self.saved_by = found.saved_by if found else 0
        self.margin = found.margin if found else -1
        self.rejected = dict(found.rejected) if found else {}

    # -- DCP's calls, in their order --------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Accept no ``checkpoint_id`` but that of the chosen generation (``InvalidConfig``)."""
        check_id(checkpoint_id, f"{self._run}/{self.step}")

    def read_metadata(self) -> Metadata:
        """Make DCP's metadata from the headers and values of all shards.

        The signature has no ``**kwargs`` on purpose. With them, DCP takes a failure on a rank as
        "this rank has no metadata" and skips collectives there, in which the other ranks wait.
        """
        if self._contents is None:
            self._contents = self._open()
        return self._contents.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Store whether this rank is the coordinator, which logs for all ranks."""
        del metadata, args, kwargs
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @collector_paused()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and values of the plan; all checks come before the first change.

        Raises ``StateMismatch`` if anything does not fit.
        """
        assert self._contents is not None, "DCP reads the metadata first"
        self._extend_deadline()
        if self._is_coordinator:
            self._warn_of_rest(planner)
        wanted = [
            _WantedBox(item, planner.resolve_tensor(item).detach())
            for item in plan.items
            if item.type != LoadItemType.BYTE_IO
        ]
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        problems = [problem for box in wanted for problem in self._misfits(box)]
        problems += [problem for item in values for problem in _hidden_key(item, planner)]
        read = [(item, self._value(item.storage_index.fqn, problems)) for item in values]
        if problems:
            raise StateMismatch(problems)
        self._fill(wanted)
        for box in wanted:
            planner.commit_tensor(box.item, box.target)
        for item, value in read:
            _put(planner, item, value)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP cannot make a reader from an id."""
        del checkpoint_id
        return False

    # -- shards -----------------------------------------------------------------------------------

    @collector_paused()
    def _open(self) -> Contents:
        if self._found is None:
            raise NothingToRestore(self._run, {}, hint="look at Reader.step before dcp.load")
        self._extend_deadline()
        peers = self._found.peers
        self._saved = call_each(
            self._found.shards,
            lambda shard: SavedShard(ShardReader(shard, peers)),
            parallel=PARALLEL_HEADERS,
        )
        return read_contents(
            call_each(self._saved, lambda saved: saved.values().tree(), parallel=PARALLEL_HEADERS)
        )

    def _extend_deadline(self) -> None:
        # The timeout bounds one call of DCP: the time between its calls is the program's own.
        if self._found is not None:
            self._found.peers.deadline_s = time.monotonic() + self._found.timeout_s

    def _place(self, index: MetadataIndex) -> tuple[int, str]:
        assert self._contents is not None
        assert index.offset is not None
        return self._contents.tensors[index.fqn, tuple(index.offset)]

    def _misfits(self, wanted: _WantedBox) -> list[str]:
        index, target = wanted.item.dest_index, wanted.target
        rank, name = self._place(wanted.item.storage_index)
        dtype = self._saved[rank].dtype(name)
        if dtype != target.dtype:
            return [f"{index.fqn}: saved as {dtype}, here {target.dtype}"]
        if tuple(target.shape) != tuple(wanted.item.lengths):
            shapes = f"{list(target.shape)} for {list(wanted.item.lengths)}"
            return [f"{index.fqn}: the planner returned a tensor of shape {shapes}"]
        return []

    def _fill(self, wanted: list[_WantedBox]) -> None:
        """Read and copy all boxes, shard by shard: whole blocks of only one are in memory."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        ranks: dict[int, None] = {}
        for box in wanted:
            rank, name = self._place(box.item.storage_index)
            buffer = box.target
            if not buffer.is_cpu or buffer.is_conj() or buffer.is_neg():
                buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
                copies.append((box.target, buffer))
            start = tuple(box.item.storage_offsets)
            common = Common(start, (0,) * buffer.ndim, tuple(buffer.shape))
            self._saved[rank].plan_copy(name, common, buffer)
            ranks[rank] = None
        for rank in ranks:
            self._saved[rank].copy_planned()
            self._saved[rank].release()
        for target, buffer in copies:
            target.copy_(buffer)

    def _value(self, name: str, problems: list[str]) -> Any:
        """Return a saved value; tensors in it are copies, which the caller owns."""
        assert self._contents is not None
        rank, node = self._contents.values[name]
        saved = self._saved[rank]

        def make(stored: StoredTensor, path: Path) -> torch.Tensor:
            del path
            saved.read_tensors([stored.name])
            return saved.tensor(stored.name).clone()

        def problem(path: Path, text: str) -> None:
            problems.append(f"{describe((name, *path))}: {text}")

        return resolve(replace_tensors(node, make), problem)

    def _warn_of_rest(self, planner: LoadPlanner) -> None:
        """Log saved names that this load does not ask for: DCP ignores them silently."""
        assert self._contents is not None
        asked = getattr(planner, "state_dict", None)
        if asked is None:
            return
        rest = [name for name in self._contents.metadata.state_dict_metadata if name not in asked]
        if rest:
            shown = ", ".join(rest[:_NAMES_SHOWN]) + (" ..." if len(rest) > _NAMES_SHOWN else "")
            _log.warning("%d names of step %s are not loaded: %s", len(rest), self.step, shown)


@dataclass(frozen=True, slots=True)
class _WantedBox:
    """A box to read, and the tensor that it goes into."""

    item: ReadItem
    target: torch.Tensor


def _hidden_key(item: ReadItem, planner: LoadPlanner) -> Iterable[str]:
    """Yield a problem if a value belongs under a dict key that is not a text.

    DCP turns dict keys into texts: it would put the value of key 1 under the new key "1".
    """
    name = item.dest_index.fqn
    node = getattr(planner, "original_state_dict", None)
    for key in getattr(planner, "mappings", {}).get(name, ()):
        if isinstance(node, dict):
            if key not in node:
                if any(str(other) == key for other in node):
                    yield f"{name}: under a dict key that is not a text, where DCP puts no value"
                return
            node = node[key]
        elif isinstance(node, list) and type(key) is int and key < len(node):
            node = node[key]
        else:
            return


def _put(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Put a value into the state, as ``DefaultLoadPlanner.load_bytes`` does after unpickling."""
    name = item.dest_index.fqn
    if not isinstance(planner, DefaultLoadPlanner) or (
        type(planner).load_bytes is not DefaultLoadPlanner.load_bytes
    ):
        raise InvalidConfig(
            f"{name}: {type(planner).__name__} expects a value as pickled bytes",
            hint="derive the planner from DefaultLoadPlanner and leave load_bytes as it is",
        )
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        # `state_dict` may be a copy that the planner made; the caller has `original_state_dict`.
        planner.state_dict[name] = planner.original_state_dict[name] = value
