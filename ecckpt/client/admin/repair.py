"""Making lost fragments again while no training runs: what ``ecckpt repair`` does.

A restart repairs what it restores. This does the same for people: after nodes were replaced, before
or without a restart, so that the next loss finds the full margin.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ecckpt.client.restore.protocol import Way, as_told, way_home
from ecckpt.errors import EcckptError, NothingToRestore, TooFewNodes
from ecckpt.format.ids import Generation
from ecckpt.policy.placement import Code, Node, Placement, plan_placement
from ecckpt.policy.survival import (
    GenerationReport,
    Inventory,
    RecoveryPlan,
    ShardReport,
    plan_recovery,
)
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.node import NodeInfo
from ecckpt.protocol.messages.repair import Repair
from ecckpt.protocol.verbs import INVENTORY, REPAIR

_AT_ONCE = 8
_LOOK_S = 0.2
_PATIENCE_S = 15.0


@dataclass(slots=True)
class Repaired:
    """What was asked for and what came of it.

    ``fragments`` were to be made again, ``homes`` shards to be decoded for that. ``margin`` is how
    many more nodes the generation survives afterwards, ``complete`` whether nothing of it is
    missing. ``steps`` says what was to be done, shard by shard.
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
    """Make again what nodes lack of the generation that a restart would take.

    Every shard is encoded by a node that has it whole, or that decodes it first; the others pull
    what they shall hold. ``memory_bytes`` is the run's budget on a node (0: the agents' default).
    With ``dry_run`` nothing is done.
    Raises ``NothingToRestore`` if there is no such generation, and what the clients raise if an
    agent does not answer: what it holds would be made twice.
    """
    nodes = {info.node: (info, agent) for agent in agents for info in [agent.node()]}
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

    def ask(job: tuple[str, Way]) -> None:
        home, way = job
        message = Repair(
            header=way.header,
            writer=plan.newest_timeline,
            sources=as_told(way.sources),
            targets=way.repair,
            memory_bytes=memory_bytes,
            timeout_s=max(1.0, deadline_s - time.monotonic()),
        )
        try:
            clients[home].call(REPAIR, message)
        except (EcckptError, OSError) as error:
            done.problems.append(str(error))

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="repair") as pool:
        list(pool.map(ask, ways))
    wanted = {(way.header.shard.rank, target.index) for _, way in ways for target in way.repair}
    _await(run, done, clients, wanted, deadline_s)
    return done


def _inventories(run: str, clients: Mapping[str, AgentClient]) -> list[Inventory]:
    return [client.call(INVENTORY, run) for client in clients.values()]


def _placement(chosen: GenerationReport, infos: Mapping[str, NodeInfo]) -> Placement:
    """Who holds for whom; where there are too few nodes for the code, whoever has room."""
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
    """What is to be done, shard by shard, each with the node that does it."""
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
    """A node that has the whole shard, else the least busy one that has nothing of it."""
    if shard.homes:
        return shard.homes[0]
    holders = {node for at in shard.fragments.values() for node in at}
    free = [node for node in nodes if node not in holders]
    assert shard.header is not None
    if shard.header.home in free:
        return shard.header.home
    return min(free, key=lambda node: (busy[node], node), default=None)


def _await(
    run: str,
    done: Repaired,
    clients: Mapping[str, AgentClient],
    wanted: Collection[tuple[int, int]],
    deadline_s: float,
) -> None:
    """Look until all (rank, index) that are wanted are held, or nothing changes any more."""
    changed_s, known = time.monotonic(), -1
    while True:
        report = _report_of(plan_recovery(run, _inventories(run, clients)), done.generation)
        if report is None:
            done.problems.append("it went meanwhile: something newer was committed")
            return
        done.margin, done.complete = report.margin, report.state == "complete"
        held = {(shard.rank, index) for shard in report.shards for index in shard.fragments}
        now_s, left = time.monotonic(), len(set(wanted) - held)
        if left != known:
            changed_s, known = now_s, left
        if not left:
            return
        if now_s > min(deadline_s, changed_s + _PATIENCE_S):
            done.problems.append(f"{left} fragments are not held yet")
            return
        time.sleep(_LOOK_S)


def _report_of(plan: RecoveryPlan, generation: Generation) -> GenerationReport | None:
    return next((each for each in plan.generations if each.generation == generation), None)
