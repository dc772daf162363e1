"""The reading half of torch_dcp: the boxes that DCP asks for, out of the shards of all ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
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
from ecckpt.state.paths import Path, describe
from ecckpt.state.reshard.saved_shard import SavedShard
from ecckpt.state.tensors.boxes import Common
from ecckpt.state.tree.nodes import StoredTensor, replace_tensors
from ecckpt.state.tree.resolving import resolve

_log = logging.getLogger(__name__)

_PARALLEL_HEADERS = 8
_NAMES_SHOWN = 8


class Reader(StorageReader):
    """Reads what ``Writer`` saved, on any number of ranks; made by all ranks at every start.

    Making it begins a new timeline, as ``Checkpointer.restore`` does, and finds the newest
    generation that survives (or that of ``step``). Each rank reads the boxes that DCP asks for:
    from this node or its peers, decoded where holders are gone, every block proven. It may serve
    several ``dcp.load``; once the run has committed a newer checkpoint it is of no more use.

    Values come out of the shard without pickle and go where DCP's ``DefaultLoadPlanner`` would put
    them. A tensor must have the dtype it was saved with: DCP would convert without a word.

    Attributes:
        step: of what was found; None if the run never saved anything.
        generation, saved_by, margin, rejected: as in ``Restored``.

    Raises ``NothingToRestore``, ``RankTimeout``: on all ranks alike.
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
        """The generation is chosen already; any id but its own is refused (``InvalidConfig``)."""
        check_id(checkpoint_id, f"{self._run}/{self.step}")

    def read_metadata(self) -> Metadata:
        """From the headers and values of all shards.

        Takes no further arguments: with ``**kwargs`` DCP would go on without collectives on ranks
        where this fails, and the others would wait for them.
        """
        if self._contents is None:
            self._contents = self._open()
        return self._contents.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Note who speaks for all."""
        del metadata, args, kwargs
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @collector_paused()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner asks for; everything is checked before the first byte is."""
        assert self._contents is not None, "DCP reads the metadata first"
        self._extend_deadline()
        if self._is_coordinator:
            self._warn_of_rest(planner)
        wanted = [
            _Wanted(item, planner.resolve_tensor(item).detach())
            for item in plan.items
            if item.type != LoadItemType.BYTE_IO
        ]
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        problems = [problem for each in wanted for problem in self._misfits(each)]
        problems += [problem for item in values for problem in _hidden_key(item, planner)]
        read = [(item, self._value(item.storage_index.fqn, problems)) for item in values]
        if problems:
            raise StateMismatch(problems)
        self._fill(wanted)
        for each in wanted:
            planner.commit_tensor(each.item, each.target)
        for item, value in read:
            _put(planner, item, value)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP cannot make a reader from an id."""
        del checkpoint_id
        return False

    # -- shards -----------------------------------------------------------------------------------

    @collector_paused()
    def _open(self) -> Contents:
        if self._found is None:
            raise NothingToRestore(self._run, {}, hint="look at Reader.step before dcp.load")
        self._extend_deadline()
        peers = self._found.peers
        with ThreadPoolExecutor(_PARALLEL_HEADERS, thread_name_prefix="index") as pool:
            readers = list(pool.map(lambda each: ShardReader(each, peers), self._found.shards))
            self._saved = list(pool.map(SavedShard, readers))
            trees = list(pool.map(lambda saved: saved.values().tree(), self._saved))
        return read_contents(trees)

    def _extend_deadline(self) -> None:
        if self._found is not None:
            self._found.peers.deadline_s = time.monotonic() + self._found.timeout_s

    def _place(self, index: MetadataIndex) -> tuple[int, str]:
        assert self._contents is not None
        assert index.offset is not None
        return self._contents.tensors[index.fqn, tuple(index.offset)]

    def _misfits(self, wanted: _Wanted) -> list[str]:
        index, target = wanted.item.dest_index, wanted.target
        rank, name = self._place(wanted.item.storage_index)
        dtype = self._saved[rank].dtype(name)
        if dtype != target.dtype:
            return [f"{index.fqn}: saved as {dtype}, here {target.dtype}"]
        if tuple(target.shape) != tuple(wanted.item.lengths):
            shapes = f"{list(target.shape)} for {list(wanted.item.lengths)}"
            return [f"{index.fqn}: the planner gives room of shape {shapes}"]
        return []

    def _fill(self, wanted: list[_Wanted]) -> None:
        """Shard by shard, so that of one at a time there is more in memory than what is asked."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        ranks: dict[int, None] = {}
        for each in wanted:
            rank, name = self._place(each.item.storage_index)
            room = each.target
            if not room.is_cpu or room.is_conj() or room.is_neg():
                room = torch.empty(room.shape, dtype=room.dtype)
                copies.append((each.target, room))
            start = tuple(each.item.storage_offsets)
            common = Common(start, (0,) * room.ndim, tuple(room.shape))
            self._saved[rank].plan_copy(name, common, room)
            ranks[rank] = None
        for rank in ranks:
            self._saved[rank].copy_planned()
            self._saved[rank].release()
        for target, room in copies:
            target.copy_(room)

    def _value(self, name: str, problems: list[str]) -> Any:
        """A value as it was saved, with tensors in it of their own."""
        assert self._contents is not None
        rank, node = self._contents.values[name]
        saved = self._saved[rank]

        def make(stored: StoredTensor, path: Path) -> torch.Tensor:
            del path
            saved.bring([stored.name])
            return saved.tensor(stored.name).clone()

        def problem(path: Path, text: str) -> None:
            problems.append(f"{describe((name, *path))}: {text}")

        return resolve(replace_tensors(node, make), problem)

    def _warn_of_rest(self, planner: LoadPlanner) -> None:
        assert self._contents is not None
        asked = getattr(planner, "state_dict", None)
        if asked is None:
            return
        rest = [name for name in self._contents.metadata.state_dict_metadata if name not in asked]
        if rest:
            shown = ", ".join(rest[:_NAMES_SHOWN]) + (" ..." if len(rest) > _NAMES_SHOWN else "")
            _log.warning("%d names of step %s are not loaded: %s", len(rest), self.step, shown)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A box to read, and the memory it goes into."""

    item: ReadItem
    target: torch.Tensor


def _hidden_key(item: ReadItem, planner: LoadPlanner) -> Iterable[str]:
    """DCP makes text of dict keys: under ``"1"`` it would put what belongs under ``1``."""
    name = item.dest_index.fqn
    node = getattr(planner, "original_state_dict", None)
    for key in getattr(planner, "mappings", {}).get(name, ()):
        if isinstance(node, dict):
            if key not in node:
                if any(str(other) == key for other in node):
                    yield f"{name}: under a dict key that is no text, where DCP puts no value"
                return
            node = node[key]
        elif isinstance(node, list) and type(key) is int and key < len(node):
            node = node[key]
        else:
            return


def _put(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """What ``DefaultLoadPlanner.load_bytes`` does after it has unpickled."""
    name = item.dest_index.fqn
    if not isinstance(planner, DefaultLoadPlanner) or (
        type(planner).load_bytes is not DefaultLoadPlanner.load_bytes
    ):
        raise InvalidConfig(
            f"{name}: {type(planner).__name__} wants a value as pickled bytes",
            hint="derive the planner from DefaultLoadPlanner and leave load_bytes as it is",
        )
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        # Its state_dict may be a copy of the caller's, in which torch would leave the value.
        planner.state_dict[name] = planner.original_state_dict[name] = value
