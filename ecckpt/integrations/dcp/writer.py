"""``Writer``: DCP's ``StorageWriter``; saves this rank's part of DCP's plan as a shard.

Users import it from ``ecckpt.integrations.torch_dcp``. DCP calls, on each rank unless noted:

    dcp.save         storage_meta -> reset -> set_up_storage_writer -> prepare_* -> write_data
                     -> finish (coordinator only: checks the receipts of all ranks and commits)
    dcp.async_save   stage (in the caller's thread), then as above in a thread or process of DCP
"""

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
from ecckpt.integrations.dcp.staging import resolved
from ecckpt.integrations.dcp.turns import Turn, Turns, turns_of
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.state.snapshot.plan import ShardPlan, plan_shard


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a rank sends to the coordinator when its shard is protected."""

    generation: Generation
    rank: int
    digests: dict[str, int]


class Writer(StorageWriter):
    """Saves one step, by one ``dcp.save`` or ``dcp.async_save`` on each rank of the run.

    The checkpoint is committed when DCP's call has returned, or its future is done. If it raises,
    nothing is committed and the previous checkpoint stays. Saves of a rank run one after another:
    ``dcp.save`` and ``dcp.async_save`` block until the previous save of this rank has ended. The
    writer is its own stager, so do not pass an ``async_stager``.

    Args:
        checkpointer: of this rank, after a ``Reader`` (or ``restore``) has been made with it. Do
            not call its own ``save`` while DCP saves.
        step: the training step, higher than that of the previous save.

    Raises (DCP wraps them in ``CheckpointException``, on all ranks):
        UnsupportedState: something cannot be stored.
        StateMismatch: ranks have different content under a name that DCP stores once.
        WrongOrder: the writer was used before.
        InvalidConfig: ``no_dist``, ``use_collectives=False``, or a process group that does not have
            the ranks of the run in order.
        EcckptError: what ``Checkpointer.save`` reports.
    """

    # Attributes that DCP expects of a stager, beside the methods below.
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
        """Copy the state to CPU memory after the previous save has ended (``async_save`` only).

        The copy belongs to the stager and is valid until the next save.
        """
        turn, turns = self._begin_save(staged=True)
        try:
            staged = turns.stager.stage(resolved(state_dict))
        except BaseException:
            turn.drop()
            raise
        assert isinstance(staged, dict), "the stager is configured to stage synchronously"
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: ``stage`` has copied everything when it returns."""

    def close(self) -> None:
        """Do nothing: DCP closes only stagers that it has made."""

    def __getstate__(self) -> dict[str, Any]:
        # async_save with a process: a thread of DCP pickles the writer for its checkpoint process
        # and then waits for that. The thread stands for the save here; the process has no turn.
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

    def _begin_save(self, *, staged: bool) -> tuple[Turn, Turns]:
        """Wait for the previous save to end, and get a ticket (the right to save this step)."""
        if self._ticket is not None or self._checkpointer is None:
            raise WrongOrder(
                f"the writer of step {self._step} is used a second time",
                hint="make a Writer for each save",
            )
        turn = Turn(self._step)
        turn.staged = staged
        turns = turns_of(self._checkpointer)
        turns.wait_for_turn(turn, timeout_s=self._checkpointer.save_timeout_s)
        try:
            self._ticket = self._checkpointer.ticket(self._step)
        except BaseException:
            turn.drop()
            raise
        self._turn = turn
        return turn, turns

    def _enter(self) -> None:
        """Note that the save runs in this thread; without ``stage`` before, begin it."""
        if self._entered or self._ticket is None:
            self._begin_save(staged=False)
        self._entered = True
        self._note_thread()

    def _note_thread(self) -> None:
        if self._turn is not None:
            self._turn.thread = threading.current_thread()

    # -- DCP's calls, in their order --------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Accept no ``checkpoint_id`` but "run/step" (``InvalidConfig``)."""
        self._note_thread()
        check_id(checkpoint_id, self.checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Begin the save and return None: this is DCP's first call, before any collective."""
        self._enter()
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that DCP's ranks are those of the run."""
        assert self._ticket is not None, "DCP asks for storage_meta() first"
        del args
        self._is_coordinator = is_coordinator
        rank, own = kwargs.get("rank", 0), self._ticket.shard.rank
        if not kwargs.get("use_collectives", True):
            raise InvalidConfig("use_collectives=False: the ranks would have no common commit")
        if rank != own:
            raise InvalidConfig(
                f"rank {own} of the run saves as rank {rank}",
                hint="leave out no_dist; the process_group must have the run's ranks in order",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stage and protect this rank's shard; the result is one receipt for the whole shard."""
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
            # The coordinator's turn goes on until `finish`, which DCP calls only after success.
            if self._turn is not None and not (written and self._is_coordinator):
                self._turn.ended.set()
        own = ticket.shard
        receipt = Receipt(own.generation, own.rank, dict(notes.digests))
        index = MetadataIndex(f"rank {own.rank}")
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(index, shard.shard_bytes, receipt)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit if all ranks of the run have protected a shard of the same generation.

        Only the coordinator gets this call. Raises ``SaveFailed`` or ``StateMismatch`` otherwise.
        """
        del metadata  # a reader makes it from the shards
        assert self._ticket is not None, "DCP asks for storage_meta() first"
        try:
            self._check([result.storage_data for of_rank in results for result in of_rank])
            self._ticket.commit()
        except AgentUnreachable:
            self._revive_agent()
            raise
        finally:
            if self._turn is not None:
                self._turn.ended.set()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP cannot make a writer from an id."""
        del checkpoint_id
        return False

    def _stage(self, ticket: HeldTicket, shard: ShardPlan) -> None:
        if self._checkpointer is not None:
            self._checkpointer.stage(ticket, shard)
            return
        slots = Slots()  # in DCP's checkpoint process, which has no Checkpointer
        try:
            ticket.stage(shard, slots)
        finally:
            slots.close()

    def _check(self, receipts: list[Receipt]) -> None:
        """Check what the ranks did; a generation that is refused is dropped by all agents.

        Its shards are protected, and the next restart would take it.
        """
        assert self._ticket is not None
        try:
            _check_receipts(receipts, self._ticket)
        except EcckptError:
            with contextlib.suppress(EcckptError, OSError):  # the error being raised has the cause
                self._ticket.revoke()
            raise

    def _revive_agent(self) -> None:
        assert self._ticket is not None
        with contextlib.suppress(EcckptError, OSError):  # the error being raised has the cause
            self._ticket.revive_agent()


def _check_receipts(receipts: list[Receipt], ticket: HeldTicket) -> None:
    receipts = sorted(receipts, key=lambda receipt: receipt.rank)
    ranks = [receipt.rank for receipt in receipts]
    if ranks != list(range(ticket.header.world_size)):
        raise SaveFailed(
            f"{ticket.shard.generation}: {len(ranks)} of {ticket.header.world_size} ranks saved",
            hint="every rank of the run must take part in dcp.save",
        )
    others = {f"{receipt.generation}" for receipt in receipts} - {f"{ticket.shard.generation}"}
    if others:
        raise SaveFailed(
            f"{ticket.shard.generation}: other ranks saved {', '.join(sorted(others))}",
            hint="give the Writer the same step on all ranks, and save in the same order",
        )
    problems = disagreements(receipt.digests for receipt in receipts)
    if problems:
        raise StateMismatch(problems)
