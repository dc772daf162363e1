"""Nodes and domains -> groups and holders. Pure.

Groups are fixed and disjoint: with fragments scattered over random nodes, some set of m + 2 nodes
would be fatal almost anywhere, with groups only those within one group are (the copyset argument,
Cidon et al., USENIX ATC 2013).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ecckpt.errors import DuplicateNode, InvalidCode, TooFewNodes

CodeSpec = str | tuple[int, int]

_SPELLING = re.compile(r"\s*([0-9]{1,9})\s*\+\s*([0-9]{1,9})\s*")


@dataclass(frozen=True, slots=True)
class Node:
    """A host as placement sees it: its id and what it fails together with."""

    id: str
    domain: str


@dataclass(frozen=True, slots=True)
class Code:
    """RS(k, m): k data and m parity fragments. ``holders`` is 0 for a single node."""

    k: int
    m: int
    holders: int

    def __str__(self) -> str:
        return f"RS({self.k}, {self.m})" if self.holders else "none"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which nodes hold the fragments of which home.

    ``holders[home]`` lists n nodes: entry i keeps fragment i of every shard of that home.
    ``nodes_survived`` and ``domains_survived`` are how many nodes (or whole domains) may be lost
    at once, whichever they are, with every shard still there.
    """

    code: Code
    groups: tuple[tuple[Node, ...], ...]
    holders: Mapping[str, tuple[str, ...]]
    nodes_survived: int
    domains_survived: int

    def ring(self, home: str) -> tuple[Node, ...]:
        """The other nodes of a home's group, in ring order: its holders, then those to spare."""
        group, at = self._places[home]
        return (*group[at + 1 :], *group[:at])

    @cached_property
    def domains(self) -> Mapping[str, str]:
        """The domain of every node, group by group."""
        return {node.id: node.domain for group in self.groups for node in group}

    @cached_property
    def _places(self) -> Mapping[str, tuple[tuple[Node, ...], int]]:
        return {node.id: (group, at) for group in self.groups for at, node in enumerate(group)}

    def promise(self) -> str:
        """One sentence for people: what may be lost."""
        if not self.code.holders:
            return "survives process crashes only: one node, no redundancy"
        nodes = f"survives any {self.nodes_survived} node{'s'[: self.nodes_survived > 1]}"
        if self.domains_survived:
            return (
                f"{nodes} or any {self.domains_survived} domain{'s'[: self.domains_survived > 1]}"
            )
        return f"{nodes}; losing one whole domain can lose a shard: too few domains"


def parse_code(spec: CodeSpec, node_count: int) -> Code:
    """The code that ``spec`` asks for, on that many nodes.

    ``spec`` is ``"auto"``, ``(k, m)`` or ``"k+m"``. Raises ``InvalidCode`` for anything else and
    for k + m > 256, ``TooFewNodes`` when there are fewer than k + m + 1 nodes.
    """
    if spec == "auto":
        return _auto_code(node_count)
    k, m = _numbers(spec)
    if k < 1 or m < 0 or k + m > 256:
        raise InvalidCode(
            f"code {spec!r}: k={k} and m={m} cannot be used", hint="k >= 1, m >= 0, k + m <= 256"
        )
    if node_count < k + m + 1:
        raise TooFewNodes(have=node_count, need=k + m + 1, code=f"RS({k}, {m})")
    return Code(k, m, holders=k + m)


def _numbers(spec: object) -> tuple[int, int]:
    parts: Sequence[object] = ()
    if isinstance(spec, str) and (spelled := _SPELLING.fullmatch(spec)):
        parts = [int(part) for part in spelled.groups()]
    elif isinstance(spec, (tuple, list)):
        parts = spec
    match parts:
        case [int(k), int(m)] if not isinstance(k, bool) and not isinstance(m, bool):
            return k, m
    raise InvalidCode(f"code {spec!r} is not understood", hint='"auto", "8+2" or (8, 2)')


