"""A host: its memory, and the agent that runs on it, if one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ecckpt import wire
from ecckpt.agent.actions import Allocate, Begun, Discard, Event, Recycle
from ecckpt.recovery import UNREADABLE_DISK
from ecckpt.sim.agent import Agent
from ecckpt.sim.memory import Memory
from ecckpt.sim.network import Answer, Network
from ecckpt.sim.platter import Platter
from ecckpt.sim.world import Wait, World

if TYPE_CHECKING:
    from ecckpt.agent.ledger import Entry, Notes
    from ecckpt.agent.ledgers import Ledgers
    from ecckpt.tiers.disk import DiskFile


class Witness(Protocol):
    """Sees what agents do to files, and raises ``Violation`` where a promise is broken."""

    def sealed(self, host: Host, entry: Entry) -> None:
        """A file is complete."""

    def adopted(self, host: Host, ledgers: Ledgers) -> None:
        """A new agent has taken over what lay in its host's memory."""

    def lost(self, host: Host, *, disk: bool) -> None:
        """A host is about to lose its memory, and perhaps its disk."""

    def looked(self, host: Host, ledgers: Ledgers) -> None:
        """An agent has entered what is on its disk."""

    def blinded(self, host: Host) -> None:
        """An agent could not read its disk."""

    def written(self, host: Host, file: DiskFile, message: wire.Store) -> None:
        """A file is said to be on disk."""

    def removing(self, host: Host, files: tuple[DiskFile, ...]) -> None:
        """Files on disk are about to go."""

    def removed(self, host: Host, files: tuple[DiskFile, ...]) -> None:
        """They are gone."""

    def recorded(self, host: Host, run: str, notes: Notes) -> None:
        """An agent has written down on disk what it knows of a run."""

    def going(self, host: Host, action: Recycle | Discard) -> None:
        """A region is about to be given up."""

    def decided(self, host: Host, event: Event) -> None:
        """An agent has handled an event."""

    def remembered(self, host: Host, run: str, notes: Notes) -> None:
        """An agent has written down what it knows of a run."""

    def allocated(self, host: Host, action: Allocate) -> None:
        """A region was given to a task."""


class Host:
    """One machine: its memory, and the agent that runs on it, if one does."""

    def __init__(self, node: str, domain: str, cluster: Cluster) -> None:
        self.node, self.domain = node, domain
        self.cluster = cluster
        self.memory = Memory(node)
        self.platter = self._new_platter()
        self.agent: Agent | None = None
        self.on = True

    def start(self) -> None:
        """Start the agent; it adopts what it finds."""
        if self.on and self.agent is None:
            self.agent = Agent(self)
            self.agent.tell(Begun())

    def kill_agent(self) -> None:
        """End the agent; the memory stays, and what it was writing to disk is cut off."""
        if self.agent is not None:
            self.agent.kill()
            if self.agent.hand is not None:
                self.agent.hand.cut()
            self.agent = None

    def lose(self, *, disk: bool) -> None:
        """End the host, and its memory with it; with its ``disk`` too, it comes back as another."""
        self.kill_agent()
        self.on = False
        self.cluster.witness.lost(self, disk=disk)
        self.memory = Memory(self.node)
        if disk:
            self.platter = self._new_platter()
        elif self.platter is not None:
            self.platter.lose_power()

    def _new_platter(self) -> Platter | None:
        return Platter(self.cluster.world.rng) if self.cluster.disks else None

    def tidy(self) -> None:
        """What a person does with files that no agent can read: remove them."""
        if self.agent is not None:
            rejected = self.agent.core.ledgers.rejected
            for name in [each for each in rejected if each != UNREADABLE_DISK]:
                del rejected[name]
                self.memory.files.pop(name, None)
                if self.platter is not None and name.startswith("disk/"):
                    self.platter.forget(name.removeprefix("disk/"))

    def see_to_disk(self) -> None:
        """What a person does about a disk that could not be read: start the agent again."""
        if self.agent is not None and UNREADABLE_DISK in self.agent.core.ledgers.rejected:
            self.kill_agent()
            self.start()

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
    def disks(self) -> bool:
        """Whether hosts have any."""

    @property
    def budget_bytes(self) -> int:
        """What a run may use of a host's memory."""
