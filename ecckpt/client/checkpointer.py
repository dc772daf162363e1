"""What a training program uses: Checkpointer, with save, restore and close.

It joins the run (cluster/join.py) and performs the routines of its session (rank_session.py) with
threads (threads.py). docs/ARCHITECTURE.md lists the files of a save and of a restore in order.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ecckpt.client.arguments import step_of
from ecckpt.client.cluster.join import join
from ecckpt.client.cluster.rendezvous import meet
from ecckpt.client.cluster.requests import Requests
from ecckpt.client.config import ClusterConfig, NodeConfig, named
from ecckpt.client.deadlines import BRING_SHARE, COMMIT_S, peer_patience_s
from ecckpt.client.effects import Lane
from ecckpt.client.handles import SaveHandle
from ecckpt.client.held_ticket import HeldTicket
from ecckpt.client.rank_session import RankSession
from ecckpt.client.restore.found import FoundGeneration
from ecckpt.client.restore.protocol import Wanted
from ecckpt.client.restore.restorer import Restored
from ecckpt.client.slot_mappings import Slots
from ecckpt.client.state_performer import StatePerformer
from ecckpt.client.threads import ThreadPerformer
from ecckpt.errors import InvalidConfig, SaveTimedOut, WrongOrder
from ecckpt.format.ids import Generation
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.memory.native import prefer
from ecckpt.policy.placement import CodeSpec
from ecckpt.policy.retention import Keep
from ecckpt.protocol.tracing import Tracer
from ecckpt.state.snapshot.plan import ShardPlan
from ecckpt.state.snapshot.replicas import Replicas

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


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
        min_margin: a save needs k + min_margin fragments of every shard at their holders. None: all
            k + m, but those whose holders cannot be reached, and at least k. So a holder that is
            there and has no room fails the save, and a dead one does not.
        strict: raise from ``save`` what is otherwise only reported by its handle.
        max_unsaved_s: ``save`` raises ``SaveFailed`` once no save was committed for so long and at
            least three in a row have failed; infinity: never. Saving goes on behind it.
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
        min_margin: int | None = None,
        strict: bool = False,
        max_unsaved_s: float = 1800.0,
        replicated: Sequence[str] = (),
        save_timeout_s: float = 120.0,
        restore_timeout_s: float = 300.0,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._pid = os.getpid()
        _check_sizes(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        self._config = ClusterConfig(
            run=run,
            code=code,
            min_margin=min_margin,
            every_steps=every_steps,
            save_timeout_s=save_timeout_s,
            restore_timeout_s=restore_timeout_s,
            disk_every=disk_every,
            keep=Keep(keep, keep_every_steps),
            replicated=named(replicated),
        )
        node = NodeConfig.from_environment(root)
        prefer(node.engine)
        self._strict = strict
        meeting = meet(store, rank=rank, world_size=world_size)
        self._cluster, self._connections = join(
            meeting, self._config, node, agents=agents, memory_bytes=memory_bytes
        )
        self._slots = Slots()
        self._effects = StatePerformer(
            self._connections,
            self._slots,
            rank=self._cluster.rank,
            ranks=self._cluster.ranks,
            replicas=Replicas(self._config.replicated, self._cluster.rank, self._cluster.ranks),
            home=self._cluster.home,
        )
        self._performer = ThreadPerformer(
            self._connections, Tracer(), self._effects.table, meeting=meeting, lanes=list(Lane)
        )
        requests = Requests(self._config, self._cluster)
        self._session = RankSession(
            requests, disk_bytes=disk_bytes, strict=strict, max_unsaved_s=max_unsaved_s
        )
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
        return self._session.saver.timeline

    @property
    def skipped(self) -> int:
        """How many saves this rank has skipped (see ``save``)."""
        return self._session.saver.skipped

    def due(self, step: int) -> bool:
        """Whether the cadence asks for a save after this step; the same on all ranks."""
        return step % self._config.every_steps == 0

    def stored(self) -> Generation | None:
        """The newest generation that is on disk everywhere, as this node's agent knows.

        What a loss of power of the whole cluster comes back to. Asks the agent; raises
        ``AgentUnreachable``.
        """
        run = self._connections.agent.status()["runs"].get(self._cluster.run, {})
        stored = run.get("stored", ())
        return Generation.parse(stored[-1]) if stored else None

    def margin(self) -> int | None:
        """How many more nodes may be lost now, whichever they are, with this node's shards kept.

        Of its ranks' newest committed shards, as their holders are now; lost fragments are made
        again in the background. None while that is not known. The margin of the run is the least
        of all nodes. Asks this node's agent; raises ``AgentUnreachable``.
        """
        run = self._connections.agent.status()["runs"].get(self._cluster.run, {})
        margin: int | None = run["guard"]["margin"] if run.get("guard") else None
        return margin

    # -- save -------------------------------------------------------------------------------------

    def save(self, step: int, state: dict[str, Any], *, patience_s: float = 0.05) -> SaveHandle:
        """Take a snapshot of ``state`` and return; protecting it goes on in the background.

        As soon as this returns the state may change. There is no collective and no network here,
        and mostly not even a word with this node's agent, which has a slot ready from before.

        The saves before must be through on all ranks, so memory stays bounded, and a larger state
        needs a larger slot. Both are waited for for ``patience_s`` seconds in all; what is not
        ready by then costs this save, not time: it is skipped (``SaveSkipped`` in its handle), the
        other ranks give theirs of this step up as well, and older generations are untouched. Give
        more patience where the save matters more than the time: the last one, or one before the
        machine is taken away. Only the first save waits for its slot for as long as the agent
        takes, and for about two seconds if it is silent.

        What goes wrong is in the handle (with ``strict``, what goes wrong in here is raised) and
        costs no older generation; an unusable state or budget is raised at the first save.

        Raises:
            WrongOrder: before ``restore``, after ``close``, in a forked process, or for a step that
                is not after the last one.
            TypeError, InvalidConfig: for a step that is no whole number from 0 to 10^18 - 1, or a
                ``patience_s`` below 0.
            Fenced: another start of the run has taken over, as an earlier save was told.
            SaveFailed: see ``max_unsaved_s``.
        """
        step = step_of(step, state)
        self._require_usable("save")
        # In the caller's thread, because it may unregister mappings with CUDA (``Slots.ahead``).
        self._slots.drop_removed()
        return self._performer.run(self._session.save(step, state, patience_s))

    # -- for writers and readers of other frameworks (integrations/) ------------------------------

    def ticket(self, step: int) -> HeldTicket:
        """The right to save this rank's shard of ``step`` by other means than ``save``.

        All ranks take one for the same step. What came of the ticket before is asked of the agents;
        if nothing, its shard gives way. Raises ``WrongOrder`` as ``save`` does.
        """
        step = step_of(step)
        self._require_usable("ticket")
        self._slots.drop_removed()
        ticket = self._performer.run(self._session.ticket(step))
        return HeldTicket(ticket, self._connections)

    def stage(self, ticket: HeldTicket, plan: ShardPlan) -> None:
        """``ticket.stage`` in this process, where slots are mapped already."""
        ticket.stage(plan, self._slots)

    def find(self, *, step: int | None = None) -> FoundGeneration | None:
        """Begin a new timeline, and say what there is to continue from: the newest, or ``step``.

        What ``restore`` does, but for the reading: None if there never was a generation. All ranks
        call it. Raises ``NothingToRestore``, ``RankTimeout``.
        """
        step = None if step is None else step_of(step)
        self._require_usable("find")
        with collector_paused(), self._performer.calls_in_parallel():
            order = self._performer.run(self._session.find(Wanted(step)))
        if order.header is None:
            return None
        timeout_s = BRING_SHARE * self._config.restore_timeout_s
        patience_s = peer_patience_s(self._config.restore_timeout_s)
        return FoundGeneration(
            generation=order.header.shard.generation,
            saved_by=order.header.world_size,
            margin=order.margin,
            rejected=order.rejected,
            shards=order.shards,
            peers=self._effects.peers(patience_s=patience_s, timeout_s=timeout_s),
            timeout_s=timeout_s,
        )

    # -- restore ----------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        generation: Generation | str | None = None,
        resume: Literal["auto", "required"] = "auto",
        assign: bool = False,
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
        saved, what was the same on all of them is handed to every rank, generators of ``RngState``
        that were not are seeded anew (see ``Restored.reseeded``), and anything else that differed
        between ranks is a ``StateMismatch``. Nodes without ranks must be named in ``agents=`` to be
        read from.

        With ``assign`` tensors of 256 KiB or more are not copied where that is possible: they stay
        the same objects, and lie in this node's copy of the shard from then on, as private memory
        of this process. For inference, evaluation and frozen weights: each page that is written to
        for the first time costs a fault and a copy of its own, which is slower than having copied
        all. Modules, tensors in containers and what torch's optimizers keep are assigned. Copied,
        as ever, are tensors that are not contiguous in plain CPU memory, DTensors, tensors whose
        memory anything else in the process refers to (those of ``model.state_dict()`` are the
        model's: it is restored, but give the model itself), what other objects load, and all of it
        on another number of ranks than saved. ``Restored.assigned_bytes`` tells how much was
        assigned. That memory is the tmpfs's, beyond the run's budget, until the last of these
        tensors is gone.

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
        step = None if step is None else step_of(step)
        self._require_usable("restore")
        wanted, required = Wanted(step, generation), resume == "required"
        with collector_paused(), self._performer.calls_in_parallel():
            return self._performer.run(
                self._session.restore(state, wanted, required=required, assign=assign)
            )

    # -- end --------------------------------------------------------------------------------------

    def _require_usable(self, what: str) -> None:
        """Raise ``WrongOrder`` after ``close``, and in a process that was forked from this one."""
        if self._closed:
            raise WrongOrder(f"{what}() after close()", hint="make a new Checkpointer")
        if os.getpid() != self._pid:
            raise WrongOrder(
                f"{what}() in process {os.getpid()}, forked from {self._pid}, which made the "
                "Checkpointer",
                hint="its threads and mappings are there: save in that process",
            )

    def close(self) -> None:
        """Wait until the last save is committed or has failed, and let everything go.

        Rank 0 also waits for what is on its way to disk, at most ``save_timeout_s``. Where the
        ranks' store hangs, it returns after twice that, and the save has failed here.

        The agent and what it holds stay. Called at exit if the program did not. With ``strict`` the
        error of the last save is raised.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        saver, performer = self._session.saver, self._performer
        performer.change(saver.begin_close)
        # More than a last save, a re-protection and telling the agents of it may take.
        told_s = COMMIT_S * (len(self._cluster.share) + 1)
        settled = performer.close_lane(Lane.FOLLOW, 2 * self._config.save_timeout_s + told_s)
        if not settled:
            for handle in saver.unfinished():
                late = SaveTimedOut("the store of the ranks does not answer")
                handle.finish(late, time.monotonic())
        performer.run(self._session.close(settled=settled))
        performer.close()
        self._slots.close()
        latest = saver.latest
        if self._strict and latest is not None and latest.error is not None:
            raise latest.error

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
