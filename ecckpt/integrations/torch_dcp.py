"""torch.distributed.checkpoint over ecckpt: ``dcp.save``, ``dcp.async_save`` and ``dcp.load``.

    checkpointer = ecckpt.Checkpointer("llama-70b", code=(8, 2))
    reader = Reader(checkpointer)  # all ranks, at every start, before the first save
    if reader.step is not None:
        dcp.load(state, storage_reader=reader)
    ...
    dcp.save(state, storage_writer=Writer(checkpointer, step))

DCP plans who writes what and who reads what; the bytes of each rank are a shard like any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ecckpt.checkpointer import Checkpointer
from ecckpt.errors import (
    AgentUnreachable,
    EcckptError,
    InvalidConfig,
    NothingToRestore,
    SaveFailed,
    StateMismatch,
    WrongOrder,
)
from ecckpt.generation import Generation
from ecckpt.integrations.dcp_shard import Contents, disagreements, read_contents, shard_state
from ecckpt.integrations.dcp_turns import Turn, turns_of
from ecckpt.reading import ShardReader
from ecckpt.restoring import Found
from ecckpt.slots import Slots
from ecckpt.staging import Ticket
from ecckpt.state import SavedShard, plan_shard
from ecckpt.state.boxes import Common
from ecckpt.state.paths import Path, describe
from ecckpt.state.resolving import resolve
from ecckpt.state.stored import StoredTensor, replace_tensors

_log = logging.getLogger(__name__)

_PARALLEL_HEADERS = 8
_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a rank tells the coordinator of its shard: protected, and what it had in common."""

    generation: Generation
    rank: int
    digests: dict[str, int]


