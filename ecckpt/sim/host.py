"""A host and its agent: the real core, with hands that are made up.

The counterpart of ``agent/driver.py``, ``shelf.py`` and ``network.py``: what they do with threads,
files and sockets is done here with events, bytes and ``Network``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ecckpt import wire
from ecckpt.agent.actions import (
    Allocate,
    Ask,
    Begun,
    Discard,
    Due,
    Encode,
    Event,
    Failed,
    Fetching,
    Finished,
    Gather,
    Gathered,
    Large,
    Post,
    Pull,
    Recycle,
    Refuse,
    Remember,
    Reply,
    Seal,
    Small,
    Wake,
)
from ecckpt.agent.coding import (
    bad_blocks,
    data_views,
    encode_home,
    fragment_view,
    parity_views,
    rebuild,
    seal,
)
from ecckpt.agent.core import Core
from ecckpt.agent.gathering import Gathering
from ecckpt.blocks import span_of
from ecckpt.errors import EcckptError, TooFewFragments
from ecckpt.fragment import parse_table
from ecckpt.generation import ShardId
from ecckpt.sim.memory import Memory
from ecckpt.sim.network import Answer, Network
from ecckpt.sim.world import Actor, Process, Steps, Wait, World, together
from ecckpt.tiers.disk import DiskFile

if TYPE_CHECKING:
    from ecckpt.agent.ledger import Entry
    from ecckpt.agent.ledgers import Ledgers

_POST_TIMEOUT_S = 5.0
_PULL_TIMEOUT_S = 10.0
_ASK_TIMEOUT_S = 2.0
_ENCODE_S = 0.002
_ALLOCATE_S = 0.001
_REMEMBER_S = 0.0002


class Witness(Protocol):
    """Sees what agents do to files, and raises ``Violation`` where a promise is broken."""

    def sealed(self, host: Host, entry: Entry) -> None:
        """A file is complete."""

    def adopted(self, host: Host, ledgers: Ledgers) -> None:
        """A new agent has taken over what lay in its host's memory."""

    def lost(self, host: Host) -> None:
        """A host is about to lose its memory."""

    def going(self, host: Host, action: Recycle | Discard) -> None:
        """A region is about to be given up."""

    def decided(self, host: Host, event: Event) -> None:
        """An agent has handled an event."""

    def allocated(self, host: Host, action: Allocate) -> None:
        """A region was given to a task."""


class Host:
    """One machine: its memory, and the agent that runs on it, if one does."""

    def __init__(self, node: str, domain: str, cluster: Cluster) -> None:
        self.node, self.domain = node, domain
        self.cluster = cluster
        self.memory = Memory(node)
        self.agent: Agent | None = None
        self.on = True

    def start(self) -> None:
        """Start the agent; it adopts what it finds."""
        if self.on and self.agent is None:
            self.agent = Agent(self)
            self.agent.tell(Begun())

    def kill_agent(self) -> None:
        """End the agent; the memory stays."""
        if self.agent is not None:
            self.agent.kill()
            self.agent = None

    def lose(self) -> None:
        """End the host, and its memory with it."""
        self.kill_agent()
        self.on = False
        self.cluster.witness.lost(self)
        self.memory = Memory(self.node)

    def tidy(self) -> None:
        """What a person does with files that no agent can read: remove them."""
        if self.agent is not None:
            rejected = self.agent.core.ledgers.rejected
            for name in rejected:
                self.memory.files.pop(name, None)
            rejected.clear()

    def call(self, source: str, handle: Callable[[Agent, Answer], None], timeout_s: float) -> Wait:
        """A request to this host's agent from a node."""

        def handled(answer: Answer) -> None:
            assert self.agent is not None
            handle(self.agent, answer)

        network = self.cluster.network
        return network.call(source, self.node, lambda: self.agent, handled, timeout_s=timeout_s)

    def ask(self, source: str, request: Any, timeout_s: float) -> Wait:
        """A request that the core decides."""
        return self.call(source, lambda agent, answer: agent.tell(request, answer), timeout_s)


class Cluster(Protocol):
    """What a host knows of the others."""

    @property
    def world(self) -> World:
        """The clock."""

    @property
    def network(self) -> Network:
        """The links."""

    @property
    def witness(self) -> Witness:
        """Who watches."""

    @property
    def hosts(self) -> dict[str, Host]:
        """All of them, by node."""

    @property
    def budget_bytes(self) -> int:
        """What a run may use of a host's memory."""


