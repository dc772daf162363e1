"""What rank 0 does in a restore, for all: the order of requests of ``leading.py`` above."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ecckpt.client.restore.protocol import Ground, Outcome, Refusals, judge, orders, passes_over
from ecckpt.client.restore.timeline import first_free
from ecckpt.errors import EcckptError, Fenced, NoRoomToRestore
from ecckpt.format.ids import Generation
from ecckpt.policy.rollbacks import RollBack, in_force
from ecckpt.policy.survival import Inventory, OnDisk, RecoveryPlan, on_disk, plan_recovery
from ecckpt.protocol.messages.restore import Begin, Fence
from ecckpt.sim.world import Failure, Steps, together

if TYPE_CHECKING:
    from ecckpt.sim.trainer import Rank


class SimulatedLeader:
    """Leads the one restore of a session."""

    def __init__(self, rank: Rank) -> None:
        self.roll_backs: tuple[RollBack, ...] = ()
        self.on_disk = OnDisk()
        self._rank, self._session, self._node = rank, rank.session, rank.host.node
        self._timeline = 0
        self._asked_s = 0.0
        self._refusals = Refusals()
        self._asked_again = False
        self._silent: set[str] = set()
        self._answering: set[str] = set()  # whose inventories the latest plan was made from

    def order(self, known: list[int]) -> Steps:
        """The next thing to try: an order for each rank."""
        session = self._session
        begun = self._timeline
        plan = self._plan((yield from (self._look() if begun else self._begin(known))))
        if self._silent and not self._asked_again and passes_over(plan):
            self._asked_again = True
            self._silent.clear()
            plan = self._plan((yield from self._look()))
        if not self._refusals.refused and not self._is_stale(session.rules.patience_s):
            chosen = plan.chosen.generation if plan.chosen else None
            session.truth.chosen(chosen, self._answering, session.wanted)
        if plan.chosen is None:
            rejected = plan.generations or plan.ruins or self._silent
            if rejected or session.wanted.named or session.required:
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
            refused = verdict.failed and self._refusals.fail(generation, verdict.failed)
            if refused and not self._is_stale(session.rules.restore_timeout_s):
                session.truth.refused(generation, self._answering, verdict.failed)
            if verdict.go:
                named = session.wanted.named
                session.truth.decides(self._timeline, generation, on_purpose=named)
                if named:
                    went_back = RollBack(self._timeline, generation)
                    self.roll_backs = in_force((*self.roll_backs, went_back))
                    _require_unfenced((yield from self._tell(generation)))
                else:
                    self._rank.spawn(self._tell(generation))
                session.truth.begins(self._timeline, generation, on_purpose=named)
            return [verdict.go] * len(outcomes)

        return lead

    def _plan(self, inventories: list[Inventory]) -> RecoveryPlan:
        session = self._session
        self._answering = {inventory.node for inventory in inventories}
        plan = plan_recovery(
            session.run,
            inventories,
            step=session.wanted.step,
            generation=session.wanted.generation,
            refused=self._refusals.refused,
        )
        self.roll_backs = plan.roll_backs
        if session.rules.disk_every:
            self.on_disk = on_disk(session.run, inventories)
        return plan

    def _is_stale(self, age_s: float) -> bool:
        """Whether this rank was stopped since it asked, and what was answered says nothing."""
        return self._rank.world.now_s > self._asked_s + age_s + 0.1

    def _begin(self, known: list[int]) -> Steps:
        numbers = first_free(known)
        timeline = next(numbers)
        while True:
            answers = yield from self._ask(timeline)
            newer = [each.current for each in answers if isinstance(each, Fenced)]
            try:
                timeline = numbers.send(newer)
            except StopIteration as end:
                self._timeline = end.value
                return answers

    def _look(self) -> Steps:
        answers = yield from self._ask(self._timeline)
        _require_unfenced(answers)
        return answers

    def _ask(self, timeline: int) -> Steps:
        session = self._session
        self._asked_s = self._rank.world.now_s
        return (yield from self._answers(Begin(session.run, timeline, session.name)))

    def _tell(self, restored: Generation) -> Steps:
        message = Fence(self._session.run, self._timeline, restored, self.roll_backs)
        return (yield from self._answers(message))

    def _answers(self, message: Begin | Fence) -> Steps:
        """Of all agents, or their ``Fenced``; one that is silent is left out from then on."""
        patience_s = self._session.rules.patience_s
        hosts = [host for node, host in self._session.hosts.items() if node not in self._silent]
        got = yield together([host.ask(self._node, message, patience_s) for host in hosts])
        answers = []
        for host, answer in zip(hosts, got, strict=True):
            if isinstance(answer, EcckptError) and not isinstance(answer, Fenced):
                self._silent.add(host.node)
            else:
                answers.append(answer)
        return answers


def _require_unfenced(answers: list[Any]) -> None:
    for each in answers:
        if isinstance(each, Fenced):
            raise Failure(str(each))