class Writer(StorageWriter):
    """Saves one step: for one ``dcp.save`` or ``dcp.async_save``, on every rank of the run.

    The checkpoint is committed when DCP's call has returned (or its future is done); if it raises,
    it is not, and the one before it is untouched. Saves queue: DCP's work for this one begins when
    this rank's save before it is over, and ``async_save`` keeps its caller until then. It stages
    the state itself, so it needs no ``async_stager``.

    Args:
        checkpointer: of this rank; ``Reader`` (or ``restore``) came first. While DCP saves, its
            own ``save`` is not to be called.
        step: the training step, higher than that of the save before.

    Raises, in DCP's ``CheckpointException`` and on all ranks: ``UnsupportedState`` for what cannot
    be stored, ``StateMismatch`` for what DCP takes for one thing and ranks have different ones of,
    ``WrongOrder`` for a writer used twice, ``InvalidConfig`` for ``no_dist``, ``use_collectives``
    or a process group that is not the run's, and what ``Checkpointer.save`` reports.
    """

    # What DCP looks for in a stager, beside the methods below.
    _synchronize_after_execute = False
    should_synchronize_after_execute = False

    def __init__(self, checkpointer: Checkpointer, step: int) -> None:
        super().__init__()
        self.checkpoint_id = f"{checkpointer.run}/{step}"
        self._step = step
        self._checkpointer: Checkpointer | None = checkpointer
        self._turn: Turn | None = None
        self._ticket: Ticket | None = None
        self._entered = False
        self._is_coordinator = False

    # -- before DCP's work ------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in CPU memory, once the save before is over (``async_save``)."""
        self._begin(staged=True)
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            staged = stager.stage(state_dict)
        finally:
            stager.close()
        assert isinstance(staged, dict), "staged at once, as was asked for"
        return staged

    def synchronize_staging(self) -> None:
        """Nothing: it is staged when ``stage`` returns."""

    def close(self) -> None:
        """Nothing: DCP closes only stagers of its own."""

    def __getstate__(self) -> dict[str, Any]:
        # DCP sends it to its checkpoint process, and waits in this thread for the end.
        self._enter()
        return {
            "checkpoint_id": self.checkpoint_id,
            "_step": self._step,
            "_checkpointer": None,
            "_turn": None,
            "_ticket": self._ticket,
            "_entered": False,
            "_is_coordinator": False,
        }

    def _begin(self, *, staged: bool) -> None:
        if self._ticket is not None or self._checkpointer is None:
            raise WrongOrder(
                f"the writer of step {self._step} is used a second time",
                hint="make a Writer for each save",
            )
        turn = Turn(self._step)
        turn.staged = staged
        timeout_s = self._checkpointer.save_timeout_s
        turns_of(self._checkpointer).take(turn, timeout_s=timeout_s)
        try:
            self._ticket = self._checkpointer.ticket(self._step)
        except BaseException:
            turn.drop()
            raise
        self._turn = turn

    def _enter(self) -> None:
        """The save begins, in this thread."""
        if self._entered or self._ticket is None:
            self._begin(staged=False)
        self._entered = True
        self._note_thread()

    def _note_thread(self) -> None:
        if self._turn is not None:
            self._turn.thread = threading.current_thread()

    # -- DCP's calls, in their order --------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The id is given by run and step; any other is refused (``InvalidConfig``)."""
        self._note_thread()
        _check_id(checkpoint_id, self.checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """None; DCP's first call, before any collective."""
        self._enter()
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Look whether DCP's ranks are the run's."""
        assert self._ticket is not None, "DCP asks for storage_meta() first"
        del args
        self._is_coordinator = is_coordinator
        rank, own = kwargs.get("rank", 0), self._ticket.shard.rank
        if not kwargs.get("use_collectives", True):
            raise InvalidConfig("use_collectives=False: there would be no common commit")
        if rank != own:
            raise InvalidConfig(
                f"rank {own} of the run saves as rank {rank}",
                hint="no no_dist=True, and a process_group with all ranks of the run in order",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stage and protect this rank's shard; the result is one receipt for all of it."""
        assert self._ticket is not None, "DCP asks for storage_meta() first"
        written = False
        slots = Slots()
        try:
            state, boxes, notes = shard_state(plan, planner)
            shard = plan_shard(state, boxes=boxes)
            self._ticket.stage(shard, slots)
            self._ticket.protect()
            written = True
        except AgentUnreachable:
            self._revive_agent()
            raise
        finally:
            slots.close()
            if self._turn is not None and not (written and self._is_coordinator):
                self._turn.ended.set()
        own = self._ticket.shard
        receipt = Receipt(own.generation, own.rank, dict(notes.digests))
        index = MetadataIndex(f"rank {own.rank}")
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(index, shard.shard_bytes, receipt)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, if every rank of the run is there with the same generation."""
        del metadata  # a reader makes it from the shards
        assert self._ticket is not None, "DCP asks for storage_meta() first"
        try:
            _check_receipts([each.storage_data for own in results for each in own], self._ticket)
            self._ticket.commit()
        except AgentUnreachable:
            self._revive_agent()
            raise
        finally:
            if self._turn is not None:
                self._turn.ended.set()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP cannot make a writer from an id."""
        del checkpoint_id
        return False

    def _revive_agent(self) -> None:
        assert self._ticket is not None
        with contextlib.suppress(EcckptError, OSError):  # what is raised already says more
            self._ticket.revive_agent()


def _check_receipts(receipts: list[Receipt], ticket: Ticket) -> None:
    receipts = sorted(receipts, key=lambda receipt: receipt.rank)
    ranks = [receipt.rank for receipt in receipts]
    if ranks != list(range(ticket.header.world_size)):
        raise SaveFailed(
            f"{ticket.shard.generation}: {len(ranks)} of {ticket.header.world_size} ranks saved",
            hint="every rank of the run must take part in dcp.save",
        )
    others = {f"{each.generation}" for each in receipts} - {f"{ticket.shard.generation}"}
    if others:
        raise SaveFailed(
            f"{ticket.shard.generation}: other ranks saved {', '.join(sorted(others))}",
            hint="give the Writer the same step on all ranks, and save in the same order",
        )
    problems = disagreements(receipt.digests for receipt in receipts)
    if problems:
        raise StateMismatch(problems)


def _check_id(given: str | os.PathLike[str] | None, own: str) -> None:
    if given is not None and os.fspath(given) != own:
        raise InvalidConfig(
            f"checkpoint_id={os.fspath(given)!r:.80}, but this is {own}",
            hint="leave checkpoint_id out: run and step say which checkpoint it is",
        )


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
        self._found: Found | None = checkpointer.find(step=step)
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
        _check_id(checkpoint_id, f"{self._run}/{self.step}")

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
        saved = self._saved[rank].tensor(name)
        if saved.dtype != target.dtype:
            return [f"{index.fqn}: saved as {saved.dtype}, here {target.dtype}"]
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
        planner.state_dict[name] = value