class Agent(Actor):
    """A host's agent for as long as it lives."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.cluster.world)
        self.host = host
        self.node = host.node
        self.network = host.cluster.network
        self.memory = host.memory
        self.core = Core(node=host.node, address=host.node, budget_bytes=host.cluster.budget_bytes)
        for action in self.memory.adopt(self.core.ledgers):
            assert isinstance(action, Recycle)
            self._settle(action)
        self.host.cluster.witness.adopted(host, self.core.ledgers)
        self._watching: list[tuple[wire.Watch, Answer]] = []

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
                asker(action.message if isinstance(action, Reply) else action.error)
                asker = None
            elif not isinstance(action, Small):
                self._perform(action, asker)
        if self._watching:
            self._news()

    def _settle(self, action: Small) -> None:
        match action:
            case Seal(entry):
                seal(entry)
                self.host.cluster.witness.sealed(self.host, entry)
            case Recycle() | Discard():
                self.host.cluster.witness.going(self.host, action)
                self.memory.let_go(action)
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
            case Post():
                self.spawn(self._post(action))
            case Ask():
                self.spawn(self._ask(action))
            case _:
                raise AssertionError(f"{type(action).__name__}: there are no disks here")

    def _allocate(self, action: Allocate, asker: Answer | None) -> None:
        try:
            region = self.memory.allocate(action, self.host.cluster.budget_bytes)
        except EcckptError as error:
            self.tell(Failed(action, error), asker)
            return
        self.host.cluster.witness.allocated(self.host, action)
        self.tell(Finished(action, region), asker)

    def _remember(self, action: Remember, asker: Answer | None) -> None:
        notes = self.core.ledgers.of(action.run).notes
        self.memory.notes[action.run] = notes
        self.tell(Finished(action, notes), asker)

    def _encode(self, action: Encode, asker: Answer | None) -> None:
        home = action.job.home
        assert home is not None
        table = encode_home(home.header, home.region, action.job.parity)
        self.tell(Finished(action, table), asker)

    # -- over the network -------------------------------------------------------------------------

    def _post(self, action: Post) -> Steps:
        try:
            target = self.host.cluster.hosts[action.address]
            yield target.ask(self.node, action.message, _POST_TIMEOUT_S)
        except EcckptError as error:
            self.tell(Failed(action, error))
        else:
            self.tell(Finished(action))

    def _ask(self, action: Ask) -> Steps:
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
        assert region is not None
        header = message.header
        try:
            data = yield self._read(message.source, header.shard, header.index)
        except EcckptError as error:
            self.tell(Failed(action, error))
            return
        view = fragment_view(header, region)
        view[:] = data
        self.tell(Finished(action, len(bad_blocks(header, header.index, view, taking.table))))

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
        table = yield from self._table(message)
        views = data_views(header, region) + parity_views(header, fetching.parity)
        gathering = Gathering.of(message)
        wanted = gathering.first()
        while True:
            yield together([self._next(gathering, each, views[each], table) for each in wanted])
            if not (wanted := gathering.next()):
                break
        rebuilt = rebuild(gathering, views, table)
        return Gathered(table, gathering.pulled_bytes, rebuilt, tuple(gathering.problems))

    def _table(self, message: wire.Fetch) -> Steps:
        problems = []
        addresses = dict.fromkeys(a for each in message.sources for a in each.addresses)
        shard = message.header.shard
        for address in addresses:
            host = self.host.cluster.hosts[address]
            handle = answering(lambda agent: agent.core.ledgers.table(shard))
            try:
                packed = yield host.call(self.node, handle, _PULL_TIMEOUT_S)
                return parse_table(packed, message.header, address)
            except EcckptError as error:
                problems.append(str(error))
        raise TooFewFragments(f"checksums of {shard}", have=0, need=1, reasons=problems[:8])

    def _next(self, gathering: Gathering, index: int, view: memoryview, table: np.ndarray) -> Wait:
        """Try one more source of a fragment."""

        def steps() -> Steps:
            header = gathering.header
            address, runs = gathering.take(index)
            try:
                data = yield self._read(address, header.shard, index)
                for rows in runs:
                    span = span_of(header, rows)
                    view[span] = data[span]
                    gathering.pulled_bytes += span.stop - span.start
                    bad = bad_blocks(header, index, view[span], table, rows)
                    gathering.prove(index, rows, bad)
            except EcckptError as error:
                gathering.problems.append(f"fragment {index}: {error}")
            gathering.judge(index, address)

        def begin(process: Process) -> None:
            process.actor.spawn(steps(), ended=process.resume)

        return begin

    def _read(self, address: str, shard: ShardId, index: int) -> Wait:
        """The bytes of a fragment, from another agent; now and then a bit flips on the way."""

        def serve(agent: Agent) -> bytearray:
            region, offset, size_bytes = agent.core.ledgers.locate(shard, index)
            assert not isinstance(region, DiskFile), "there are no disks here"
            data = bytearray(region.view[offset : offset + size_bytes])
            if self.world.chance(self.network.faults.flip):
                self.network.injected += 1
                data[self.world.rng.randrange(size_bytes)] ^= 1 << self.world.rng.randrange(8)
            return data

        host = self.host.cluster.hosts[address]
        return host.call(self.node, answering(serve), _PULL_TIMEOUT_S)

    # -- requests that only look ------------------------------------------------------------------

    def watch(self, message: wire.Watch, answer: Answer) -> None:
        """How far a shard is; waits for news up to ``wait_s``."""
        now = self.core.progress(message.shard)
        if (now.state, now.committed) != (message.known_state, message.known_committed):
            answer(now)
            return
        waiting = (message, answer)
        self._watching.append(waiting)
        self.world.after(message.wait_s, self.reach, self._waited, waiting)

    def _news(self) -> None:
        for waiting in list(self._watching):
            message, answer = waiting
            now = self.core.progress(message.shard)
            if (now.state, now.committed) != (message.known_state, message.known_committed):
                self._watching.remove(waiting)
                answer(now)

    def _waited(self, waiting: tuple[wire.Watch, Answer]) -> None:
        if waiting in self._watching:
            self._watching.remove(waiting)
            waiting[1](self.core.progress(waiting[0].shard))


def answering(look: Callable[[Agent], Any]) -> Callable[[Agent, Answer], None]:
    """A handler that answers at once with what it sees, or with the error that it meets."""

    def handle(agent: Agent, answer: Answer) -> None:
        try:
            answer(look(agent))
        except EcckptError as error:
            answer(error)

    return handle
