"""A host's agent: the real core, with hands that are made up.

The counterpart of ``agent/driver.py`` and ``shelf.py``: what they do with threads, files and
sockets is done here with events, bytes and ``Network``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from ecckpt.sim.hosts.disk_hand import Hand
from ecckpt.sim.hosts.memory import WitnessedRegionStore
from ecckpt.sim.hosts.network import Answer, answering
from ecckpt.sim.hosts.pulling import Puller
from ecckpt.sim.world import Actor, Steps

if TYPE_CHECKING:
    from ecckpt.agent.storage.regions import Region
    from ecckpt.sim.hosts.host import SimulatedHost

_POST_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 2.0
_ENCODE_S = 0.002
_ALLOCATE_S = 0.001
_REMEMBER_S = 0.0002


class SimulatedAgent(Actor):
    """A host's agent for as long as it lives."""

    def __init__(self, host: SimulatedHost) -> None:
        super().__init__(host.cluster.world)
        self.host = host
        self.node = host.node
        self._puller = Puller(host.node, self.world, host.cluster.network, host.cluster.hosts)
        self.region_store = WitnessedRegionStore(host)
        self.core = Core(
            node=host.node,
            address=host.node,
            budget_bytes=host.cluster.budget_bytes,
            disk=host.platter is not None,
            early_bytes=0,
        )
        self.region_store.adopt(self.core.ledgers)
        self.host.cluster.witness.adopted(host, self.core.ledgers)
        self.hand = Hand(self, host.platter) if host.platter is not None else None
        if self.hand is not None:
            self.hand.adopt()
        self._watching: list[tuple[Watch, Answer]] = []

    # -- driving the core -------------------------------------------------------------------------

    def tell(self, event: Event, asker: Answer | None = None) -> None:
        """Hand in an event and perform what follows."""
        try:
            actions = self.core.handle(event, self.world.now_s)
        except EcckptError as error:
            if asker is None:
                raise
            asker(error)
            return
        for action in actions:
            if isinstance(action, Small):
                self._settle(action)
        self.host.cluster.witness.decided(self.host, event)
        for action in actions:
            if isinstance(action, Reply | Refuse):
                assert asker is not None
                asker(action.message if isinstance(action, Reply) else self._refusal(action.error))
                asker = None
            elif not isinstance(action, Small):
                self._perform(action, asker)
        if self._watching:
            self._news()

    def _refusal(self, error: Exception) -> Exception:
        """As it arrives over HTTP."""
        if isinstance(error, EcckptError):
            return error
        return RequestRefused(self.node, 500, str(error))

    def _settle(self, action: Small) -> None:
        match action:
            case Seal(entry):
                seal(entry)
                self.host.cluster.witness.sealed(self.host, entry)
            case Recycle() | Discard():
                self.region_store.let_go(action)
            case MarkAssigned(region):
                self.region_store.tier.assign(region)
            case Borrow():
                self.region_store.borrow(action)
            case Wake(at_s, task):
                self._later(max(0.0, at_s - self.world.now_s), Due(task), None)

    def _later(self, delay_s: float, event: Event, asker: Answer | None) -> None:
        self.world.after(delay_s, self.reach, self.tell, event, asker)

    def _perform(self, action: Large, asker: Answer | None) -> None:
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
                assert self.hand is not None
                if isinstance(action, Remove):
                    self.host.cluster.witness.removing(self.host, action.files)
                self.hand.take(action)

    def _allocate(self, action: Allocate, asker: Answer | None) -> None:
        try:
            region = self.region_store.allocate(action)
        except EcckptError as error:
            self.tell(Failed(action, error), asker)
            return
        self.tell(Finished(action, region), asker)

    def _remember(self, action: Remember, asker: Answer | None) -> None:
        try:
            notes = self.region_store.remember(action.run, self.core.ledgers.of(action.run).notes)
        except OSError as error:
            self.tell(Failed(action, error), asker)
            return
        self.host.cluster.witness.remembered(self.host, action.run, notes)
        self.tell(Finished(action, notes), asker)

    def _encode(self, action: Encode, asker: Answer | None) -> None:
        home = action.job.home
        assert home is not None
        table = encode_home(home.header, home.region, action.job.parity)
        self.tell(Finished(action, table), asker)

    # -- over the network -------------------------------------------------------------------------

    def _post(self, action: Post | Announce) -> Steps:
        try:
            target = self.host.cluster.hosts[action.address]
            yield target.ask(self.node, action.message, _POST_TIMEOUT_S)
        except EcckptError as error:
            self.tell(Failed(action, error))
        else:
            self.tell(Finished(action))

    def _ask(self, action: AskPeer) -> Steps:
        target = self.host.cluster.hosts[action.sight.address]
        look = answering(lambda agent: agent.core.presence(action.message))
        try:
            presence = yield target.call(self.node, look, _ASK_TIMEOUT_S)
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
            none = NotHeld(f"no memory for fragment {index} of {shard} yet")
            self._later(_ALLOCATE_S, Failed(action, none), None)
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
        """Some bytes of what it has, for whoever asks."""
        if isinstance(source, DiskFile):
            assert self.hand is not None
            return self.hand.read(source, offset, size_bytes)
        return bytearray(source.view[offset : offset + size_bytes])

    # -- requests that only look ------------------------------------------------------------------

    def watch(self, message: Watch, answer: Answer) -> None:
        """How far a shard is; waits for news up to ``wait_s``."""
        now = self.core.progress(message.shard)
        if now.state != message.known_state:
            answer(now)
            return
        waiting = (message, answer)
        self._watching.append(waiting)
        self.world.after(message.wait_s, self.reach, self._waited, waiting)

    def _news(self) -> None:
        for waiting in list(self._watching):
            message, answer = waiting
            now = self.core.progress(message.shard)
            if now.state != message.known_state:
                self._watching.remove(waiting)
                answer(now)

    def _waited(self, waiting: tuple[Watch, Answer]) -> None:
        if waiting in self._watching:
            self._watching.remove(waiting)
            waiting[1](self.core.progress(waiting[0].shard))
