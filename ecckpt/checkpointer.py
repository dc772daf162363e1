"""What a training program uses: Checkpointer, with save, restore and close.

The save path, downwards: ``save`` plans the shard (state/), takes the slot that was reserved at the
node's agent after the save before (reserving.py), copies the state into it and returns. The agent
(agent/protect.py) encodes the slot and has peers hold the fragments; ``saving.Watcher`` sees that
through and commits.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ecckpt import agents as node_agents
from ecckpt import wire
from ecckpt.config import ClusterConfig, NodeConfig, named
from ecckpt.copying import COPY_THREADS
from ecckpt.errors import (
    EcckptError,
    InvalidConfig,
    MemoryBudgetTooSmall,
    NotMapped,
    SaveFailed,
    SaveTimedOut,
    TmpfsFull,
    UnsupportedState,
    WrongOrder,
)
from ecckpt.fragment import HOME, Header, block_bytes_for, fragment_bytes_for
from ecckpt.generation import Generation, ShardId
from ecckpt.guarding import guard
from ecckpt.joining import join
from ecckpt.native import prefer
from ecckpt.ordering import Order, Wanted
from ecckpt.placement import CodeSpec
from ecckpt.rendezvous import meet
from ecckpt.reserving import Reserver, while_alive
from ecckpt.restoring import Found, Restored, Restorer
from ecckpt.retention import Keep
from ecckpt.saving import COMMIT_TIMEOUT_S, Following, SaveHandle, Watcher
from ecckpt.slots import Slots
from ecckpt.staging import Ticket
from ecckpt.state import Replicas, ShardPlan, plan_shard
from ecckpt.storing import Disks, Storer
from ecckpt.tracing import Moment, Tracer, moment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = logging.getLogger(__name__)

# Mistakes of the caller or the set-up: at the first save they are raised, not just reported.
_SETUP_ERRORS = (UnsupportedState, InvalidConfig, MemoryBudgetTooSmall, TmpfsFull, NotMapped)
_SPANS_TIMEOUT_S = 2.0


class Checkpointer:
    """Keeps the state of one rank safe in the memory of the run's nodes.

    All ranks construct it, after ``init_process_group`` if there is one; it meets the other ranks
    and finds or starts this node's agent. Call ``restore`` before the first ``save``, in every
    start of the program; it begins a new timeline and fences off writers of older ones.

    Args:
        run: name of the training job, the same over all its restarts.
        code: ``"auto"``, ``(k, m)`` or ``"k+m"``.
        every_steps: what ``due`` goes by.
        root: folder of this node's agent (default: ``ECCKPT_ROOT``, see ``NodeConfig``).
        agents: addresses of further agents that hold fragments without having ranks.
        memory_bytes: the run's memory budget on this node; 0 for half of the agent's tmpfs.
        disk_every: every nth committed save also goes to the disks of agents that have one (see
            ``ecckpt agent --disk``), behind the saves; 0 for none.
        disk_bytes: the run's budget on each disk; 0 for half of the file system.
        keep, keep_every_steps: what stays on disk: the last ``keep`` stored generations, and those
            with a step that ``keep_every_steps`` divides (0: none).
        min_margin: a save needs k + min_margin fragments at their holders.
        strict: raise from ``save`` what is otherwise only reported by its handle.
        save_timeout_s: a save that is not committed by then has failed.
        restore_timeout_s: how long ranks wait for each other in each step of a restore.
        replicated: patterns of plain tensors that are the same on all ranks, as under DDP: each is
            stored once, in equal shares, instead of by every rank. A pattern names a path and all
            below it ("model"); ``*`` stands for any text, and one that begins with ``!`` takes out
            again. A save in which they differ fails, with the paths and ranks. What belongs to a
            rank, or is a DTensor (which says itself what it is), must not, or need not, be named.
        store, rank, world_size: meet over this ``torch.distributed`` store instead of the default
            process group's. It must be new for every start.

    Raises:
        InvalidCode, InvalidConfig, TooFewNodes, DuplicateNode, AgentUnreachable, AgentMismatch,
        VersionMismatch, RankTimeout: on all ranks alike.
    """

    _restores = 0
    _timeline: int | None = None
    _parent: Generation | None = None
    _plan: ShardPlan | None = None
    _latest: SaveHandle | None = None
    _ticket: Ticket | None = None
    _last_step: int | None = None
    _in_flight: SaveHandle | None = None
    _closed = False

    def __init__(
        self,
        run: str,
        *,
        code: CodeSpec = "auto",
        every_steps: int = 1,
        root: str | Path | None = None,
        agents: Sequence[str] = (),
        memory_bytes: int = 0,
        disk_every: int = 1,
        disk_bytes: int = 0,
        keep: int = 1,
        keep_every_steps: int = 0,
        min_margin: int = 0,
        strict: bool = False,
        replicated: Sequence[str] = (),
        save_timeout_s: float = 120.0,
        restore_timeout_s: float = 300.0,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        _check_sizes(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        self._config = ClusterConfig(
            run,
            code,
            min_margin,
            every_steps,
            save_timeout_s,
            restore_timeout_s,
            disk_every,
            Keep(keep, keep_every_steps),
            named(replicated),
        )
        self._node = NodeConfig.from_environment(root)
        prefer(self._node.engine)
        self._strict = strict
        meeting = self._meeting = meet(store, rank=rank, world_size=world_size)
        self._cluster, self._local_ranks = join(
            meeting, self._config, self._node, agents=agents, memory_bytes=memory_bytes
        )
        self._slots = Slots()
        self._tracer = Tracer()
        peers, agent = self._cluster.peers, self._cluster.agent
        # Rank 0 decides for all; on others it is never begun.
        storer = self._storer = Storer(run, peers, self._disks(disk_bytes))
        self._reserver = Reserver(agent, self._slots, self._revive_agent)
        self._watcher = Watcher(meeting, agent, list(peers.values()), committed=storer.committed)
        self._replicas = Replicas(self._config.replicated, meeting.rank, meeting.world_size)
        self._given_up: list[Generation] = []
        atexit.register(self.close)

    @property
    def run(self) -> str:
        """Name of the training job."""
        return self._config.run

    @property
    def save_timeout_s(self) -> float:
        """When a save that is not committed has failed."""
        return self._config.save_timeout_s

    @property
    def promise(self) -> str:
        """What may be lost without losing a checkpoint, in words."""
        return self._cluster.placement.promise()

    @property
    def timeline(self) -> int | None:
        """The current timeline; None before ``restore``."""
        return self._timeline

    def due(self, step: int) -> bool:
        """Whether the cadence asks for a save after this step; the same on all ranks."""
        return step % self._config.every_steps == 0

    def stored(self) -> Generation | None:
        """The newest generation that is on disk everywhere, as this node's agent knows.

        What a loss of power of the whole cluster comes back to. Asks the agent; raises
        ``AgentUnreachable``.
        """
        run = self._cluster.agent.status()["runs"].get(self._config.run, {})
        stored = run.get("stored", ())
        return Generation.parse(stored[-1]) if stored else None

    def margin(self) -> int | None:
        """How many more nodes may be lost now, whichever they are, with this node's shards kept.

        Of its ranks' newest committed shards, as their holders are now; lost fragments are made
        again in the background. None while that is not known. The margin of the run is the least
        of all nodes. Asks this node's agent; raises ``AgentUnreachable``.
        """
        run = self._cluster.agent.status()["runs"].get(self._config.run, {})
        margin: int | None = run["guard"]["margin"] if run.get("guard") else None
        return margin

    # -- save -------------------------------------------------------------------------------------

    def save(self, step: int, state: dict[str, Any]) -> SaveHandle:
        """Take a snapshot of ``state`` and return; protecting it goes on in the background.

        As soon as this returns the state may change. There is no collective and no network here,
        and mostly not even a word with this node's agent, which has a slot ready from before. Only
        the first save, one that needs a larger slot, and one whose predecessor is not finished
        wait for the agent (so memory stays bounded), and for about two seconds if it is silent.
        What goes wrong is in the handle (with ``strict``, what goes wrong in here is raised) and
        costs no older generation; an unusable state or budget is raised at the first save.
        """
        generation = Generation(self._check_order(step), step, self._meeting.session)
        started_s = time.perf_counter()
        first = self._latest is None
        shard = ShardId(self._config.run, generation, self._meeting.rank)
        handle = SaveHandle(generation, step)
        self._last_step = step
        try:
            self._await_previous()
            self._stage(handle, shard, state)
        except (EcckptError, OSError) as error:
            self._not_saved(handle, shard, error, raised=first and isinstance(error, _SETUP_ERRORS))
        except BaseException:
            # Not ours, from the state's own code: the caller's to handle; the ranks hear at once.
            handle.finish(SaveFailed(f"{shard}: taking the snapshot raised"))
            self._latest = handle
            self._watcher.abandon(shard)
            raise
        self._latest = handle
        handle.stall_s = time.perf_counter() - started_s
        return handle

    def _check_order(self, step: int) -> int:
        """The timeline; ``WrongOrder`` where ``step`` cannot be its next."""
        if self._timeline is None:
            raise WrongOrder("save() before restore()", hint="call restore(state) at every start")
        if self._last_step is not None and step <= self._last_step:
            raise WrongOrder(f"step {step} is not after step {self._last_step}, saved before")
        return self._timeline

    def _await_previous(self) -> None:
        self._settle_ticket()
        previous = self._in_flight
        if previous is None:
            return
        timeout_s = self._config.save_timeout_s
        if not while_alive(self._cluster.agent, previous.wait_done, timeout_s=timeout_s):
            raise SaveTimedOut(f"the save of step {previous.step} is still not finished")
        self._in_flight = None

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

    def _stage(self, handle: SaveHandle, shard: ShardId, state: dict[str, Any]) -> None:
        with self._tracer.span("plan", shard):
            plan = plan_shard(state, previous=self._plan, replicas=self._replicas)
        header = self._header(shard, plan.shard_bytes)
        with self._tracer.span("slot", shard):
            slot = self._reserver.take(self._wish(header))
            payload = self._slots.payload(slot, header.payload_bytes)
        with self._tracer.span("copy", shard):
            plan.write(payload[: plan.shard_bytes], threads=COPY_THREADS)
            # A recycled slot holds an older shard; what lies beyond this one is coded too.
            payload[plan.shard_bytes :] = bytes(header.payload_bytes - plan.shard_bytes)
        staged = moment()
        handle.shard_bytes = plan.shard_bytes
        handle.mark_staged()
        self._plan = plan
        self._in_flight = handle
        message = self._protect(shard, self._targets(), counted=True)

        def start() -> None:
            self._cluster.agent.stage(wire.Stage(header, slot.region))
            self._cluster.agent.protect(message)

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

    def _send_spans(self) -> None:
        """Leave it with the agent where time went; called in the background."""
        with contextlib.suppress(EcckptError, OSError):  # a look that is missing hurts nobody
            agent = replace(self._cluster.agent, timeout_s=_SPANS_TIMEOUT_S)
            agent.spans(wire.Spans(self._config.run, self._tracer.take()))

    def _wish(self, header: Header) -> wire.Reserve:
        return wire.Reserve(
            header=header,
            memory_bytes=self._cluster.memory_bytes,
            local_ranks=self._local_ranks,
            holders=self._cluster.placement.code.holders,
            discard=tuple(self._given_up),
        )

    def _ended(self, header: Header, staged: Moment, error: EcckptError | None) -> None:
        """A save has committed or failed: have a slot for the next, which will be about as large.

        Called by the watcher's thread, while the handle still keeps ``save`` from going on.
        """
        self._tracer.since(staged, "protect and commit", header.shard)
        self._watcher.call(self._send_spans)
        if header.shard.generation.timeline != self._timeline:
            return
        if error is None:
            self._given_up.clear()
            self._watcher.call(self._guard)  # again: its agent may have been replaced
        else:
            self._given_up.append(header.shard.generation)
        self._reserver.ahead(self._wish(header))

    def _header(self, shard: ShardId, shard_bytes: int) -> Header:
        code = self._cluster.placement.code
        return Header(
            shard=shard,
            world_size=self._meeting.world_size,
            index=HOME,
            k=code.k,
            m=code.m,
            shard_bytes=shard_bytes,
            fragment_bytes=fragment_bytes_for(shard_bytes, code.k),
            block_bytes=block_bytes_for(shard_bytes),
            home=self._cluster.home.node,
            parent=self._parent,
            created_unix_s=int(time.time()),
        )

    def _targets(self) -> tuple[wire.Target, ...]:
        holders = self._cluster.placement.holders[self._cluster.home.node]
        peers = self._cluster.peers
        return tuple(
            wire.Target(index, node, peers[node].address) for index, node in enumerate(holders)
        )

    def _protect(
        self, shard: ShardId, targets: tuple[wire.Target, ...], *, counted: bool
    ) -> wire.Protect:
        return wire.Protect(
            shard=shard,
            writer=self._timeline or 0,
            targets=targets,
            min_fragments=self._least() if counted else 0,
            memory_bytes=self._cluster.memory_bytes,
            timeout_s=0.5 * self._config.save_timeout_s,
            discard=tuple(self._given_up),
        )

    def _deadline_s(self) -> float:
        return time.monotonic() + self._config.save_timeout_s

    def _least(self) -> int:
        """Fragments that a shard needs at its holders, in memory and on disk."""
        code = self._cluster.placement.code
        return min(code.k + self._config.min_margin, code.holders)

    def _disks(self, budget_bytes: int) -> Disks:
        return Disks(
            every=self._config.disk_every if self._meeting.rank == 0 else 0,
            keep=self._config.keep,
            budget_bytes=budget_bytes,
            ranks=self._meeting.world_size,
            least=self._least(),
        )

    def _not_saved(
        self, handle: SaveHandle, shard: ShardId, error: Exception, *, raised: bool
    ) -> None:
        known = error if isinstance(error, EcckptError) else EcckptError(f"{shard}: {error}")
        handle.finish(known)
        self._watcher.abandon(shard)
        if raised or self._strict:
            self._latest = handle
            raise known
        _log.warning("step %d was not saved: %s", handle.step, known)

    def _revive_agent(self) -> None:
        """Start this node's agent again, as the node it was, at the address its peers know."""
        node_agents.find_or_start(self._as_it_was())

    def _as_it_was(self) -> NodeConfig:
        home = self._cluster.home
        disk = self._cluster.disk
        return replace(
            self._node, node=home.node, domain=home.domain, listen=home.address, disk=disk
        )

    # -- for writers and readers of other frameworks (integrations/) ------------------------------

    def ticket(self, step: int) -> Ticket:
        """The right to save this rank's shard of ``step`` by other means than ``save``.

        All ranks take one for the same step. What came of the ticket before is asked of the agents;
        if nothing, its shard gives way. Raises ``WrongOrder`` as ``save`` does.
        """
        generation = Generation(self._check_order(step), step, self._meeting.session)
        self._await_previous()
        self._reserver.settle()
        self._latest, self._last_step = None, step
        shard = ShardId(self._config.run, generation, self._meeting.rank)
        self._ticket = Ticket(
            header=self._header(shard, 0),
            protection=self._protect(shard, self._targets(), counted=True),
            agent=self._cluster.agent,
            peers=tuple(self._cluster.peers.values()),
            node=self._as_it_was(),
            local_ranks=self._local_ranks,
            timeout_s=self._config.save_timeout_s,
        )
        return self._ticket

    def stage(self, ticket: Ticket, plan: ShardPlan) -> None:
        """``ticket.stage`` in this process, where slots are mapped already."""
        ticket.stage(plan, self._slots)

    def find(self, *, step: int | None = None) -> Found | None:
        """Begin a new timeline, and say what there is to continue from: the newest, or ``step``.

        What ``restore`` does, but for the reading: None if there never was a generation. All ranks
        call it. Raises ``NothingToRestore``, ``RankTimeout``.
        """
        if self._in_flight is not None:
            self._in_flight.wait_done(self._config.save_timeout_s)
        restorer = self._restorer()
        order, found = restorer.find(Wanted(step))
        self._begin(order, restorer)
        self._parent = found.generation if found else None
        return found

    # -- restore ----------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        generation: Generation | str | None = None,
        resume: Literal["auto", "required"] = "auto",
    ) -> Restored | None:
        """Bring ``state`` back to the newest generation that survives; None if there never was one.

        All ranks call it, and all take the same generation: one whose bytes cannot be proven on
        some rank is refused and the next older one is taken. Nothing in ``state`` changes before
        every rank has its shard in memory, proven, and checked against the state.

        ``step`` (its newest timeline) or ``generation`` (as a status or a plan spells it) restores
        that one instead of the newest: a roll-back. What is newer is abandoned by it: later
        restarts do not take it, even if they happen before the next save, except by name.

        Any number of ranks may restore, on any mesh and with any placements: DTensors are cut anew,
        plain tensors are made of them and they of plain tensors. On another number of ranks than
        saved, what was the same on all of them is handed to every rank, ``RngState`` is seeded anew
        (see ``Restored.reseeded``), and anything else that differed between ranks is a
        ``StateMismatch``. Nodes without ranks must be named in ``agents=`` to be read from.

        Raises:
            NothingToRestore: traces of the run were found but none of its generations can be
                rebuilt, or there were none and ``resume="required"``.
            NoRoomToRestore: a node has no memory for a shard; nothing was changed.
            Fenced: another start of the run has begun meanwhile; this one must end.
            StateMismatch: the saved state does not fit; every path is named, nothing was changed.
            RankTimeout: a rank did not answer in time.
        """
        if resume not in ("auto", "required"):
            raise InvalidConfig(f'resume={resume!r} is neither "auto" nor "required"')
        if step is not None and generation is not None:
            raise InvalidConfig(f"step={step} and generation={generation}: give one of them")
        if isinstance(generation, str):
            generation = Generation.parse(generation)
        if self._in_flight is not None:
            self._in_flight.wait_done(self._config.save_timeout_s)
        restorer = self._restorer()
        order, restored = restorer.run(
            state, Wanted(step, generation), required=resume == "required"
        )
        self._begin(order, restorer)
        self._watcher.call(self._send_spans)
        if restored is not None:
            self._parent = restored.generation
            self._protect_again(order, restored)
        return restored

    def _restorer(self) -> Restorer:
        self._restores += 1
        return Restorer(
            self._meeting,
            self._cluster,
            self._slots,
            number=self._restores,
            after=self._timeline or 0,
            timeout_s=self._config.restore_timeout_s,
            tracer=self._tracer,
        )

    def _begin(self, order: Order, restorer: Restorer) -> None:
        self._timeline = order.timeline
        self._storer.begin(order.timeline, restorer.leader.on_disk, restorer.leader.roll_backs)
        self._latest = self._in_flight = self._ticket = self._last_step = None
        self._given_up.clear()  # of the timeline that has ended; one of them may be restored now
        self._watcher.call(restorer.leader.tell)
        self._watcher.call(self._guard)

    def _guard(self) -> None:
        timeout_s = 0.5 * self._config.save_timeout_s
        guard(
            self._cluster, self._timeline or 0, local_ranks=self._local_ranks, timeout_s=timeout_s
        )

    def _protect_again(self, order: Order, restored: Restored) -> None:
        """Re-make what the restored generation lost, from the home copy that is here now."""
        handle = restored.reprotection
        if order.header is None or not order.repair:
            handle.finish()
            return
        handle.mark_staged()
        shard, agent = order.header.shard, self._cluster.agent
        message = self._protect(shard, order.repair, counted=False)
        self._watcher.follow(
            Following(handle, shard, self._deadline_s(), lambda: agent.protect(message), False)
        )

    # -- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until the last save is committed or has failed, and let everything go.

        Rank 0 also waits for what is on its way to disk, at most ``save_timeout_s``. Where the
        ranks' store hangs, it returns after twice that, and the save has failed here.

        The agent and what it holds stay. Called at exit if the program did not. With ``strict`` the
        error of the last save is raised.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        settled = self._watcher.close(self._patience_s())
        if not settled and self._latest is not None:
            self._latest.finish(SaveTimedOut("the store of the ranks does not answer"))
        if settled and self._meeting.rank == 0:
            self._settle_ticket()  # for the disks
        self._storer.close(self._config.save_timeout_s)
        self._reserver.close()
        self._slots.close()
        if self._strict and self._latest is not None and self._latest.error is not None:
            raise self._latest.error

    def _patience_s(self) -> float:
        """More than a last save, a re-protection and telling all agents of it may take."""
        return 2 * self._config.save_timeout_s + COMMIT_TIMEOUT_S * (len(self._cluster.peers) + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 0:
            raise InvalidConfig(f"{name}={value} is negative")


__all__ = ["Checkpointer", "Restored", "SaveHandle"]
