"""The writing half of torch_dcp: this rank's part of DCP's plan becomes a shard, protected."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ecckpt.client.checkpointer import Checkpointer
from ecckpt.client.held_ticket import HeldTicket
from ecckpt.client.slot_mappings import Slots
from ecckpt.errors import (
    AgentUnreachable,
    EcckptError,
    InvalidConfig,
    SaveFailed,
    StateMismatch,
    WrongOrder,
)
from ecckpt.format.ids import Generation
from ecckpt.integrations.dcp.plan_shard import check_id, disagreements, shard_state
from ecckpt.integrations.dcp.turns import Turn, Turns, turns_of
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.state.snapshot.plan import ShardPlan, plan_shard


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
        self._ticket: HeldTicket | None = None
        self._entered = False
        self._is_coordinator = False

    # -- before DCP's work ------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in CPU memory, once the save before is over (``async_save``)."""
        turn, turns = self._begin(staged=True)
        try:
            staged = turns.stager.stage(state_dict)
        except BaseException:
            turn.drop()
            raise
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

    def _begin(self, *, staged: bool) -> tuple[Turn, Turns]:
        if self._ticket is not None or self._checkpointer is None:
            raise WrongOrder(
                f"the writer of step {self._step} is used a second time",
                hint="make a Writer for each save",
            )
        turn = Turn(self._step)
        turn.staged = staged
        turns = turns_of(self._checkpointer)
        turns.take(turn, timeout_s=self._checkpointer.save_timeout_s)
        try:
            self._ticket = self._checkpointer.ticket(self._step)
        except BaseException:
            turn.drop()
            raise
        self._turn = turn
        return turn, turns

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
        check_id(checkpoint_id, self.checkpoint_id)

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
        ticket, written = self._ticket, False
        try:
            with collector_paused():
                state, boxes, notes = shard_state(plan, planner, ranks=ticket.header.world_size)
                shard = plan_shard(state, boxes=boxes)
            self._stage(ticket, shard)
            ticket.protect()
            written = True
        except AgentUnreachable:
            self._revive_agent()
            raise
        finally:
            if self._turn is not None and not (written and self._is_coordinator):
                self._turn.ended.set()
        own = ticket.shard
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

    def _stage(self, ticket: HeldTicket, shard: ShardPlan) -> None:
        if self._checkpointer is not None:
            self._checkpointer.stage(ticket, shard)
            return
        slots = Slots()  # in DCP's process
        try:
            ticket.stage(shard, slots)
        finally:
            slots.close()

    def _revive_agent(self) -> None:
        assert self._ticket is not None
        with contextlib.suppress(EcckptError, OSError):  # what is raised already says more
            self._ticket.revive_agent()


def _check_receipts(receipts: list[Receipt], ticket: HeldTicket) -> None:
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
