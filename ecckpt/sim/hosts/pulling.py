"""Bytes from other agents: what ``agent/runtime/network.py`` does over sockets, simulated.

An agent brings shards home with it, and a trainer that goes on with another number of ranks reads
with it what others saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ecckpt.agent.core.gather_plan import Gathering
from ecckpt.agent.runtime.shard_bytes import bad_blocks, rebuild
from ecckpt.agent.storage.disk import DiskFile
from ecckpt.errors import AgentUnreachable, EcckptError, TooFewFragments
from ecckpt.format.block_ranges import span_of
from ecckpt.format.fragment_file import parse_table
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.restore import Fetch
from ecckpt.sim.hosts.network import SimulatedNetwork, answering
from ecckpt.sim.world import Process, Steps, Wait, World, together

if TYPE_CHECKING:
    from ecckpt.sim.hosts.agent import SimulatedAgent
    from ecckpt.sim.hosts.host import SimulatedHost

_PULL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Puller:
    """Pulls for whoever runs on ``node``; ``hosts`` are all, by node."""

    node: str
    world: World
    network: SimulatedNetwork
    hosts: Mapping[str, SimulatedHost]

    def read(
        self,
        address: str,
        shard: ShardId,
        index: int,
        *,
        last: bool = False,
        early: bool = False,
    ) -> Wait:
        """The bytes of a fragment, from another agent; now and then a bit flips on the way.

        Or, on disk, it cannot be read at the moment.
        """

        def serve(agent: SimulatedAgent) -> bytearray:
            source, offset, size_bytes = agent.core.ledgers.locate(
                shard, index, last=last, early=early
            )
            data = agent.read(source, offset, size_bytes)
            if self.world.chance(self.network.faults.flip):
                self.network.injected += 1
                if isinstance(source, DiskFile) and self.world.chance(0.5):
                    raise AgentUnreachable(address, "its disk cannot be read")
                data[self.world.rng.randrange(size_bytes)] ^= 1 << self.world.rng.randrange(8)
            return data

        return self.hosts[address].call(self.node, answering(serve), _PULL_TIMEOUT_S)

    def table(self, message: Fetch) -> Steps:
        """The checksums of a shard, from any of its sources."""
        problems = []
        addresses = dict.fromkeys(a for each in message.sources for a in each.addresses)
        shard = message.header.shard
        for address in (*addresses, *addresses):
            handle = answering(lambda agent: agent.core.ledgers.table(shard))
            try:
                packed = yield self.hosts[address].call(self.node, handle, _PULL_TIMEOUT_S)
                return parse_table(packed, message.header, address)
            except EcckptError as error:
                problems.append(str(error))
        raise TooFewFragments(f"checksums of {shard}", have=0, need=1, reasons=problems[:8])

    def gather(self, message: Fetch, views: list[memoryview], table: np.ndarray) -> Steps:
        """Fill the n fragments in place, every block proven, the missing ones rebuilt.

        Returns the ``Gathering`` and how many fragments were rebuilt.
        """
        gathering = Gathering.of(message)
        wanted = gathering.first()
        while True:
            yield together([self._next(gathering, each, views[each], table) for each in wanted])
            if not (wanted := gathering.next()):
                break
        return gathering, rebuild(gathering, views, table)

    def _next(self, gathering: Gathering, index: int, view: memoryview, table: np.ndarray) -> Wait:
        """Try one more source of a fragment."""

        def steps() -> Steps:
            header = gathering.header
            address, runs = gathering.take(index)
            try:
                data = yield self.read(address, header.shard, index, last=gathering.last)
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
