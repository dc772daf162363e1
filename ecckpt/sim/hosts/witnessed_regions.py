"""The region store of a simulated agent, whose steps the truth sees."""

from __future__ import annotations

from pathlib import Path

from ecckpt.agent.core.actions import Allocate, Discard, Recycle
from ecckpt.agent.runtime.region_store import RegionStore
from ecckpt.agent.storage.region import Region
from ecckpt.sim.hosts.interfaces import AgentHost


class WitnessedRegionStore(RegionStore):
    """A witness sees what it allocates and gives up."""

    def __init__(self, host: AgentHost) -> None:
        super().__init__(Path(host.node), node=host.node, files=host.memory)
        self._host = host

    def allocate(self, action: Allocate) -> Region:
        """As the region store does, for a run."""
        region = super().allocate(action)
        self._host.memory.runs[str(region.path)] = action.run
        self._host.witness.allocated(self._host, action)
        return region

    def let_go(self, action: Recycle | Discard) -> None:
        """As the region store does, after the witness has looked."""
        self._host.witness.memory_freeing(self._host, action)
        super().let_go(action)
