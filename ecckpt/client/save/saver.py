"""The saves of one rank, from the call of ``save()`` to the routine that sees the save through.

    save -> wait for the save before -> plan the shard -> take a slot (slot_reserver.py)
         -> copy the state into it -> queue the rest (commit_protocol.py) and return

If a slot was reserved in advance, ``save()`` sends no request.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Any

from ecckpt.client import deadlines
from ecckpt.client.effects import (
    FinishHandle,
    Lane,
    Mark,
    Moment,
    Now,
    Queue,
    Report,
    Routine,
    TraceSpan,
    call_own,
    perform,
    traced,
    until,
)
from ecckpt.client.events import Message, SaveFailure
from ecckpt.client.handles import SaveHandle
from ecckpt.client.save.commit_protocol import CommitProtocol, StagedSave
from ecckpt.client.save.replica_check import ReplicaCheck
from ecckpt.client.save.slot_reserver import SlotReserver, while_alive
from ecckpt.client.save.staging import Deadline, copy_into_slot, start_protecting
from ecckpt.client.save.ticket import Ticket
from ecckpt.client.save.traces import send_spans
from ecckpt.client.save.unsaved import Unsaved
from ecckpt.client.state_effects import PlanState, Snapshot
from ecckpt.errors import (
    EcckptError,
    Fenced,
    InvalidConfig,
    MemoryBudgetTooSmall,
    NotMapped,
    SaveFailed,
    SaveSkipped,
    SaveTimedOut,
    TmpfsFull,
    UnsupportedState,
    WrongOrder,
)
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.save import Protect, Stage, Target
from ecckpt.protocol.verbs import GUARD, PROTECT

if TYPE_CHECKING:
    from ecckpt.client.cluster.requests import Requests
    from ecckpt.client.save.archive_protocol import Archivist

# Mistakes of the caller or the set-up: raised at the first save, only reported at later ones.
_SETUP_ERRORS = (UnsupportedState, InvalidConfig, MemoryBudgetTooSmall, TmpfsFull, NotMapped)

# Each message to an agent names the failed saves since the last success, so that their files go.
# What an agent missed of older ones goes with the next success.
_GIVEN_UP_LIMIT = 256


class Saver:
    """Saves of one rank, one after another; ``begin_timeline`` comes before the first of each.

    Args:
        requests: the messages.
        archivist: brings committed generations to the disks; at work on rank 0 only.
        strict: raise what is otherwise only reported by a handle.
        unsaved: counts the saves that fail in a row.
    """

    def __init__(
        self, requests: Requests, archivist: Archivist, *, strict: bool, unsaved: Unsaved
    ) -> None:
        self.timeline: int | None = None
        self.skipped = 0
        self.latest: SaveHandle | None = None
        self.reserver = SlotReserver()
        self._requests, self._archivist, self._strict = requests, archivist, strict
        self._unsaved = unsaved
        self._timeout_s = requests.config.save_timeout_s
        self._commits = CommitProtocol(requests.cluster)
        self._parent: Generation | None = None
        self._snapshot: Snapshot | None = None
        self._ticket: Ticket | None = None
        self._last_step: int | None = None
        self._given_up: deque[Generation] = deque(maxlen=_GIVEN_UP_LIMIT)
        self._under_way: list[SaveHandle] = []
        self._claimed: list[str] = []  # keys of replica checks that are still in the store

    def begin_timeline(self, timeline: int, parent: Generation | None) -> Routine[None]:
        """Saves are of this timeline from now on, which goes on from ``parent``."""
        self.timeline = self._commits.timeline = timeline
        self._parent = parent
        self.latest = self._ticket = self._last_step = None
        self._under_way.clear()
        # Those were given up on the timeline that has ended; one of them may be restored now.
        self._given_up.clear()
        yield from perform(Queue(Lane.FOLLOW, self._guard()))

    def save(self, step: int, state: Any, patience_s: float) -> Routine[SaveHandle]:
        """See ``Checkpointer.save``."""
        if not patience_s >= 0:
            raise InvalidConfig(f"patience_s={patience_s} is not a time to wait")
        generation = self._next_generation(step)
        if self.latest is not None and isinstance(self.latest.error, Fenced):
            raise self.latest.error  # another start has taken over: no save will ever succeed
        began_s = yield from perform(Now())
        first = self.latest is None
        shard = self._requests.shard(generation)
        handle = SaveHandle(generation, step, began_s=began_s)
        self._last_step = step
        try:
            yield from self._settle_ticket()
            deadline_s = math.inf if first else (yield from perform(Now())) + patience_s
            yield from self._await_others(step, deadline_s)
            yield from self._stage(handle, shard, state, deadline_s)
        except GeneratorExit:
            raise
        except (EcckptError, OSError) as error:
            raised = first and isinstance(error, _SETUP_ERRORS)
            yield from self._not_saved(handle, shard, error, raised=raised)
        except BaseException:
            # From the state's own code: the caller handles it, the other ranks hear at once.
            yield from self._abandon(handle, shard, SaveFailed(f"{shard}: the snapshot raised"))
            raise
        self.latest = handle
        handle.stall_s = (yield from perform(Now())) - began_s
        self._unsaved.require_hope(began_s)
        return handle

    def _next_generation(self, step: int) -> Generation:
        """The generation of that step; ``WrongOrder`` where it cannot be the next."""
        if self.timeline is None:
            raise WrongOrder("save() before restore()", hint="call restore(state) at every start")
        if self._last_step is not None and step <= self._last_step:
            raise WrongOrder(f"step {step} is not after step {self._last_step}, saved before")
        return Generation(self.timeline, step, self._requests.cluster.session)

    def _await_others(self, step: int, deadline_s: float) -> Routine[None]:
        """Raise ``SaveSkipped`` where the saves before are not through by then."""
        self._under_way = [handle for handle in self._under_way if not handle.left]
        for handle in self._under_way:
            now_s = yield from perform(Now())
            left_s = min(max(0.0, deadline_s - now_s), self._timeout_s)
            if not (yield from until(lambda each=handle: each.left, left_s)):  # type: ignore[misc]
                age_s = (yield from perform(Now())) - handle.began_s
                raise SaveSkipped(step, handle.waits_for, unfinished=handle.step, age_s=age_s)
        self._under_way.clear()

    def _stage(
        self, handle: SaveHandle, shard: ShardId, state: Any, deadline_s: float
    ) -> Routine[None]:
        planned = perform(PlanState(state, self._snapshot))
        snapshot = yield from traced("plan", shard, planned)
        unix_s, _ = yield from perform(Mark())
        header = self._requests.header(
            shard, snapshot.shard_bytes, self._parent, created_unix_s=int(unix_s)
        )
        taken = self.reserver.take(self._requests.slot(header, self._given_up), deadline_s)
        slot = yield from traced("slot", shard, taken)
        if slot is None:
            age_s = (yield from perform(Now())) - handle.began_s
            raise SaveSkipped(handle.step, self.reserver.waits_for, unfinished=None, age_s=age_s)
        yield from copy_into_slot(snapshot, header, slot)
        staged = yield from perform(Mark())
        handle.shard_bytes = snapshot.shard_bytes
        handle.mark_staged((yield from perform(Now())))
        self._snapshot = snapshot
        self._under_way.append(handle)
        protect = self._requests.protection(shard, self._given_up)
        claim = snapshot.claim
        save = StagedSave(
            handle=handle,
            deadline=(yield from self._deadline(shard)),
            begin=lambda: start_protecting(Stage(header, slot.region), protect),
            check=ReplicaCheck(shard, claim, self._claimed) if claim else None,
            ended=lambda error: self._ended(header, staged, error),
        )
        yield from perform(Queue(Lane.FOLLOW, self._commits.see_through(save)))

    def _ended(self, header: Header, staged: Moment, error: EcckptError | None) -> Routine[None]:
        """A save has committed or failed: have a slot for the next, which will be about as large.

        The handle still keeps the next ``save`` from beginning.
        """
        generation = header.shard.generation
        if error is None:
            self._archivist.note_commit(generation)
            self._unsaved.note_commit()
        else:
            self._unsaved.note_failure(error, (yield from perform(Now())))
        yield from perform(TraceSpan("protect and commit", header.shard, staged))
        yield from perform(Queue(Lane.FOLLOW, self.send_spans()))
        if generation.timeline != self.timeline:
            return
        if error is None:
            self._given_up.clear()
            yield from perform(Queue(Lane.FOLLOW, self._guard()))  # its agent may be a new one
        else:
            self._given_up.append(generation)
        yield from self.reserver.ahead(self._requests.slot(header, self._given_up))

    def _not_saved(
        self, handle: SaveHandle, shard: ShardId, error: Exception, *, raised: bool
    ) -> Routine[None]:
        known = error if isinstance(error, EcckptError) else EcckptError(f"{shard}: {error}")
        self._unsaved.note_failure(known, (yield from perform(Now())))
        yield from self._abandon(handle, shard, known)
        self.skipped += handle.skipped
        if raised or self._strict:
            raise known

    def _abandon(self, handle: SaveHandle, shard: ShardId, error: EcckptError) -> Routine[None]:
        """The other ranks hear of it, and begin their next save when this one does."""
        yield from perform(FinishHandle(handle, error))
        self.latest = handle
        self._under_way.append(handle)
        yield from perform(Report(SaveFailure(shard, error)))
        deadline = yield from self._deadline(shard)
        yield from perform(Queue(Lane.FOLLOW, self._commits.abandon(handle, deadline)))

    def _deadline(self, shard: ShardId) -> Routine[Deadline]:
        return Deadline(shard, (yield from perform(Now())) + self._timeout_s)

    # -- by other means ---------------------------------------------------------------------------

    def ticket(self, step: int) -> Routine[Ticket]:
        """See ``Checkpointer.ticket``."""
        generation = self._next_generation(step)
        yield from self._settle_ticket()
        for handle in self._under_way:

            def left(wait_s: float, each: SaveHandle = handle) -> Routine[bool]:
                return (yield from until(lambda: each.left, wait_s))

            if not (yield from while_alive(left, timeout_s=self._timeout_s)):
                raise SaveTimedOut(f"the save of step {handle.step} is still not finished")
        self._under_way.clear()
        yield from self.reserver.settle()
        self.latest, self._last_step = None, step
        shard = self._requests.shard(generation)
        cluster = self._requests.cluster
        self._ticket = Ticket(
            header=self._requests.header(shard, 0, self._parent, created_unix_s=0),
            protection=self._requests.protection(shard, self._given_up),
            nodes=tuple(cluster.address),
            local_ranks=cluster.local_ranks,
            timeout_s=self._timeout_s,
        )
        return self._ticket

    def _settle_ticket(self) -> Routine[None]:
        """Ask the agents how the last ticket's save went: its holder does not tell."""
        if self._ticket is None:
            return
        ticket = self._ticket
        is_committed = yield from ticket.is_committed()
        self._ticket = None
        if is_committed:
            self._given_up.clear()
            self._archivist.note_commit(ticket.shard.generation)
        else:
            self._given_up.append(ticket.shard.generation)

    def protect_again(
        self, header: Header, targets: tuple[Target, ...], handle: SaveHandle
    ) -> Routine[None]:
        """Re-make the fragments of a restored shard that were lost, from the home copy here now."""
        if not targets:
            yield from perform(FinishHandle(handle, None))
            return
        handle.mark_staged((yield from perform(Now())))
        protect = self._requests.repair(header.shard, self.timeline or 0, targets)
        save = StagedSave(
            handle=handle,
            deadline=(yield from self._deadline(header.shard)),
            begin=lambda: _protect(protect),
            check=None,
            ended=_nothing,
            counted=False,
        )
        yield from perform(Queue(Lane.FOLLOW, self._commits.see_through(save)))

    # -- beside the saves -------------------------------------------------------------------------

    def send_spans(self) -> Routine[None]:
        """Leave with this node's agent where time went; in the background."""
        yield from send_spans(self._requests.cluster.run)

    def _guard(self) -> Routine[None]:
        """Have this node's agent watch the holders, with little patience: it is asked again."""
        try:
            yield from call_own(GUARD, self._requests.guard(self.timeline or 0), deadlines.GUARD_S)
        except (EcckptError, OSError) as error:
            text = f"no agent watches the holders until the next save: {error}"
            yield from perform(Report(Message(logging.WARNING, text)))

    # -- end --------------------------------------------------------------------------------------

    def settle(self) -> Routine[None]:
        """Wait until no save is under way, at most until they are late."""
        deadline_s = (yield from perform(Now())) + self._timeout_s
        for handle in self._under_way:
            left_s = max(0.0, deadline_s - (yield from perform(Now())))
            yield from until(lambda each=handle: each.done, left_s)  # type: ignore[misc]

    def begin_close(self) -> None:
        """From now on waits for other ranks end early."""
        self._commits.closing = True

    def unfinished(self) -> list[SaveHandle]:
        """Saves that have neither committed nor failed."""
        return [handle for handle in self._under_way if not handle.done]

    def finish_close(self, *, settled: bool) -> Routine[None]:
        """Note for the disks how the last ticket went, and reserve no more slots."""
        if settled and self._requests.cluster.rank == 0:
            with contextlib.suppress(SaveFailed):  # nothing is given up, and nothing stored
                yield from self._settle_ticket()
        self.reserver.close()


def _protect(message: Protect) -> Routine[None]:
    yield from call_own(PROTECT, message, deadlines.CALL_S)


def _nothing(error: EcckptError | None) -> Routine[None]:
    del error
    yield from ()
