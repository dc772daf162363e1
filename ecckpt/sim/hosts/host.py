"""A host: its memory, and the agent that runs on it, if one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ecckpt.agent.core.actions import Allocate, Begun, Discard, Event, Recycle
from ecckpt.policy.survival import UNREADABLE_DISK
from ecckpt.protocol.messages.disk import Store
from ecckpt.sim.hosts.agent import SimulatedAgent
from ecckpt.sim.hosts.memory import SimulatedTmpfs
from ecckpt.sim.hosts.network import Answer, SimulatedNetwork
from ecckpt.sim.hosts.platter import Platter
from ecckpt.sim.world import Wait, World

if TYPE_CHECKING:
    from ecckpt.agent.core.run_record import Entry, RunNotes
    from ecckpt.agent.core.run_records import RunRecords
    from ecckpt.agent.storage.disk import DiskFile


class Witness(Protocol):
    """Sees what agents do to files, and raises ``Violation`` where a promise is broken."""

    def sealed(self, host: SimulatedHost, entry: Entry) -> None:
        """A file is complete."""

    def adopted(self, host: SimulatedHost, ledgers: RunRecords) -> None:
        """A new agent has taken over what lay in its host's memory."""

    def lost(self, host: SimulatedHost, *, disk: bool) -> None:
        """A host is about to lose its memory, and perhaps its disk."""

    def looked(self, host: SimulatedHost, ledgers: RunRecords) -> None:
        """An agent has entered what is on its disk."""

    def blinded(self, host: SimulatedHost) -> None:
        """An agent could not read its disk."""

    def written(self, host: SimulatedHost, file: DiskFile, message: Store) -> None:
        """A file is said to be on disk."""

    def removing(self, host: SimulatedHost, files: tuple[DiskFile, ...]) -> None:
        """Files on disk are about to go."""

    def removed(self, host: SimulatedHost, files: tuple[DiskFile, ...]) -> None:
        """They are gone."""

    def recorded(self, host: SimulatedHost, run: str, notes: RunNotes) -> None:
        """An agent has written down on disk what it knows of a run."""

    def going(self, host: SimulatedHost, action: Recycle | Discard) -> None:
        """A region is about to be given up."""

    def decided(self, host: SimulatedHost, event: Event) -> None:
        """An agent has handled an event."""

    def remembered(self, host: SimulatedHost, run: str, notes: RunNotes) -> None:
        """An agent has written down what it knows of a run."""

    def allocated(self, host: SimulatedHost, action: Allocate) -> None:
        """A region was given to a task."""


class SimulatedHost:
    """One machine: its memory, and the agent that runs on it, if one does."""

    def __init__(self, node: str, domain: str, cluster: SimulatedCluster) -> None:
        self.node, self.domain = node, domain
        self.cluster = cluster
        self.memory = SimulatedTmpfs(cluster.world.rng)
        self.platter = self._new_platter()
        self.agent: SimulatedAgent | None = None
        self.on = True

    def start(self) -> None:
        """Start the agent; it adopts what it finds."""
        if self.on and self.agent is None:
            self.agent = SimulatedAgent(self)
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
        self.memory = SimulatedTmpfs(self.cluster.world.rng)
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
                self.memory.forget(name)
                if self.platter is not None and name.startswith("disk/"):
                    self.platter.forget(name.removeprefix("disk/"))

    def see_to_disk(self) -> None:
        """What a person does about a disk that could not be read: start the agent again."""
        if self.agent is not None and UNREADABLE_DISK in self.agent.core.ledgers.rejected:
            self.kill_agent()
            self.start()

    def call(
        self, source: str, handle: Callable[[SimulatedAgent, Answer], None], timeout_s: float
    ) -> Wait:
        """A request to this host's agent from a node."""

        def handled(answer: Answer) -> None:
            assert self.agent is not None
            handle(self.agent, answer)

        network = self.cluster.network
        return network.call(source, self.node, lambda: self.agent, handled, timeout_s=timeout_s)

    def ask(self, source: str, request: Any, timeout_s: float) -> Wait:
        """A request that the core decides."""
        return self.call(source, lambda agent, answer: agent.tell(request, answer), timeout_s)


class SimulatedCluster(Protocol):
    """What a host knows of the others."""

    @property
    def world(self) -> World:
        """The clock."""

    @property
    def network(self) -> SimulatedNetwork:
        """The links."""

    @property
    def witness(self) -> Witness:
        """Who watches."""

    @property
    def hosts(self) -> dict[str, SimulatedHost]:
        """All of them, by node."""

    @property
    def disks(self) -> bool:
        """Whether hosts have any."""

    @property
    def budget_bytes(self) -> int:
        """What a run may use of a host's memory."""
