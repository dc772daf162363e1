"""What rank 0 does in a restore, for all: the order of requests of ``leading.py`` above."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ecckpt import wire
from ecckpt.errors import EcckptError, Fenced, NoRoomToRestore
from ecckpt.generation import Generation
from ecckpt.lineage import RollBack, in_force
from ecckpt.ordering import Ground, Outcome, Refusals, judge, next_timeline, orders, passes_over
from ecckpt.recovery import Inventory, RecoveryPlan, plan_recovery
from ecckpt.sim.host import Host
from ecckpt.sim.network import answering
from ecckpt.sim.world import Failure, Steps, Wait, together

if TYPE_CHECKING:
    from ecckpt.sim.rank import Rank


class Leader:
    """Leads the one restore of a session."""

    def __init__(self, rank: Rank) -> None:
        self._session, self._node = rank.session, rank.host.node
        self._timeline = 0
        self._roll_backs: tuple[RollBack, ...] = ()
        self._refusals = Refusals()
        self._asked_again = False
        self._silent: set[str] = set()
        self._answering: set[str] = set()  # whose inventories the latest plan was made from

    def order(self) -> Steps:
        """The next thing to try: an order for each rank."""
        session = self._session
        if not self._timeline:
            found = plan_recovery(session.run, (yield from self._inventories()))
            self._timeline = next_timeline(found, 0)
            yield from self._fence(None, found.roll_backs)
        plan = yield from self._plan()
        if self._silent and not self._asked_again and passes_over(plan):
            self._asked_again = True
            self._silent.clear()
            yield from self._fence(None, self._roll_backs)
            plan = yield from self._plan()
        if not self._refusals.refused:
            chosen = plan.chosen.generation if plan.chosen else None
            session.truth.chosen(chosen, self._answering, session.wanted)
        if plan.chosen is None:
            rejected = plan.generations or plan.ruins or self._silent
            if rejected or session.wanted.named:
                session.nothing_left = not session.wanted.named
                raise Failure("nothing to restore")
            session.truth.begins(self._timeline, None)
        address = {node: node for node in session.hosts}
        ground = Ground(self._timeline, session.homes, session.placement, address)
        return orders(plan, ground, {}, alike=False, relaid=False)

    def verdict(self, generation: Generation) -> Callable[[list[Outcome]], Steps]:
        """What follows from the outcomes of all ranks."""

        def lead(outcomes: list[Outcome]) -> Steps:
            session = self._session
            try:
                verdict = judge(outcomes)
            except NoRoomToRestore as error:
                raise Failure(str(error)) from error
            if verdict.failed and self._refusals.fail(generation, verdict.failed):
                session.truth.refused(generation, self._answering, verdict.failed)
            if verdict.go:
                if session.wanted.named:
                    went_back = RollBack(self._timeline, generation)
                    self._roll_backs = in_force((*self._roll_backs, went_back))
                yield from self._fence(generation, self._roll_backs)
                named = session.wanted.named
                session.truth.begins(self._timeline, generation, on_purpose=named)
            return [verdict.go] * len(outcomes)

        return lead

    def _plan(self) -> Steps:
        session = self._session
        inventories = yield from self._inventories()
        self._answering = {inventory.node for inventory in inventories}
        plan: RecoveryPlan = plan_recovery(
            session.run,
            inventories,
            step=session.wanted.step,
            generation=session.wanted.generation,
            refused=self._refusals.refused,
        )
        self._roll_backs = plan.roll_backs
        return plan

    def _inventories(self) -> Steps:
        session = self._session

        def look(agent: Any) -> Inventory:
            return agent.core.ledgers.look(session.run).inventory(agent.node)  # type: ignore[no-any-return]

        def ask(host: Host) -> Wait:
            return host.call(self._node, answering(look), session.rules.patience_s)

        return (yield from self._ask_each(ask))

    def _fence(self, restored: Generation | None, roll_backs: tuple[RollBack, ...]) -> Steps:
        session = self._session
        message = wire.Fence(session.run, self._timeline, restored, roll_backs)
        patience_s = session.rules.patience_s
        yield from self._ask_each(lambda host: host.ask(self._node, message, patience_s))

    def _ask_each(self, ask: Callable[[Host], Wait]) -> Steps:
        """Answers of all agents; one that does not answer is not asked again in this restore."""
        hosts = [host for node, host in self._session.hosts.items() if node not in self._silent]
        answers = yield together([ask(host) for host in hosts])
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, Fenced):
                raise Failure(str(answer))
            if isinstance(answer, EcckptError):
                self._silent.add(host.node)
        return [answer for answer in answers if not isinstance(answer, EcckptError)]
