"""From a recovery plan to what one rank has to do: the decisions of a restore. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ecckpt import wire
from ecckpt.fragment import HOME, Header
from ecckpt.generation import Generation
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


class Refusals:
    """Generations that a restore passes over, with the reason: those that failed twice.

    Once is not enough: an agent that is being restarted, or a message that was late, must not cost
    the steps since the generation before.
    """

    def __init__(self) -> None:
        self.refused: dict[Generation, str] = {}
        self._failed: set[Generation] = set()

    def fail(self, generation: Generation, why: str) -> bool:
        """Some rank could not have its shard, or could not prove it; True if it is refused now."""
        if generation in self._failed:
            self.refused[generation] = why
        self._failed.add(generation)
        return generation in self.refused


def passes_over(plan: RecoveryPlan) -> bool:
    """Whether something newer than what is chosen (or anything, if nothing is) counts as lost."""
    if plan.chosen is None:
        return bool(plan.generations or plan.ruins)
    newer = [each for each in plan.generations if each.generation > plan.chosen.generation]
    return any(each.state == "lost" for each in newer)


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
    sources = []
    for index in range(header.n):
        copies = shard.homes if index < header.k else ()
        nodes = dict.fromkeys((*shard.fragments.get(index, ()), *copies))
        if nodes:
            sources.append(wire.Sources(index, tuple(address[node] for node in nodes)))
    missing = plan_repair(
        home=home,
        indices=header.n if placement.code.holders else 0,
        present=shard.fragments,
        holders=placement.holders[home],
        nodes=placement.holders,
    )
    targets = [wire.Target(index, node, address[node]) for index, node in missing.items()]
    return Way(replace(header, home=home), home in shard.homes, tuple(sources), tuple(targets))
