"""A simulated agent: the real core, whose actions are performed in simulated time.

The counterpart of agent/runtime/driver.py, region_store.py and network.py. What they do with
threads, files and sockets is done here with events, bytes and ``SimulatedNetwork``.

    request or timer -> tell() -> core.handle() -> actions
        Small actions at once -> witness.event_handled() -> replies and Large actions
        Large actions take simulated time and end in tell(Finished or Failed)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecckpt.agent import deadlines
from ecckpt.agent.core.actions import (
    Allocate,
    Announce,
    AskPeer,
    Borrow,
    Discard,
    Due,
    Encode,
    Event,
    Failed,
    Finished,
    Gather,
    Gathered,
    Large,
    MarkAssigned,
    Post,
    Pull,
    Record,
    Recycle,
    Refuse,
    Remember,
    Remove,
    Reply,
    Seal,
    Small,
    Wake,
    Write,
)
from ecckpt.agent.core.core import Core
from ecckpt.agent.core.tasks import Fetching
from ecckpt.agent.runtime.shard_bytes import (
    data_views,
    encode_home,
    fragment_view,
    parity_views,
    seal,
    sums_of,
)
from ecckpt.agent.storage.disk import DiskFile
from ecckpt.errors import EcckptError, NotHeld, RequestRefused
from ecckpt.format.block_ranges import span_of, spans
from ecckpt.protocol.messages.save import Watch
from ecckpt.sim.hosts.disk_hand import DiskHand
from ecckpt.sim.hosts.interfaces import AgentHost
from ecckpt.sim.hosts.network import Answer, answering
from ecckpt.sim.hosts.witnessed_regions import WitnessedRegionStore
from ecckpt.sim.world import Actor, Steps

if TYPE_CHECKING:
    from ecckpt.agent.storage.region import Region

# How long the real agent's threads would take, about.
_ENCODE_S = 0.002
_ALLOCATE_S = 0.001
_REMEMBER_S = 0.0002


class SimulatedAgent(Actor):
    """One agent process, from its start to its kill; a restart makes a new one."""

    def __init__(self, host: AgentHost) -> None:
        super().__init__(host.world)
        self.host = host
        self.node = host.node
        self._puller = host.puller
        self.region_store = WitnessedRegionStore(host)
        self.core = Core(
            node=host.node,
            address=host.node,
            budget_bytes=host.budget_bytes,
            disk=host.platter is not None,
            early_bytes=0,
        )
        self.region_store.adopt(self.core.records)
        host.witness.memory_adopted(host, self.core.records)
        self.disk_hand: DiskHand | None = None
        if host.platter is not None:
            self.disk_hand = DiskHand(
                self, host, host.platter, records=self.core.records, tell=self.tell
            )
            self.disk_hand.adopt()
        self._watches: list[tuple[Watch, Answer]] = []  # that wait for another state

    # -- driving the core -------------------------------------------------------------------------

    def tell(self, event: Event, asker: Answer | None = None) -> None:
        """Hand an event to the core and perform the actions that it returns.

        ``asker`` gets the reply; None for events that are no requests.
        """
        try:
            actions = self.core.handle(event, self.world.now_s)
        except EcckptError as error:
            if asker is None:
                raise
            asker(error)
            return
        for action in actions:
            if isinstance(action, Small):
                self._perform_small(action)
        # The witness looks at files, so small actions, which change them, come first.
        self.host.witness.event_handled(self.host, event)
        for action in actions:
            if isinstance(action, Reply | Refuse):
                assert asker is not None
                asker(action.message if isinstance(action, Reply) else self._refusal(action.error))
                asker = None
            elif not isinstance(action, Small):
                self._begin_large(action, asker)
        if self._watches:
            self._answer_watches()

    def _refusal(self, error: Exception) -> Exception:
        """As it arrives over HTTP."""
        if isinstance(error, EcckptError):
            return error
        return RequestRefused(self.node, 500, str(error))

    def _perform_small(self, action: Small) -> None:
        match action:
            case Seal(entry):
                seal(entry)
                self.host.witness.sealed(self.host, entry)
            case Recycle() | Discard():
                self.region_store.let_go(action)
            case MarkAssigned(region):
                self.region_store.tier.assign(region)
            case Borrow():
                self.region_store.borrow(action)
            case Wake(at_s, task):
                self._later(max(0.0, at_s - self.world.now_s), Due(task), None)

    def _later(self, delay_s: float, event: Event, asker: Answer | None) -> None:
        """Tell the core an event after a delay, unless the agent is dead by then."""
        self.world.after(delay_s, self.reach, self.tell, event, asker)

    def _begin_large(self, action: Large, asker: Answer | None) -> None:
        match action:
            case Allocate():
                self.world.after(_ALLOCATE_S, self.reach, self._allocate, action, asker)
            case Remember():
                self.world.after(_REMEMBER_S, self.reach, self._remember, action, asker)
            case Encode():
                self.world.after(_ENCODE_S, self.reach, self._encode, action, asker)
            case Pull():
                self.spawn(self._pull(action))
            case Gather():
                self.spawn(self._gather(action, asker))
            case Post() | Announce():
                self.spawn(self._post(action))
            case AskPeer():
                self.spawn(self._ask(action))
            case Write() | Remove() | Record():
                assert self.disk_hand is not None
                if isinstance(action, Remove):
                    self.host.witness.disk_removing(self.host, action.files)
                self.disk_hand.enqueue(action)

    def _allocate(self, action: Allocate, asker: Answer | None) -> None:
        try:
            region = self.region_store.allocate(action)
        except EcckptError as error:
            self.tell(Failed(action, error), asker)
            return
        self.tell(Finished(action, region), asker)

    def _remember(self, action: Remember, asker: Answer | None) -> None:
        try:
            notes = self.region_store.remember(
                action.run, self.core.records.get_or_create(action.run).notes
            )
        except OSError as error:
            self.tell(Failed(action, error), asker)
            return
        self.host.witness.notes_written(self.host, action.run, notes)
        self.tell(Finished(action, notes), asker)

    def _encode(self, action: Encode, asker: Answer | None) -> None:
        home = action.job.home
        assert home is not None
        try:
            table = encode_home(home.header, home.region, action.job.parity)
        except EcckptError as error:
            self.tell(Failed(action, error), asker)
            return
        self.tell(Finished(action, table), asker)

    # -- over the network -------------------------------------------------------------------------

    def _post(self, action: Post | Announce) -> Steps:
        try:
            target = self.host.peers[action.address]
            yield target.ask(self.node, action.message, deadlines.POST_TIMEOUT_S)
        except EcckptError as error:
            self.tell(Failed(action, error))
        else:
            self.tell(Finished(action))

    def _ask(self, action: AskPeer) -> Steps:
        target = self.host.peers[action.sight.address]
        handle = answering(lambda agent: agent.core.presence(action.message))
        try:
            presence = yield target.call(self.node, handle, deadlines.PROBE_TIMEOUT_S)
        except EcckptError as error:
            self.tell(Failed(action, error))
        else:
            self.tell(Finished(action, presence))

    def _pull(self, action: Pull) -> Steps:
        taking = action.taking
        message, region = taking.message, taking.region
        header, lacking = message.header, taking.lacking()
        shard, index = header.shard, header.index
        if region is None:
            # Simulated time passes before a pull fails, as for any other pull, or a core that
            # retries at once would recurse.
            no_memory = NotHeld(f"no memory for fragment {index} of {shard} yet")
            self._later(_ALLOCATE_S, Failed(action, no_memory), None)
            return
        try:
            data = yield self._puller.read(message.source, shard, index, early=taking.early)
        except EcckptError as error:
            self.tell(Failed(action, error))
            return
        view = fragment_view(header, region)
        for rows in spans(lacking):
            span = span_of(header, rows)
            view[span] = data[span]
        self.tell(Finished(action, sums_of(header, view)))

    def _gather(self, action: Gather, asker: Answer | None) -> Steps:
        try:
            gathered = yield from self._gathered(action.fetching)
        except EcckptError as error:
            self.tell(Failed(action, error), asker)
        else:
            self.tell(Finished(action, gathered), asker)

    def _gathered(self, fetching: Fetching) -> Steps:
        message, region = fetching.message, fetching.region
        assert region is not None
        header = message.header
        table = yield from self._puller.table(message)
        views = data_views(header, region) + parity_views(header, fetching.parity)
        plan = yield from self._puller.gather(message, views, table)
        return Gathered(table, plan.pulled_bytes, len(plan.computed), tuple(plan.problems))

    def read(self, source: Region | DiskFile, offset: int, size_bytes: int) -> bytearray:
        """Some bytes of a file in memory or on disk, for a peer's pull."""
        if isinstance(source, DiskFile):
            assert self.disk_hand is not None
            return self.disk_hand.read(source, offset, size_bytes)
        return bytearray(source.view[offset : offset + size_bytes])

    # -- requests that read without the core ------------------------------------------------------

    def watch(self, message: Watch, answer: Answer) -> None:
        """Answer with the progress of a shard once its state differs from the known one.

        Answers after ``wait_s`` in any case.
        """
        progress = self.core.progress(message.shard)
        if progress.state != message.known_state:
            answer(progress)
            return
        watch = (message, answer)
        self._watches.append(watch)
        self.world.after(message.wait_s, self.reach, self._end_watch, watch)

    def _answer_watches(self) -> None:
        for watch in list(self._watches):
            message, answer = watch
            progress = self.core.progress(message.shard)
            if progress.state != message.known_state:
                self._watches.remove(watch)
                answer(progress)

    def _end_watch(self, watch: tuple[Watch, Answer]) -> None:
        if watch in self._watches:
            self._watches.remove(watch)
            message, answer = watch
            answer(self.core.progress(message.shard))
