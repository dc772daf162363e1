"""What the parts of a simulated host know of each other, as Protocols.

hosts/host.py implements ``HostView``, ``AgentHost`` and ``Peer``; hosts/pulling.py implements
``FragmentPuller``; truth/ledger.py implements ``Witness``. The agent, its disk hand and the truth
depend on these Protocols alone, so that none of them imports the host that contains it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ecckpt.sim.hosts.network import Answer
from ecckpt.sim.hosts.platter import Platter
from ecckpt.sim.hosts.tmpfs import SimulatedTmpfs
from ecckpt.sim.world import Steps, Wait, World

if TYPE_CHECKING:
    import numpy as np

    from ecckpt.agent.core.actions import Allocate, Discard, Event, Recycle
    from ecckpt.agent.core.run_records import RunRecords
    from ecckpt.agent.records.entry import Entry
    from ecckpt.agent.records.run_notes import RunNotes
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.format.ids import ShardId
    from ecckpt.protocol.messages.disk import Store
    from ecckpt.protocol.messages.restore import Fetch


class HostView(Protocol):
    """One host, as its observers see it."""

    @property
    def node(self) -> str:
        """The name of the node, which is its address too."""

    @property
    def memory(self) -> SimulatedTmpfs:
        """The host's tmpfs."""

    @property
    def platter(self) -> Platter | None:
        """The host's disk; None in a cluster without disks."""

    @property
    def budget_bytes(self) -> int:
        """How much of the host's memory a run may use."""

    @property
    def records(self) -> RunRecords | None:
        """What the host's agent knows of runs; None while no agent runs."""


class Peer(Protocol):
    """Another host, as an agent sees it: something that takes requests."""

    def call(self, source: str, handle: Callable[[Any, Answer], None], timeout_s: float) -> Wait:
        """Send a request from a node; ``handle`` answers it with the agent that receives it."""

    def ask(self, source: str, request: Any, timeout_s: float) -> Wait:
        """Send a request from a node that the receiving agent's core decides."""


class FragmentPuller(Protocol):
    """Pulls fragments and checksums from other agents to one node."""

    def read(
        self, address: str, shard: ShardId, index: int, *, last: bool = False, early: bool = False
    ) -> Wait:
        """Read the bytes of one fragment from one agent."""

    def table(self, message: Fetch) -> Steps:
        """Return the checksums of a shard, from the first source that has them."""

    def gather(self, message: Fetch, views: list[memoryview], table: np.ndarray) -> Steps:
        """Fill the fragments of a shard from any k of them, every block verified."""


class AgentHost(HostView, Protocol):
    """The host of an agent, as the agent sees it."""

    @property
    def world(self) -> World:
        """Simulated time."""

    @property
    def witness(self) -> Witness:
        """The truth of the run that is current now."""

    @property
    def peers(self) -> Mapping[str, Peer]:
        """All hosts of the cluster, by address."""

    @property
    def puller(self) -> FragmentPuller:
        """Pulls to this host."""


class Witness(Protocol):
    """Is told what agents do to files, and raises ``Violation`` where a promise is broken.

    What agents say of themselves is not used. Methods are called when a thing has happened, except
    those whose name ends in -ing, which are called just before.
    """

    def sealed(self, host: HostView, entry: Entry) -> None:
        """An agent has completed a file in memory."""

    def memory_adopted(self, host: HostView, records: RunRecords) -> None:
        """A new agent has taken over the files in its host's memory."""

    def host_failing(self, host: HostView, *, disk: bool) -> None:
        """A host is about to lose its memory, with ``disk`` also its disk."""

    def disk_adopted(self, host: HostView, records: RunRecords) -> None:
        """An agent has taken over the files on its disk."""

    def disk_unreadable(self, host: HostView) -> None:
        """An agent does not know what is on its disk: it could not read it, or not yet."""

    def disk_written(self, host: HostView, file: DiskFile, message: Store) -> None:
        """An agent reports a file as written to disk."""

    def disk_removing(self, host: HostView, files: tuple[DiskFile, ...]) -> None:
        """An agent is about to remove files from its disk."""

    def disk_removed(self, host: HostView, files: tuple[DiskFile, ...]) -> None:
        """An agent has tried to remove files from its disk."""

    def disk_notes_written(self, host: HostView, run: str, notes: RunNotes) -> None:
        """An agent has written to disk what it knows of a run."""

    def memory_freeing(self, host: HostView, action: Recycle | Discard) -> None:
        """An agent is about to free a region."""

    def event_handled(self, host: HostView, event: Event) -> None:
        """An agent's core has handled an event."""

    def notes_written(self, host: HostView, run: str, notes: RunNotes) -> None:
        """An agent has written to tmpfs what it knows of a run."""

    def allocated(self, host: HostView, action: Allocate) -> None:
        """An agent has allocated a region."""
