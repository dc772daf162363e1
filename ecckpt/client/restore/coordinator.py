"""What rank 0 does in a restore, for all ranks.

    begin a timeline at all agents --> inventories --> plan --> orders --> outcomes --> verdict
            ^                           ^        |      ^                                 |
            +-- a newer fence:          +--------+      +------- refused or relaid -------+
                a higher number      disks still read
                                                                                          v
                                                             load; agents are told (fence) behind it

One ``begin`` request per agent before choosing: it fences older writers off and answers with the
inventory, so that no plan rests on what an older writer may still change. An agent that is still
reading its disk is asked again: what it does not list yet is not lost. One ``fence`` request per
agent in the background afterwards; until then agents keep all that older timelines have left.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ecckpt.client import deadlines
from ecckpt.client.cluster.members import Cluster
from ecckpt.client.effects import Now, Report, Routine, answers_of, call_all, perform, sleep
from ecckpt.client.events import (
    GenerationRefused,
    Message,
    RestoreDecided,
    RestorePlanned,
    TimelineBegun,
)
from ecckpt.client.restore.protocol import (
    Ground,
    Order,
    Outcome,
    Wanted,
    judge,
    orders,
    passes_over,
)
from ecckpt.client.restore.refusals import Refusals
from ecckpt.errors import EcckptError, Fenced, OlderStart, TooFewAgents
from ecckpt.format.ids import Generation
from ecckpt.policy.on_disk import OnDisk, on_disk
from ecckpt.policy.rollbacks import RollBack, in_force
from ecckpt.policy.survival import Inventory, RecoveryPlan, plan_recovery
from ecckpt.protocol.messages.restore import Begin, Fence
from ecckpt.protocol.verbs import BEGIN, FENCE, INVENTORY, Verb

# Of the nodes without ranks; one that knows the run is enough.
_ASKED_FIRST = 3
# Numbers that a restart tries before it lets others, which begin timelines faster, have the run.
_TRIES = 8
# Answers of agents that know of another start.
_FINAL = (Fenced, OlderStart)


class Coordinator:
    """Coordinates one restore; on other ranks than 0 it is never asked.

    ``roll_backs`` and ``on_disk`` are what it learns for the agents that it tells, and for the
    disks. ``patience_s`` is what one agent may take to answer, ``disks_s`` what all agents together
    may take to read their disks.
    """

    def __init__(self, cluster: Cluster, *, patience_s: float, disks_s: float) -> None:
        self.roll_backs: tuple[RollBack, ...] = ()
        self.on_disk = OnDisk()
        self._cluster, self._patience_s, self._disks_s = cluster, patience_s, disks_s
        self._timeline = 0
        self._refusals = Refusals(cluster.homes)
        self._asked_again = False
        self._relaid: set[Generation] = set()
        self._silent: dict[str, str] = {}  # nodes that did not answer, with the reason
        # Nodes whose inventories the latest plan is made of, and those that still read their disks.
        self._answering: tuple[str, ...] = ()
        self._unread: tuple[str, ...] = ()
        self._chosen: Generation | None = None  # to be told to the agents

    def order(self, wanted: Wanted, *, known: Sequence[int], alike: bool) -> Routine[list[Order]]:
        """The next thing to try: an order for each rank (see ``protocol.orders``).

        ``known``: timelines that have been; they count in the first round only. Raises ``Fenced``
        if another start of the run begins meanwhile.
        """
        inventories = yield from (self._look() if self._timeline else self._begin(known))
        plan = yield from self._await_disks(wanted, inventories)
        if self._silent and not self._asked_again and passes_over(plan):
            # Agents that did not answer may have what is missing: they get one more chance.
            self._asked_again = True
            self._silent.clear()
            plan = self._plan(wanted, (yield from self._look()))
        chosen = plan.chosen.generation if plan.chosen else None
        first = not self._refusals.refused
        yield from perform(
            Report(RestorePlanned(self._timeline, chosen, self._answering, is_first=first))
        )
        cluster = self._cluster
        ground = Ground(self._timeline, cluster.homes, cluster.placement, cluster.address)
        return orders(
            plan,
            ground,
            self._rejected(plan),
            alike=alike,
            relaid=chosen in self._relaid,
            witnesses=self._refusals.witnesses(chosen) if chosen else {},
        )

    def judge(
        self, generation: Generation, outcomes: Sequence[Outcome], wanted: Wanted
    ) -> Routine[bool]:
        """Whether all ranks may load. Raises as ``protocol.judge`` and ``Refusals.fail``.

        After a roll-back by name, all agents know of it before anything is loaded.
        """
        verdict = judge(outcomes)
        if verdict.relaid:
            self._relaid.add(generation)
        if verdict.failed:
            yield from self._note_failure(generation, outcomes, verdict.failed)
        if not verdict.go:
            return False
        self._chosen = generation
        yield from perform(Report(RestoreDecided(self._timeline, generation, wanted.named)))
        if wanted.named:
            went_back = RollBack(self._timeline, generation)
            self.roll_backs = in_force((*self.roll_backs, went_back))
            yield from self.tell()
        yield from perform(Report(TimelineBegun(self._timeline, generation, wanted.named)))
        return True

    def tell(self) -> Routine[None]:
        """Tell all agents what was restored, if anything was and they are not told yet.

        Raises ``Fenced`` if a newer start has begun.
        """
        generation, self._chosen = self._chosen, None
        if generation is None:
            return
        writer = self._cluster.writer(self._timeline)
        fence = Fence(self._cluster.run, writer, generation, self.roll_backs)
        _require_unfenced((yield from self._ask_all(FENCE, fence)))

    def _note_failure(
        self, generation: Generation, outcomes: Sequence[Outcome], why: str
    ) -> Routine[None]:
        refused = self._refusals.fail(generation, outcomes, why)
        what = "refused" if refused else "tried again"
        yield from perform(
            Report(Message(logging.WARNING, f"generation {generation} is {what}: {why}"))
        )
        if refused:
            yield from perform(Report(GenerationRefused(generation, self._answering, why)))

    def _await_disks(self, wanted: Wanted, inventories: list[Inventory]) -> Routine[RecoveryPlan]:
        """Plan, and plan again while files may be missing that an agent has not read yet.

        An agent whose memory still has files of the run has told what its disk has.
        """
        plan, told = self._plan(wanted, inventories), False
        while self._disks_s > 0 and any(
            each.awaits_disk and (passes_over(plan) or not len(each.headers))
            for each in inventories
        ):
            if not told:
                nodes = ", ".join(each.node for each in inventories if each.awaits_disk)
                text = f"waiting up to {self._disks_s:g} s for disks that are being read: {nodes}"
                yield from perform(Report(Message(logging.WARNING, text)))
                told = True
            yield from sleep(min(deadlines.DISKS_LOOK_S, self._disks_s))
            self._disks_s -= deadlines.DISKS_LOOK_S
            inventories = yield from self._look()
            plan = self._plan(wanted, inventories)
        return plan

    def _plan(self, wanted: Wanted, inventories: list[Inventory]) -> RecoveryPlan:
        self._answering = tuple(each.node for each in inventories if not each.awaits_disk)
        self._unread = tuple(each.node for each in inventories if each.awaits_disk)
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

    def _begin(self, known: Sequence[int]) -> Routine[list[Inventory]]:
        """Begin the timeline after all that any node has seen, and look at the same time.

        A number that is too low is refused by the agents that know better, with their fence: so
        the first guess need not be right. Raises ``Fenced`` if others begin timelines faster, and
        ``OlderStart`` if a younger start has begun one, and ``TooFewAgents``.
        """
        # An agent that hears of a timeline refuses other starts from then on. So none hears of one
        # that cannot be: too few agents have joined or, of a start that begins late, answer now, or
        # a younger one has the run.
        self._require_enough(len(self._cluster.address))
        age_s = (yield from perform(Now())) - self._cluster.started_s
        if age_s > deadlines.BEGINS_AT_ONCE_S:
            there = yield from self._await_enough((yield from self._look()))
            known = [each.fence for each in there]
        guesses = known if any(known) else (yield from self._fences_elsewhere())
        timeline = max(guesses, default=0) + 1
        for _ in range(_TRIES):
            answers = yield from self._ask_to_begin(timeline)
            newer = [fenced.current for fenced in answers_of(answers, Fenced)]
            if not newer:
                self._timeline = timeline
                return (yield from self._await_enough(answers_of(answers, Inventory)))
            timeline = max(timeline, *newer) + 1  # agents of another make may leave it out
        raise Fenced(timeline=timeline - 1, current=timeline - 1)

    def _await_enough(self, inventories: list[Inventory]) -> Routine[list[Inventory]]:
        """Enough inventories; agents that are silent are asked once more if these are too few."""
        if self._silent and len(inventories) < self._enough:
            self._silent.clear()
            inventories = yield from self._look()
        self._require_enough(len(inventories))
        return inventories

    @property
    def _enough(self) -> int:
        """How many agents a start needs, so that no other start can have as many that it has not.

        More than half of the nodes, or all but those that may be lost by promise if that is less.
        """
        nodes = len(self._cluster.address) + len(self._cluster.missing)
        return min(nodes // 2 + 1, nodes - (self._cluster.placement.code.m + 1))

    def _require_enough(self, have: int) -> None:
        """Raise ``TooFewAgents`` with the numbers if these are too few."""
        nodes = len(self._cluster.address) + len(self._cluster.missing)
        if have < self._enough:
            raise TooFewAgents(self._cluster.run, have=have, need=self._enough, nodes=nodes)

    def _fences_elsewhere(self) -> Routine[list[int]]:
        """Timelines seen by a few other nodes, where the ranks' own agents are new to the run."""
        homes = set(self._cluster.homes)
        others = [node for node in self._cluster.address if node not in homes]
        far_apart = max(1, len(others) // _ASKED_FIRST)  # neighbours are lost together
        few = others[::far_apart][:_ASKED_FIRST]
        if not few:
            return []
        answers = yield from call_all(INVENTORY, self._cluster.run, few, deadlines.KNOWN_TIMELINE_S)
        # One that is silent is asked again with all others, with more patience.
        return [inventory.fence for inventory in answers_of(answers, Inventory)]

    def _look(self) -> Routine[list[Inventory]]:
        """What the agents have, now; ``Fenced`` by any of them if a newer start has begun."""
        answers = yield from self._ask_to_begin(self._timeline)
        _require_unfenced(answers)
        return answers_of(answers, Inventory)

    def _ask_to_begin(self, timeline: int) -> Routine[dict[str, Any]]:
        age_s = (yield from perform(Now())) - self._cluster.started_s
        message = Begin(self._cluster.run, self._cluster.writer(timeline), age_s)
        answers = yield from self._ask_all(BEGIN, message)
        for outlived in answers_of(answers, OlderStart):
            raise outlived
        return answers

    def _ask_all(self, verb: Verb[Any, Any], message: object) -> Routine[dict[str, Any]]:
        """Answers of all agents, also those that name another start; silent ones are left out."""
        nodes = [node for node in self._cluster.address if node not in self._silent]
        answers = yield from call_all(verb, message, nodes, self._patience_s)
        for node, answer in answers.items():
            if isinstance(answer, EcckptError | OSError) and not isinstance(answer, _FINAL):
                self._silent[node] = str(answer)
                yield from perform(Report(Message(logging.WARNING, f"node {node}: {answer}")))
        return {node: each for node, each in answers.items() if node not in self._silent}

    def _rejected(self, plan: RecoveryPlan) -> dict[str, str]:
        """Why newer generations were passed over, and which nodes might have had more of them."""
        refused = {str(generation): why for generation, why in self._refusals.refused.items()}
        rejected = {name: refused.get(name, why) for name, why in plan.rejected().items()}
        if plan.chosen is None:
            rejected |= plan.ruins
        if plan.chosen is None and len(self._cluster.missing) > self._cluster.placement.code.m + 1:
            # Fewer cannot hide a run: the others would have traces of it.
            rejected |= {f"agent {name}": why for name, why in self._cluster.missing.items()}
        if plan.chosen is None or passes_over(plan):
            rejected |= {f"node {node}": why for node, why in self._silent.items()}
            rejected |= {f"node {node}": "it still reads its disk" for node in self._unread}
        return rejected


def _require_unfenced(answers: Mapping[str, Any]) -> None:
    """Raise the answer of an agent that was told of a newer start of the run."""
    for fenced in answers_of(answers, Fenced):
        raise fenced
