"""Repair by hand, when no ranks run: what ``ecckpt repair`` does.

inventories -> plan_repairs -> for each shard: fetch it to a home if none has it, then repair
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ecckpt import wire
from ecckpt.client import AgentClient
from ecckpt.errors import (
    AgentUnreachable,
    EcckptError,
    NotHeld,
    NothingToRestore,
    RequestRefused,
)
from ecckpt.fragment import HOME, Header
from ecckpt.ordering import sources_of
from ecckpt.placement import Code, Node, plan_placement, plan_repair
from ecckpt.recovery import GenerationReport, RecoveryPlan, plan_recovery

_LOOK_AGAIN_S = 0.2
_PARALLEL_SHARDS = 8
_BUSY = 503


@dataclass(frozen=True, slots=True)
class Mend:
    """What one shard needs: to come to ``home`` if ``fetch``, then fragments at these nodes."""

    header: Header
    home: str
    fetch: bool
    sources: tuple[wire.Sources, ...]
    targets: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """The generation to repair, and what each of its shards needs."""

    report: GenerationReport
    mends: tuple[Mend, ...]


@dataclass(frozen=True, slots=True)
class Repaired:
    """How it went: margins before and after, and what could not be done, by shard."""

    generation: str
    margin_before: int
    margin: int
    complete: bool
    fragments: int
    shards_fetched: int
    problems: tuple[str, ...]


class Repairer:
    """Looks at a run through its agents, those that answer; ``silent`` says why others do not.

    Raises ``AgentUnreachable`` if none answers.
    """

    def __init__(self, run: str, agents: Sequence[AgentClient], *, timeout_s: float) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._agents: dict[str, AgentClient] = {}
        self._nodes: dict[str, Node] = {}
        self.silent: dict[str, str] = {}
        for agent in agents:
            try:
                info = agent.node()
            except EcckptError as error:
                self.silent[agent.address] = str(error)
                continue
            self._agents[info.node] = agent
            self._nodes[info.node] = Node(info.node, info.domain)
        if not self._agents:
            raise AgentUnreachable("of any node", "; ".join(list(self.silent.values())[:4]))

    def plan(self) -> RepairPlan:
        """What is missing of the newest generation that survives, and where it could go.

        Raises ``NothingToRestore`` if none does.
        """
        found = self._look()
        if found.chosen is None:
            raise NothingToRestore(self._run, found.rejected() | dict(found.ruins))
        addresses = {node: agent.address for node, agent in self._agents.items()}
        return RepairPlan(found.chosen, plan_mends(found.chosen, self._nodes, addresses))

    def carry_out(self, plan: RepairPlan) -> Repaired:
        """Do it, several shards at a time; what fails is said, and costs nothing that is there."""
        writer = self._look().newest_timeline
        deadline_s = time.monotonic() + self._timeout_s
        with ThreadPoolExecutor(_PARALLEL_SHARDS, thread_name_prefix="repair") as pool:
            ends = pool.map(lambda mend: self._mend(mend, writer, deadline_s), plan.mends)
            problems = [problem for problem in ends if problem]
        after = self._report(plan.report)
        before = {(shard.rank, index) for shard in plan.report.shards for index in shard.fragments}
        now = {(shard.rank, index) for shard in after.shards for index in shard.fragments}
        return Repaired(
            generation=str(after.generation),
            margin_before=plan.report.margin,
            margin=after.margin,
            complete=after.state == "complete",
            fragments=len(now - before),
            shards_fetched=sum(mend.fetch for mend in plan.mends),
            problems=tuple(problems),
        )

    def _mend(self, mend: Mend, writer: int, deadline_s: float) -> str:
        """Why a shard could not be repaired; empty if it was."""
        try:
            if mend.fetch:
                self._fetch(mend, writer, deadline_s)
            if mend.targets:
                self._begin(mend, writer, deadline_s)
                return self._await(mend, deadline_s)
        except (EcckptError, OSError) as error:
            return f"rank {mend.header.shard.rank} at {mend.home}: {error}"
        return ""

    def _fetch(self, mend: Mend, writer: int, deadline_s: float) -> None:
        header = replace(mend.header, home=mend.home)
        left_s = max(1.0, deadline_s - time.monotonic())
        self._agents[mend.home].fetch(wire.Fetch(header, writer, mend.sources, 0, left_s))

    def _begin(self, mend: Mend, writer: int, deadline_s: float) -> None:
        """Have the home begin; an agent repairs one shard at a time, out of memory."""
        targets = tuple(
            wire.Target(index, node, self._agents[node].address)
            for index, node in mend.targets.items()
        )
        while True:
            left_s = max(1.0, deadline_s - time.monotonic())
            message = wire.Repair(mend.header.shard, writer, targets, 0, left_s)
            try:
                return self._agents[mend.home].repair(message)
            except NotHeld:
                if mend.fetch:
                    raise
                self._fetch(mend, writer, deadline_s)  # its home copy is on disk only
            except RequestRefused as error:
                if error.status != _BUSY or time.monotonic() >= deadline_s:
                    raise
                time.sleep(_LOOK_AGAIN_S)

    def _await(self, mend: Mend, deadline_s: float) -> str:
        shard = mend.header.shard
        waiting = dict(mend.targets)
        probe = wire.Probe(self._run, (shard,))
        while True:
            for index, node in mend.targets.items():
                if index in waiting and index in self._agents[node].probe(probe).held[0]:
                    del waiting[index]
            if not waiting:
                return ""
            if time.monotonic() >= deadline_s:
                left = ", ".join(f"{index} at {node}" for index, node in waiting.items())
                return f"rank {shard.rank}: not held in time: fragments {left}"
            time.sleep(_LOOK_AGAIN_S)

    def _look(self) -> RecoveryPlan:
        inventories = [agent.inventory(self._run) for agent in self._agents.values()]
        return plan_recovery(self._run, inventories)

    def _report(self, before: GenerationReport) -> GenerationReport:
        """The same generation again; as it was if a newer commit has taken its place."""
        for report in self._look().generations:
            if report.generation == before.generation:
                return report
        return before


def plan_mends(
    report: GenerationReport, nodes: Mapping[str, Node], addresses: Mapping[str, str]
) -> tuple[Mend, ...]:
    """What the shards of a generation need that are not as they should be. Pure.

    A shard that no node has whole comes to the node that was its home or, if that is gone, to one
    that has nothing of it, those with the fewest homes first; if there is none, it stays as it is.
    """
    homes = Counter(node for shard in report.shards for node in shard.homes)
    mends = []
    for shard in report.shards:
        if shard.header is None or shard.state == "lost":
            continue
        header = shard.header.at(HOME)
        taken = {node for at in shard.fragments.values() for node in at}
        free = sorted((node for node in nodes if node not in taken), key=lambda node: homes[node])
        if shard.homes:
            home = shard.homes[0]
        elif header.home in free:
            home = header.home
        elif free:
            home = free[0]
        else:
            continue
        homes[home] += not shard.homes
        targets = plan_repair(
            home=home,
            indices=header.n if len(nodes) > 1 else 0,
            present=shard.fragments,
            holders=_holders(header, home, nodes),
            nodes={node: nodes[node].domain for node in nodes if node not in shard.homes},
        )
        if targets or not shard.homes:
            sources = sources_of(shard, addresses)
            mends.append(Mend(header, home, not shard.homes, sources, targets))
    return tuple(mends)


def _holders(header: Header, home: str, nodes: Mapping[str, Node]) -> Sequence[str]:
    """Who would hold for that home if the run were started with these nodes; none if too few."""
    if len(nodes) < header.n + 1:
        return ()
    placement = plan_placement(nodes.values(), Code(header.k, header.m, header.n))
    return placement.holders[home]