def _auto_code(node_count: int) -> Code:
    if node_count <= 1:
        return Code(1, 0, holders=0)
    m = min(2, (node_count - 1) // 2)
    k = min(8, node_count - 1 - m)
    return Code(k, m, holders=k + m)


def plan_placement(nodes: Iterable[Node], code: Code) -> Placement:
    """Groups and holders for these nodes: the same on every rank, whatever the order given.

    Raises ``DuplicateNode`` and, where an explicit code needs more nodes, ``TooFewNodes``.
    """
    ordered = sorted(nodes, key=lambda node: (node.domain, node.id))
    for node, count in Counter(node.id for node in ordered).items():
        if count > 1:
            raise DuplicateNode(node, [f"{count} entries of the node list"])
    if not code.holders:
        return Placement(
            code=code,
            groups=(tuple(ordered),),
            holders={node.id: () for node in ordered},
            nodes_survived=0,
            domains_survived=0,
        )
    if len(ordered) < code.holders + 1:
        raise TooFewNodes(have=len(ordered), need=code.holders + 1, code=str(code))
    groups = _deal(ordered, len(ordered) // (code.holders + 1))
    holders = {
        node.id: tuple(_ring(group, at, code.holders))
        for group in groups
        for at, node in enumerate(group)
    }
    crowd = max(max(Counter(node.domain for node in group).values()) for group in groups)
    survived = code.m + 1
    return Placement(
        code=code,
        groups=groups,
        holders=holders,
        nodes_survived=survived,
        domains_survived=survived // crowd,
    )


def _deal(ordered: Sequence[Node], group_count: int) -> tuple[tuple[Node, ...], ...]:
    """Deal nodes like cards, domain by domain, so that every group gets its even share of each."""
    hands: list[list[Node]] = [[] for _ in range(group_count)]
    for at, node in enumerate(ordered):
        hands[at % group_count].append(node)
    return tuple(tuple(_interleave(hand)) for hand in hands)


def _interleave(group: Sequence[Node]) -> list[Node]:
    """Order a ring so that neighbours are of different domains as long as there are several."""
    seen: Counter[str] = Counter()
    turns: dict[int, list[Node]] = defaultdict(list)
    for node in group:
        turns[seen[node.domain]].append(node)
        seen[node.domain] += 1
    return [node for turn in sorted(turns) for node in turns[turn]]


def _ring(group: Sequence[Node], at: int, count: int) -> list[str]:
    return [group[(at + step) % len(group)].id for step in range(1, count + 1)]


def plan_repair(
    *,
    home: str,
    indices: int,
    present: Mapping[int, Iterable[str]],
    holders: Sequence[str],
    nodes: Mapping[str, str],
    near: Iterable[str] = (),
) -> dict[int, str]:
    """Where the fragments that a shard lacks should go: index -> node.

    ``present`` says which living nodes have which fragment, ``nodes`` maps those that could take
    one to their domains, the preferred first; those that are ``near`` come before all others. A
    missing fragment goes to its regular holder if that node has none of this shard yet, else to
    another node that has none, of a domain with the least of the shard. What finds no node is left
    out: two fragments on one node would not add a node's worth of margin.
    """
    taken = {node for at in present.values() for node in at} | {home}
    missing = [index for index in range(indices) if not present.get(index)]
    plan = {
        index: holders[index]
        for index in missing
        if index < len(holders) and holders[index] in nodes and holders[index] not in taken
    }
    strays = [index for index in missing if index not in plan]
    if not strays:
        return plan
    taken.update(plan.values())
    free = [node for node in dict.fromkeys((*holders, *near, *nodes)) if node in nodes]
    free = [node for node in free if node not in taken]
    crowd = Counter(nodes[node] for node in taken if node in nodes)
    for index in strays[: len(free)]:
        plan[index] = min(free, key=lambda node: crowd[nodes[node]])
        free.remove(plan[index])
        crowd[nodes[plan[index]]] += 1
    return plan
