"""A simulated host: its memory, its disk, and the agent that runs on it at times.

The injector fails hosts and kills agents, the launcher starts ranks on hosts, and everything that
sends a request to an agent does so with ``call`` or ``ask`` of the agent's host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ecckpt.agent.core.actions import Begun
from ecckpt.policy.survival import UNREADABLE_DISK
from ecckpt.sim.hosts.agent import SimulatedAgent
from ecckpt.sim.hosts.interfaces import FragmentPuller, Witness
from ecckpt.sim.hosts.network import Answer, SimulatedNetwork
from ecckpt.sim.hosts.platter import Platter
from ecckpt.sim.hosts.tmpfs import SimulatedTmpfs
from ecckpt.sim.world import Wait, World

if TYPE_CHECKING:
    from ecckpt.agent.core.run_records import RunRecords


class SimulatedHost:
    """One machine.

    Its memory outlives its agent, as tmpfs does. Its disk outlives the memory, unless the host
    comes back as another machine.
    """

    def __init__(self, node: str, domain: str, cluster: SimulatedCluster) -> None:
        self.node, self.domain = node, domain
        self.cluster = cluster
        self.memory = SimulatedTmpfs(cluster.world.rng)
        self.platter = self._new_platter()
        self.agent: SimulatedAgent | None = None
        self.on = True  # False from the loss of the host until it is back

    @property
    def world(self) -> World:
        """Simulated time."""
        return self.cluster.world

    @property
    def witness(self) -> Witness:
        """The truth of the run that is current now."""
        return self.cluster.witness

    @property
    def peers(self) -> dict[str, SimulatedHost]:
        """All hosts of the cluster, by address."""
        return self.cluster.hosts

    @property
    def puller(self) -> FragmentPuller:
        """Pulls fragments to this host."""
        return self.cluster.puller(self.node)

    @property
    def budget_bytes(self) -> int:
        """How much of the host's memory a run may use."""
        return self.cluster.budget_bytes

    @property
    def records(self) -> RunRecords | None:
        """What the host's agent knows of runs; None while no agent runs."""
        return self.agent.core.records if self.agent is not None else None

    def start(self) -> None:
        """Start the agent if the host is up; the agent adopts what is in memory and on disk."""
        if self.on and self.agent is None:
            self.agent = SimulatedAgent(self)
            self.agent.tell(Begun())

    def kill_agent(self) -> None:
        """Kill the agent. The memory stays; a write to disk is cut off at some step."""
        if self.agent is not None:
            self.agent.kill()
            if self.agent.disk_hand is not None:
                self.agent.disk_hand.cut_off()
            self.agent = None

    def fail(self, *, disk: bool) -> None:
        """Fail the host: it loses its agent and its memory.

        With ``disk`` it loses its disk too, and comes back as another machine. Otherwise the disk
        loses power.
        """
        self.kill_agent()
        self.on = False
        self.witness.host_failing(self, disk=disk)
        self.memory = SimulatedTmpfs(self.world.rng)
        if disk:
            self.platter = self._new_platter()
        elif self.platter is not None:
            self.platter.lose_power()

    def remove_rejected_files(self) -> None:
        """Remove the files that the agent could not read, as an operator would."""
        if self.agent is not None:
            rejected = self.agent.core.records.rejected
            for name in [name for name in rejected if name != UNREADABLE_DISK]:
                del rejected[name]
                self.memory.delete(name)
                if self.platter is not None and name.startswith("disk/"):
                    self.platter.delete(name.removeprefix("disk/"))

    def restart_for_disk(self) -> None:
        """Restart the agent if it could not read its disk, as an operator would."""
        if self.agent is not None and UNREADABLE_DISK in self.agent.core.records.rejected:
            self.kill_agent()
            self.start()

    def call(
        self, source: str, handle: Callable[[SimulatedAgent, Answer], None], timeout_s: float
    ) -> Wait:
        """Send a request from the node ``source`` to this host's agent.

        ``handle`` is called with the agent that runs when the request arrives, and answers it.
        """

        def handled(answer: Answer) -> None:
            assert self.agent is not None
            handle(self.agent, answer)

        network = self.cluster.network
        return network.call(source, self.node, lambda: self.agent, handled, timeout_s=timeout_s)

    def ask(self, source: str, request: Any, timeout_s: float) -> Wait:
        """Send a request that the agent's core decides."""
        return self.call(source, lambda agent, answer: agent.tell(request, answer), timeout_s)

    def _new_platter(self) -> Platter | None:
        return Platter(self.world.rng) if self.cluster.disks else None


class SimulatedCluster(Protocol):
    """The cluster, as its hosts, the launcher and the injector see it."""

    @property
    def world(self) -> World:
        """Simulated time."""

    @property
    def network(self) -> SimulatedNetwork:
        """The links between the hosts."""

    @property
    def witness(self) -> Witness:
        """The truth of the run that is current now."""

    @property
    def hosts(self) -> dict[str, SimulatedHost]:
        """All hosts, by node."""

    @property
    def disks(self) -> bool:
        """Whether hosts have disks."""

    @property
    def budget_bytes(self) -> int:
        """How much of a host's memory a run may use."""

    def puller(self, node: str) -> FragmentPuller:
        """Something that pulls fragments to that node."""
