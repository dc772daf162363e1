"""What rank 0 does in a restore, for all: fence, look, choose, order, judge.

The rules are in ordering.py and recovery.py; here the agents are asked and told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from ecckpt import wire
from ecckpt.client import AgentClient
from ecckpt.cluster import Cluster
from ecckpt.collector import collector_paused
from ecckpt.errors import EcckptError, Fenced
from ecckpt.generation import Generation
from ecckpt.lineage import RollBack, in_force
from ecckpt.ordering import (
    Ground,
    Order,
    Outcome,
    Refusals,
    Wanted,
    judge,
    next_timeline,
    orders,
    passes_over,
)
from ecckpt.recovery import Inventory, OnDisk, RecoveryPlan, on_disk, plan_recovery

_log = logging.getLogger(__name__)


class Leader:
    """Leads one restore; ``peers`` are the agents, with the patience that each may cost.

    On other ranks than 0 it is never asked. ``after``: the timeline that this session has had.
    ``roll_backs`` and ``on_disk`` are what it learns for those that it tells, and for its disks.
    """

    def __init__(self, cluster: Cluster, peers: Mapping[str, AgentClient], *, after: int) -> None:
        self.roll_backs: tuple[RollBack, ...] = ()
        self.on_disk = OnDisk()
        self._cluster, self._peers = cluster, peers
        self._after = after
        self._timeline = 0
        self._refusals = Refusals()
        self._asked_again = False
        self._relaid: set[Generation] = set()
        self._silent: dict[str, str] = {}
        self._asking = ThreadPoolExecutor(32, thread_name_prefix="ask")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._asking.shutdown()

    @collector_paused()
    def order(self, wanted: Wanted, *, alike: bool) -> list[Order]:
        """The next thing to try: an order for each rank (see ``ordering.orders``)."""
        if not self._timeline:
            self._timeline = self._start_timeline()
        plan = self._plan(wanted)
        if self._silent and not self._asked_again and passes_over(plan):
            self._ask_again()
            plan = self._plan(wanted)
        ground = Ground(
            self._timeline,
            self._cluster.homes,
            self._cluster.placement,
            {node: peer.address for node, peer in self._cluster.peers.items()},
        )
        relaid = plan.chosen is not None and plan.chosen.generation in self._relaid
        return orders(plan, ground, self._rejected(plan), alike=alike, relaid=relaid)

    def judge(self, generation: Generation, outcomes: Sequence[Outcome], wanted: Wanted) -> bool:
        """Whether all ranks may load; if so, the agents are told. Raises as ``ordering.judge``."""
        verdict = judge(outcomes)
        if verdict.relaid:
            self._relaid.add(generation)
        if verdict.failed:
            refused = self._refusals.fail(generation, verdict.failed)
            what = "refused" if refused else "tried again"
            _log.warning("generation %s is %s: %s", generation, what, verdict.failed)
        if verdict.go:
            if wanted.named:
                went_back = RollBack(self._timeline, generation)
                self.roll_backs = in_force((*self.roll_backs, went_back))
            fence = wire.Fence(self._cluster.run, self._timeline, generation, self.roll_backs)
            self._each_peer(lambda peer: peer.fence(fence))
        return verdict.go

    def _plan(self, wanted: Wanted) -> RecoveryPlan:
        inventories = self._inventories()
        plan = plan_recovery(
            self._cluster.run,
            inventories,
            step=wanted.step,
            generation=wanted.generation,
            refused=self._refusals.refused,
        )
        self.roll_backs = plan.roll_backs
        self.on_disk = on_disk(self._cluster.run, inventories)
        return plan

    def _ask_again(self) -> None:
        """Agents that did not answer may have what is missing: they get one more chance."""
        self._asked_again = True
        self._silent.clear()
        fence = wire.Fence(self._cluster.run, self._timeline, None, self.roll_backs)
        self._each_peer(lambda peer: peer.fence(fence))

    def _start_timeline(self) -> int:
        """Fence first, look afterwards: no plan on what an older writer may still change."""
        found = plan_recovery(self._cluster.run, self._inventories())
        timeline = next_timeline(found, self._after)
        fence = wire.Fence(self._cluster.run, timeline, None, found.roll_backs)
        self._each_peer(lambda peer: peer.fence(fence))
        return timeline

    def _inventories(self) -> list[Inventory]:
        return self._each_peer(lambda peer: peer.inventory(self._cluster.run))

    def _each_peer(self, ask: Callable[[AgentClient], Any]) -> list[Any]:
        """Answers of all agents; one that does not answer is left out from then on.

        ``Fenced`` by any of them is raised: a newer start of the run has begun meanwhile.
        """
        answers: list[Any] = []
        peers = {node: peer for node, peer in self._peers.items() if node not in self._silent}
        futures = {node: self._asking.submit(ask, peer) for node, peer in peers.items()}
        for node, future in futures.items():
            try:
                answers.append(future.result())
            except Fenced:
                raise
            except (EcckptError, OSError) as error:
                self._silent[node] = str(error)
                _log.warning("node %s: %s", node, error)
        return answers

    def _rejected(self, plan: RecoveryPlan) -> dict[str, str]:
        """Why newer generations were passed over; with nothing left, also what is not answering."""
        refused = {str(generation): why for generation, why in self._refusals.refused.items()}
        rejected = {name: refused.get(name, why) for name, why in plan.rejected().items()}
        if plan.chosen is None:
            rejected |= plan.ruins
            rejected |= {f"node {node}": why for node, why in self._silent.items()}
        return rejected
