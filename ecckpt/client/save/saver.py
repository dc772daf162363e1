"""The save path of one rank, from the call to the watcher that sees the save through.

    save -> wait for the save before -> plan the shard (state/) -> take a slot (reserving.py)
         -> copy the state into it -> leave the rest to the watcher (saving.py) and return

With a slot reserved ahead nobody is asked anything on the way.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ecckpt.client.cluster.rendezvous import Meeting
from ecckpt.client.cluster.requests import Asking, guard
from ecckpt.client.config import NodeConfig
from ecckpt.client.handles import SaveHandle
from ecckpt.client.save.archive_thread import Storer
from ecckpt.client.save.commit_notice import COMMIT_TIMEOUT_S
from ecckpt.client.save.slot_reserver import Reserver, while_alive
from ecckpt.client.save.ticket import Ticket
from ecckpt.client.save.watcher import Following, Watcher
from ecckpt.client.slot_mappings import Slots
from ecckpt.errors import (
    EcckptError,
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
from ecckpt.memory.buffers import COPY_THREADS
from ecckpt.protocol.messages.save import Stage, Target
from ecckpt.protocol.messages.trace import Spans
from ecckpt.protocol.tracing import Moment, Tracer, moment
from ecckpt.protocol.verbs import PROTECT, SPANS, STAGE
from ecckpt.state.snapshot.plan import ShardPlan, plan_shard
from ecckpt.state.snapshot.replicas import Replicas

_log = logging.getLogger(__name__)

# Mistakes of the caller or the set-up: at the first save they are raised, not just reported.
_SETUP_ERRORS = (UnsupportedState, InvalidConfig, MemoryBudgetTooSmall, TmpfsFull, NotMapped)
_SPANS_TIMEOUT_S = 2.0


class Saver:
    """Saves of one rank, one after another; ``begin`` comes before the first of a timeline.

    Args:
        asking: the messages.
        strict: raise what is otherwise only reported by a handle.
        node: this node's agent as it was found, to start it again.
        revive: starts it; called in the background.
    """

    timeline: int | None = None
    skipped = 0
    latest: SaveHandle | None = None
    _parent: Generation | None = None
    _plan: ShardPlan | None = None
    _ticket: Ticket | None = None
    _last_step: int | None = None

    def __init__(
        self,
        asking: Asking,
        meeting: Meeting,
        slots: Slots,
        tracer: Tracer,
        storer: Storer,
        *,
        strict: bool,
        node: NodeConfig,
        revive: Callable[[], None],
    ) -> None:
        self._asking, self._session, self._strict, self._node = (
            asking,
            meeting.session,
            strict,
            node,
        )
        self._cluster, self._timeout_s = asking.cluster, asking.config.save_timeout_s
        self._slots, self._tracer, self._storer = slots, tracer, storer
        self._reserver = Reserver(self._cluster.agent, slots, revive)
        share = [self._cluster.peers[node] for node in self._cluster.share]
        self._watcher = Watcher(meeting, self._cluster.agent, share, committed=storer.committed)
        self._replicas = Replicas(asking.config.replicated, asking.rank, asking.ranks)
        self._given_up: list[Generation] = []
        self._under_way: list[SaveHandle] = []

    def begin(self, timeline: int, parent: Generation | None) -> None:
        """Saves are of this timeline from now on, which goes on from ``parent``."""
        self.timeline, self._parent = timeline, parent
        self.latest = self._ticket = self._last_step = None
        self._under_way.clear()
        self._given_up.clear()  # of the timeline that has ended; one of them may be restored now
        self._watcher.call(self._guard)

    def save(self, step: int, state: dict[str, Any], patience_s: float) -> SaveHandle:
        """See ``Checkpointer.save``."""
        if not patience_s >= 0:
            raise InvalidConfig(f"patience_s={patience_s} is not a time to wait")
        generation = self._next(step)
        started_s = time.perf_counter()
        first = self.latest is None
        shard = self._asking.shard(generation)
        handle = SaveHandle(generation, step)
        self._last_step = step
        try:
            self._settle_ticket()
            deadline_s = math.inf if first else time.monotonic() + patience_s
            self._await_others(step, deadline_s)
            self._stage(handle, shard, state, deadline_s)
        except (EcckptError, OSError) as error:
            self._not_saved(handle, shard, error, raised=first and isinstance(error, _SETUP_ERRORS))
        except BaseException:
            # Not ours, from the state's own code: the caller's to handle; the ranks hear at once.
            self._abandon(handle, shard, SaveFailed(f"{shard}: taking the snapshot raised"))
            raise
        self.latest = handle
        handle.stall_s = time.perf_counter() - started_s
        return handle

    def _next(self, step: int) -> Generation:
        """The generation of that step; ``WrongOrder`` where it cannot be the next."""
        if self.timeline is None:
            raise WrongOrder("save() before restore()", hint="call restore(state) at every start")
        if self._last_step is not None and step <= self._last_step:
            raise WrongOrder(f"step {step} is not after step {self._last_step}, saved before")
        return Generation(self.timeline, step, self._session)

    def _await_others(self, step: int, deadline_s: float) -> None:
        """``SaveSkipped`` where the saves before are not through by then."""
        self._under_way = [each for each in self._under_way if not each.wait_left(0)]
        for each in self._under_way:
            if not each.wait_left(min(max(0.0, deadline_s - time.monotonic()), self._timeout_s)):
                raise SaveSkipped(step, each.waits_for, unfinished=each.step, age_s=each.age_s)
        self._under_way.clear()

    def _stage(
        self, handle: SaveHandle, shard: ShardId, state: dict[str, Any], deadline_s: float
    ) -> None:
        with self._tracer.span("plan", shard):
            plan = plan_shard(state, previous=self._plan, replicas=self._replicas)
        header = self._asking.header(shard, plan.shard_bytes, self._parent)
        with self._tracer.span("slot", shard):
            slot = self._reserver.take(self._asking.slot(header, self._given_up), deadline_s)
            if slot is None:
                why = self._reserver.waits_for
                raise SaveSkipped(handle.step, why, unfinished=None, age_s=handle.age_s)
            payload = self._slots.payload(slot, header.payload_bytes)
        with self._tracer.span("copy", shard):
            plan.write(payload[: plan.shard_bytes], threads=COPY_THREADS)
            # A recycled slot holds an older shard; what lies beyond this one is coded too.
            payload[plan.shard_bytes :] = bytes(header.payload_bytes - plan.shard_bytes)
        staged = moment()
        handle.shard_bytes = plan.shard_bytes
        handle.mark_staged()
        self._plan = plan
        self._under_way.append(handle)
        message = self._asking.protection(shard, self._given_up)

        def start() -> None:
            self._cluster.agent.call(STAGE, Stage(header, slot.region))
            self._cluster.agent.call(PROTECT, message)

        self._watcher.follow(
            Following(
                handle,
                shard,
                self._deadline_s(),
                start,
                counted=True,
                claim=plan.claim,
                ended=lambda error: self._ended(header, staged, error),
            )
        )

    def _ended(self, header: Header, staged: Moment, error: EcckptError | None) -> None:
        """A save has committed or failed: have a slot for the next, which will be about as large.

        Called by the watcher's thread, while the handle still keeps ``save`` from going on.
        """
        self._tracer.since(staged, "protect and commit", header.shard)
        self._watcher.call(self.send_spans)
        if header.shard.generation.timeline != self.timeline:
            return
        if error is None:
            self._given_up.clear()
            self._watcher.call(self._guard)  # again: its agent may have been replaced
        else:
            self._given_up.append(header.shard.generation)
        self._reserver.ahead(self._asking.slot(header, self._given_up))

    def _not_saved(
        self, handle: SaveHandle, shard: ShardId, error: Exception, *, raised: bool
    ) -> None:
        known = error if isinstance(error, EcckptError) else EcckptError(f"{shard}: {error}")
        self._abandon(handle, shard, known)
        self.skipped += handle.skipped
        if raised or self._strict:
            raise known
        _log.warning("step %d was not saved: %s", handle.step, known)

    def _abandon(self, handle: SaveHandle, shard: ShardId, error: EcckptError) -> None:
        """The other ranks hear of it, and begin their next save when this one does."""
        handle.finish(error)
        self.latest = handle
        self._under_way.append(handle)
        self._watcher.abandon(handle, shard, self._deadline_s())

    def _deadline_s(self) -> float:
        return time.monotonic() + self._timeout_s

    # -- by other means ---------------------------------------------------------------------------

    def ticket(self, step: int) -> Ticket:
        """See ``Checkpointer.ticket``."""
        generation = self._next(step)
        self._settle_ticket()
        for each in self._under_way:
            if not while_alive(self._cluster.agent, each.wait_left, timeout_s=self._timeout_s):
                raise SaveTimedOut(f"the save of step {each.step} is still not finished")
        self._under_way.clear()
        self._reserver.settle()
        self.latest, self._last_step = None, step
        shard = self._asking.shard(generation)
        self._ticket = Ticket(
            header=self._asking.header(shard, 0, self._parent),
            protection=self._asking.protection(shard, self._given_up),
            agent=self._cluster.agent,
            peers=tuple(self._cluster.peers.values()),
            node=self._node,
            local_ranks=self._asking.local_ranks,
            timeout_s=self._timeout_s,
        )
        return self._ticket

    def _settle_ticket(self) -> None:
        """Whoever had the ticket does not tell how it went; the agents know."""
        if self._ticket is None:
            return
        generation = self._ticket.shard.generation
        if self._ticket.is_committed():
            self._given_up.clear()
            self._storer.committed(generation)
        else:
            self._given_up.append(generation)
        self._ticket = None

    def protect_again(
        self, header: Header, targets: tuple[Target, ...], handle: SaveHandle
    ) -> None:
        """Re-make the fragments of a restored shard that were lost, from the home copy here now."""
        if not targets:
            handle.finish()
            return
        handle.mark_staged()
        shard, agent = header.shard, self._cluster.agent
        message = self._asking.repair(shard, self.timeline or 0, targets)

        def start() -> None:
            agent.call(PROTECT, message)

        self._watcher.follow(Following(handle, shard, self._deadline_s(), start, False))

    # -- beside the saves -------------------------------------------------------------------------

    def call(self, act: Callable[[], object]) -> None:
        """Do something in the background, after the saves that are under way."""
        self._watcher.call(act)

    def send_spans(self) -> None:
        """Leave it with the agent where time went; called in the background."""
        with contextlib.suppress(EcckptError, OSError):  # a look that is missing hurts nobody
            agent = replace(self._cluster.agent, timeout_s=_SPANS_TIMEOUT_S)
            agent.call(SPANS, Spans(self._asking.config.run, self._tracer.take()))

    def _guard(self) -> None:
        guard(
            self._cluster,
            self.timeline or 0,
            local_ranks=self._asking.local_ranks,
            timeout_s=0.5 * self._timeout_s,
        )

    # -- end --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until no save is under way, at most until they are late."""
        deadline_s = self._deadline_s()
        for each in self._under_way:
            each.wait_done(max(0.0, deadline_s - time.monotonic()))

    def close(self) -> None:
        """Wait until the last save is committed or has failed, and end the threads."""
        # More than a last save, a re-protection and telling the agents of it may take.
        patience_s = 2 * self._timeout_s + COMMIT_TIMEOUT_S * (len(self._cluster.share) + 1)
        settled = self._watcher.close(patience_s)
        if not settled:
            for each in self._under_way:
                if not each.done:
                    each.finish(SaveTimedOut("the store of the ranks does not answer"))
        if settled and self._asking.rank == 0:
            self._settle_ticket()  # for the disks
        self._storer.close(self._timeout_s)
        self._reserver.close()
