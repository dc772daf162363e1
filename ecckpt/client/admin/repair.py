"""``ecckpt repair``: rebuilds lost fragments of a run while no training runs.

A restart repairs the generation that it restores. An operator can do the same without a restart,
after nodes were replaced, so that the run has its full margin again before the next loss.

    inventories -> recovery plan (the generation that a restart would take) -> placement
    -> one Repair request per incomplete shard, to a node that has it or decodes it
    -> poll the inventories until all wanted fragments are held
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ecckpt.client.restore.protocol import Way, as_told, way_home
from ecckpt.errors import EcckptError, NothingToRestore, TooFewNodes
from ecckpt.format.ids import Generation, RunWriter
from ecckpt.policy.placement import Code, Node, Placement, plan_placement
from ecckpt.policy.survival import (
    GenerationReport,
    Inventory,
    RecoveryPlan,
    ShardReport,
    plan_recovery,
)
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.fan_out import call_each
from ecckpt.protocol.messages.node import NodeInfo
from ecckpt.protocol.messages.repair import Repair
from ecckpt.protocol.verbs import INVENTORY, REPAIR

_PARALLEL_REPAIRS = 8  # a Repair request blocks for as long as its node decodes
_POLL_S = 0.2  # agents do not report; an inventory takes milliseconds
_NO_PROGRESS_S = 15.0  # give up if no further fragment arrives for so long: holders pull at once


# The names of the fields are keys of `ecckpt repair --json`.
@dataclass(slots=True, kw_only=True)
class Repaired:
    """The result of a repair.

    Attributes:
        generation: the repaired generation, which a restart would take.
        fragments: number of fragments that were missing.
        homes: number of shards that had to be decoded for that.
        margin_before: number of further node losses that the generation survived before.
        steps: what was planned, a line per shard.
        margin: number of further node losses that it survives afterwards.
        complete: whether no part of it is missing.
        problems: errors of requests, and fragments that are still missing.
    """

    generation: Generation
    fragments: int
    homes: int
    margin_before: int
    steps: tuple[str, ...]
    margin: int = -1
    complete: bool = False
    problems: list[str] = field(default_factory=list)


def repair_run(
    run: str,
    agents: Sequence[AgentClient],
    *,
    memory_bytes: int = 0,
    timeout_s: float = 600.0,
    dry_run: bool = False,
) -> Repaired:
    """Rebuild the missing fragments of the generation that a restart would take.

    For each shard, a node that has it (or else decodes it) encodes the missing fragments, and their
    holders pull them.

    Args:
        run: name of the run.
        agents: of all nodes that exist now, replacements included.
        memory_bytes: the run's budget on a node; 0: the agents' default.
        timeout_s: limit of the whole repair.
        dry_run: only plan.

    Raises:
        NothingToRestore: no generation can be rebuilt.
        AgentUnreachable: an agent does not answer. The repair would make a second copy of its
            fragments on other nodes.
    """
    infos = call_each(agents, AgentClient.node)
    nodes = {info.node: (info, agent) for info, agent in zip(infos, agents, strict=True)}
    clients = {node: agent for node, (_, agent) in nodes.items()}
    plan = plan_recovery(run, _inventories(run, clients))
    chosen = plan.chosen
    if chosen is None:
        raise NothingToRestore(run, plan.rejected() | dict(plan.ruins))
    placement = _placement(chosen, {node: info for node, (info, _) in nodes.items()})
    address = {node: info.address for node, (info, _) in nodes.items()}
    ways = _ways(chosen, placement, address)
    done = Repaired(
        generation=chosen.generation,
        fragments=sum(len(way.repair) for _, way in ways),
        homes=sum(not way.local for _, way in ways),
        margin_before=chosen.margin,
        steps=tuple(_step(home, way) for home, way in ways),
    )
    if dry_run:
        done.margin, done.complete = chosen.margin, chosen.state == "complete"
        return done
    deadline_s = time.monotonic() + timeout_s

    _send_repairs(
        ways,
        clients,
        done,
        writer=RunWriter(plan.newest_timeline, ""),
        memory_bytes=memory_bytes,
        deadline_s=deadline_s,
    )
    wanted = {(way.header.shard.rank, target.index) for _, way in ways for target in way.repair}
    _wait_until_held(run, done, clients, wanted, deadline_s)
    return done


def _send_repairs(
    ways: Sequence[tuple[str, Way]],
    clients: Mapping[str, AgentClient],
    done: Repaired,
    *,
    writer: RunWriter,
    memory_bytes: int,
    deadline_s: float,
) -> None:
    """Send a Repair request for each shard, and wait for the answers; errors become problems."""

    def send_repair(job: tuple[str, Way]) -> None:
        home, way = job
        message = Repair(
            header=way.header,
            writer=writer,
            sources=as_told(way.sources),
            targets=way.repair,
            memory_bytes=memory_bytes,
            timeout_s=max(1.0, deadline_s - time.monotonic()),
        )
        try:
            clients[home].call(REPAIR, message)
        except (EcckptError, OSError) as error:
            done.problems.append(str(error))

    call_each(ways, send_repair, parallel=_PARALLEL_REPAIRS)


def _inventories(run: str, clients: Mapping[str, AgentClient]) -> list[Inventory]:
    return call_each(list(clients.values()), lambda client: client.call(INVENTORY, run))


def _placement(chosen: GenerationReport, infos: Mapping[str, NodeInfo]) -> Placement:
    """Plan which nodes hold each node's fragments.

    With fewer nodes than the code needs, all nodes form one group without assigned holders;
    ``way_home`` then takes any node that can hold another fragment.
    """
    sample = next(shard.header for shard in chosen.shards if shard.header is not None)
    code = Code(sample.k, sample.m, holders=sample.n)
    nodes = tuple(Node(node, info.domain) for node, info in infos.items())
    try:
        return plan_placement(nodes, code)
    except TooFewNodes:
        return Placement(
            code=code,
            groups=(nodes,),
            holders=dict.fromkeys(infos, ()),
            nodes_survived=0,
            domains_survived=0,
        )


def _ways(
    chosen: GenerationReport, placement: Placement, address: Mapping[str, str]
) -> list[tuple[str, Way]]:
    """Return (node, its task) for each shard that is not complete."""
    busy: Counter[str] = Counter()
    ways = []
    for shard in chosen.shards:
        if shard.state == "complete":
            continue
        home = _home(shard, address, busy)
        if home is None:
            continue
        way = way_home(shard, home, placement, address)
        if way.repair or not shard.homes:
            busy[home] += 1
            ways.append((home, way))
    return ways


def _step(home: str, way: Way) -> str:
    targets = ", ".join(f"fragment {target.index} to {target.node}" for target in way.repair)
    where = f"from {home}" if way.local else f"decoded at {home}"
    return f"rank {way.header.shard.rank}, {where}: {targets or 'no fragments'}"


def _home(shard: ShardReport, nodes: Mapping[str, str], busy: Counter[str]) -> str | None:
    """Choose the node that repairs a shard: one that has it, else its home, else the least busy.

    A node that has a fragment of the shard is not chosen to decode it: one loss would then cost two
    parts of the shard. None: there is no such node.
    """
    if shard.homes:
        return shard.homes[0]
    holders = {node for nodes_with in shard.fragments.values() for node in nodes_with}
    free = [node for node in nodes if node not in holders]
    assert shard.header is not None
    if shard.header.home in free:
        return shard.header.home
    return min(free, key=lambda node: (busy[node], node), default=None)


def _wait_until_held(
    run: str,
    done: Repaired,
    clients: Mapping[str, AgentClient],
    wanted: Collection[tuple[int, int]],
    deadline_s: float,
) -> None:
    """Poll until all wanted fragments (rank, index) are held, or no more of them arrive."""
    changed_s, known = time.monotonic(), -1
    while True:
        report = _report_of(plan_recovery(run, _inventories(run, clients)), done.generation)
        if report is None:
            done.problems.append("agents dropped it meanwhile: a newer generation was committed")
            return
        done.margin, done.complete = report.margin, report.state == "complete"
        held = {(shard.rank, index) for shard in report.shards for index in shard.fragments}
        now_s, left = time.monotonic(), len(set(wanted) - held)
        if left != known:
            changed_s, known = now_s, left
        if not left:
            return
        if now_s > min(deadline_s, changed_s + _NO_PROGRESS_S):
            done.problems.append(f"{left} fragments are not held yet")
            return
        time.sleep(_POLL_S)


def _report_of(plan: RecoveryPlan, generation: Generation) -> GenerationReport | None:
    return next((report for report in plan.generations if report.generation == generation), None)
