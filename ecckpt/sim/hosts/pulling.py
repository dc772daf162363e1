"""Bytes from other agents: what ``agent/runtime/network.py`` does over sockets, simulated.

An agent brings shards home with it, and a trainer that goes on with another number of ranks reads
with it what others saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ecckpt.agent.runtime.shard_bytes import bad_blocks
from ecckpt.agent.storage.disk import DiskFile
from ecckpt.errors import AgentUnreachable, EcckptError, TooFewFragments, TooSlow
from ecckpt.format.block_ranges import span_of
from ecckpt.format.fragment_file import parse_table
from ecckpt.format.ids import ShardId
from ecckpt.policy.gather_plan import (
    BlockPull,
    GatherPlan,
    no_table,
    table_sources,
    whole_shard,
)
from ecckpt.protocol.gather import rebuild
from ecckpt.protocol.messages.restore import Fetch
from ecckpt.sim.hosts.network import SimulatedNetwork, answering
from ecckpt.sim.world import Process, Steps, Wait, World

if TYPE_CHECKING:
    from ecckpt.sim.hosts.agent import SimulatedAgent
    from ecckpt.sim.hosts.host import SimulatedHost

_PULL_TIMEOUT_S = 10.0
_NO_PROGRESS_S = 2.0  # a pull that gets no bytes for so long ends


@dataclass(frozen=True, slots=True)
class Puller:
    """Pulls for an agent or a trainer on ``node``; ``hosts`` are all hosts, by node."""

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
            source, offset, size_bytes = agent.core.records.locate(
                shard, index, last=last, early=early
            )
            data = agent.read(source, offset, size_bytes)
            if self.world.chance(self.network.faults.flip):
                self.network.injected += 1
                if isinstance(source, DiskFile) and self.world.chance(0.5):
                    raise AgentUnreachable(address, "its disk cannot be read")
                data[self.world.rng.randrange(size_bytes)] ^= 1 << self.world.rng.randrange(8)
            return data

        if not self.network.passes_bulk(self.node, address):
            error = AgentUnreachable(address, "no bytes came")
            return lambda process: self.world.after(_NO_PROGRESS_S, process.resume, error)
        return self.hosts[address].call(self.node, answering(serve), _PULL_TIMEOUT_S)

    def table(self, message: Fetch) -> Steps:
        """The checksums of a shard, from any of its sources."""
        problems: list[str] = []
        shard = message.header.shard
        for address in table_sources(message.places):
            handle = answering(lambda agent: agent.core.records.table(shard))
            try:
                packed = yield self.hosts[address].call(self.node, handle, _PULL_TIMEOUT_S)
                return parse_table(packed, message.header, address)
            except EcckptError as error:
                problems.append(str(error))
        raise no_table(message.header, problems)

    def gather(self, message: Fetch, views: list[memoryview], table: np.ndarray) -> Steps:
        """Fill the k data fragments in place, every block proven; returns the ``GatherPlan``."""
        plan = GatherPlan(message.header, whole_shard(message.header), message.places)
        yield lambda process: _Flight(self, plan, process, views, table).go_on()
        rebuild(plan, table, views.__getitem__)
        return plan


class _Flight:
    """The pulls of one plan, for a process that waits until none is left: ``protocol/gather.py``.

    A pull that takes longer than the plan's patience is given up, as if bytes of it had come until
    then; what comes of it later is not looked at.
    """

    def __init__(
        self,
        puller: Puller,
        plan: GatherPlan,
        process: Process,
        views: list[memoryview],
        table: np.ndarray,
    ) -> None:
        self._puller, self._world = puller, puller.world
        self._plan, self._process = plan, process
        self._views, self._table = views, table
        self._begun_s: dict[BlockPull, float] = {}  # of the pulls in flight

    def go_on(self) -> None:
        """Begin what the plan says; at the end, or without hope, resume the process."""
        try:
            begun = self._plan.next()
        except TooFewFragments as error:
            self._process.resume(error)
            return
        self._begun_s |= dict.fromkeys(begun, self._world.now_s)
        for pull in begun:
            self._process.actor.spawn(self._pull(pull))
        if not self._begun_s:
            self._process.resume(None)
        for pull, begun_s in self._begun_s.items():
            patience_s = self._plan.patience_s(pull)
            if patience_s is not None:
                left_s = max(0.0, begun_s + patience_s - self._world.now_s)
                self._world.after(left_s, self._process.actor.reach, self._look, pull)

    def _look(self, pull: BlockPull) -> None:
        patience_s = self._plan.patience_s(pull) if pull in self._begun_s else None
        if patience_s is not None and self._world.now_s >= self._begun_s[pull] + patience_s:
            self._end(pull, TooSlow(pull.source, done_bytes=0, size_bytes=pull.size_bytes))

    def _pull(self, pull: BlockPull) -> Steps:
        header, index, error = self._plan.header, pull.index, None
        try:
            data = yield self._puller.read(pull.source, header.shard, index, last=pull.again)
            for rows in pull.rows if pull in self._begun_s else ():
                span = span_of(header, rows)
                view = self._views[index][span]
                view[:] = data[span]
                bad = bad_blocks(header, index, view, self._table, rows)
                self._plan.prove(pull, rows, bad)
        except EcckptError as problem:
            error = problem
        if pull in self._begun_s:
            self._end(pull, error)

    def _end(self, pull: BlockPull, error: Exception | None) -> None:
        self._plan.finish(pull, self._world.now_s - self._begun_s.pop(pull), error)
        self.go_on()
