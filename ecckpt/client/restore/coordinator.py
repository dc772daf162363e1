"""What rank 0 does in a restore, for all: begin a timeline, choose, order, judge, tell.

The rules are in beginning.py, ordering.py and recovery.py; here the agents are asked and told. All
of them are asked once before anything is chosen, and told once, behind the restore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ecckpt.client.cluster.members import Cluster
from ecckpt.client.restore.protocol import (
    Ground,
    Order,
    Outcome,
    Refusals,
    Wanted,
    judge,
    orders,
    passes_over,
)
from ecckpt.client.restore.timeline import first_free
from ecckpt.errors import EcckptError, Fenced
from ecckpt.format.ids import Generation
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.policy.rollbacks import RollBack, in_force
from ecckpt.policy.survival import Inventory, OnDisk, RecoveryPlan, on_disk, plan_recovery
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.restore import Begin, Fence
from ecckpt.protocol.verbs import BEGIN, FENCE, INVENTORY

_log = logging.getLogger(__name__)

_AT_A_TIME = 32
# Of the nodes without ranks; one that knows the run is enough.
_ASKED_FIRST, _ASKED_FIRST_S = 3, 1.0


class Leader:
    """Leads one restore; ``peers`` are the agents, with the patience that each may cost.

    On other ranks than 0 it is never asked. ``roll_backs`` and ``on_disk`` are what it learns for
    those that it tells, and for its disks.
    """

    def __init__(self, cluster: Cluster, peers: Mapping[str, AgentClient], *, session: str) -> None:
        self.roll_backs: tuple[RollBack, ...] = ()
        self.on_disk = OnDisk()
        self._cluster, self._peers = cluster, peers
        self._session = session
        self._timeline = 0
        self._refusals = Refusals()
        self._asked_again = False
        self._relaid: set[Generation] = set()
        self._silent: dict[str, str] = {}
        self._chosen: Generation | None = None
        self._asking = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="ask")

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
    def order(self, wanted: Wanted, *, known: Sequence[int], alike: bool) -> list[Order]:
        """The next thing to try: an order for each rank (see ``ordering.orders``).

        ``known``: timelines that have been; only the first time do they count. Raises ``Fenced`` if
        another start of the run begins meanwhile.
        """
        inventories = self._look() if self._timeline else self._begin(known)
        plan = self._plan(wanted, inventories)
        if self._silent and not self._asked_again and passes_over(plan):
            # Agents that did not answer may have what is missing: they get one more chance.
            self._asked_again = True
            self._silent.clear()
            plan = self._plan(wanted, self._look())
        ground = Ground(
            self._timeline,
            self._cluster.homes,
            self._cluster.placement,
            {node: peer.address for node, peer in self._cluster.peers.items()},
        )
        relaid = plan.chosen is not None and plan.chosen.generation in self._relaid
        return orders(plan, ground, self._rejected(plan), alike=alike, relaid=relaid)

    def judge(self, generation: Generation, outcomes: Sequence[Outcome], wanted: Wanted) -> bool:
        """Whether all ranks may load. Raises as ``ordering.judge``.

        Where somebody went back by name, all agents know it before anything is loaded.
        """
        verdict = judge(outcomes)
        if verdict.relaid:
            self._relaid.add(generation)
        if verdict.failed:
            refused = self._refusals.fail(generation, verdict.failed)
            what = "refused" if refused else "tried again"
            _log.warning("generation %s is %s: %s", generation, what, verdict.failed)
        if verdict.go:
            self._chosen = generation
            if wanted.named:
                went_back = RollBack(self._timeline, generation)
                self.roll_backs = in_force((*self.roll_backs, went_back))
                self.tell()
        return verdict.go

    def tell(self) -> None:
        """Tell all agents what was restored, if anything was and they are not told yet.

        Mostly in the background: until then they keep all that older timelines have left. Raises
        ``Fenced`` if a newer start has begun.
        """
        generation, self._chosen = self._chosen, None
        if generation is None:
            return
        fence = Fence(self._cluster.run, self._timeline, generation, self.roll_backs)
        try:
            with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="tell") as telling:
                answers = self._answers(telling, lambda peer: peer.call(FENCE, fence))
        except RuntimeError as error:  # a program that ends can start no threads, nor will it save
            _log.info("agents are not told of %s: %s", generation, error)
            return
        _require_unfenced(answers)

    def _plan(self, wanted: Wanted, inventories: list[Inventory]) -> RecoveryPlan:
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

    def _begin(self, known: Sequence[int]) -> list[Inventory]:
        """Fence and look in one: no plan on what an older writer may still change."""
        numbers = first_free(known if any(known) else self._elsewhere())
        timeline = next(numbers)
        while True:
            answers = self._ask(timeline)
            newer = [each.current for each in answers if isinstance(each, Fenced)]
            try:
                timeline = numbers.send(newer)
            except StopIteration as end:
                self._timeline = end.value
                return [each for each in answers if isinstance(each, Inventory)]

    def _elsewhere(self) -> list[int]:
        """What a few others have seen where the ranks' own agents are new to the run.

        A guess that is too low is refused by all agents that know better, and all are asked again.
        """
        homes, run = set(self._cluster.homes), self._cluster.run
        others = [peer for node, peer in self._peers.items() if node not in homes]
        far_apart = max(1, len(others) // _ASKED_FIRST)  # neighbours are lost together

        def fence(peer: AgentClient) -> int:
            try:
                return replace(peer, timeout_s=_ASKED_FIRST_S).call(INVENTORY, run).fence
            except (EcckptError, OSError):  # it is asked with all others, with more patience
                return 0

        return list(self._asking.map(fence, others[::far_apart][:_ASKED_FIRST]))

    def _look(self) -> list[Inventory]:
        """Again, what the agents have; ``Fenced`` by any of them if a newer start has begun."""
        answers = self._ask(self._timeline)
        _require_unfenced(answers)
        return answers

    def _ask(self, timeline: int) -> list[Any]:
        begin = Begin(self._cluster.run, timeline, self._session)
        return self._answers(self._asking, lambda peer: peer.call(BEGIN, begin))

    def _answers(self, pool: ThreadPoolExecutor, ask: Callable[[AgentClient], Any]) -> list[Any]:
        """Of all agents, or their ``Fenced``; one that is silent is left out from then on."""
        answers: list[Any] = []
        peers = {node: peer for node, peer in self._peers.items() if node not in self._silent}
        futures = {node: pool.submit(ask, peer) for node, peer in peers.items()}
        for node, future in futures.items():
            try:
                answers.append(future.result())
            except Fenced as error:
                answers.append(error)
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


def _require_unfenced(answers: Sequence[Any]) -> None:
    """Raise what an agent has answered that was told of a newer start of the run."""
    for each in answers:
        if isinstance(each, Fenced):
            raise each
