"""From a recovery plan to what one rank has to do: the decisions of a restore. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ecckpt import wire
from ecckpt.fragment import HOME, Header
from ecckpt.placement import Placement, plan_repair
from ecckpt.recovery import RecoveryPlan, ShardReport


@dataclass(frozen=True, slots=True)
class Way:
    """How a shard comes to a home: ``local`` if it is there, else from these sources.

    ``repair`` are the fragments to make again afterwards.
    """

    header: Header
    local: bool
    sources: tuple[wire.Sources, ...]
    repair: tuple[wire.Target, ...]


def next_timeline(found: RecoveryPlan, after: int) -> int:
    """The timeline of a restore: above all that were found.

    And above ``after``, the one that this session has had: where all agents forgot, its saves are
    still counted in the store, and a save of the same name would be taken for one of them.
    """
    return max(found.newest_timeline, after) + 1


def way_home(
    shard: ShardReport, home: str, placement: Placement, address: Mapping[str, str]
) -> Way:
    """How a shard that is not lost comes to its rank's node; ``address`` is each node's."""
    assert shard.header is not None
    header = shard.header.at(HOME)
    missing: Mapping[int, str] = {}
    if placement.code.holders and len(shard.fragments) < header.n:
        missing = plan_repair(
            home=home,
            indices=header.n,
            present=shard.fragments,
            holders=placement.holders[home],
            nodes=_nearest(placement, home),
        )
    targets = [wire.Target(index, node, address[node]) for index, node in missing.items()]
    local, sources = home in shard.homes, sources_of(shard, address)
    return Way(replace(header, home=home), local, sources, tuple(targets))


def sources_of(shard: ShardReport, address: Mapping[str, str]) -> tuple[wire.Sources, ...]:
    """Where what is left of a shard can be pulled from; data fragments also out of home copies."""
    assert shard.header is not None
    sources = []
    for index in range(shard.header.n):
        copies = shard.homes if index < shard.header.k else ()
        nodes = dict.fromkeys((*shard.fragments.get(index, ()), *copies))
        if nodes:
            sources.append(wire.Sources(index, tuple(address[node] for node in nodes)))
    return tuple(sources)


def guard_of(
    run: str,
    home: str,
    placement: Placement,
    address: Mapping[str, str],
    *,
    writer: int,
    local_ranks: int,
    memory_bytes: int,
    timeout_s: float,
) -> wire.Guard:
    """Whom a home's agent shall watch; ``address`` is each node's."""
    ring = placement.ring(home) if placement.code.holders else ()
    return wire.Guard(
        run=run,
        writer=writer,
        members=tuple(wire.Member(each.id, each.domain, address[each.id]) for each in ring),
        holders=placement.code.holders,
        local_ranks=local_ranks,
        memory_bytes=memory_bytes,
        timeout_s=timeout_s,
    )


def _nearest(placement: Placement, home: str) -> dict[str, str]:
    """All nodes with their domains: the home's own group first, so that losses stay within it."""
    others = (node for group in placement.groups for node in group)
    return {node.id: node.domain for node in (*placement.ring(home), *others)}
