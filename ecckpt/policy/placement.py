"""Placement: from nodes and failure domains to groups and holders. Pure.

Groups are fixed and disjoint. If fragments were scattered over random nodes, almost any set of m +
2 lost nodes would lose some shard; with groups, only m + 2 nodes of one group do (the copyset
argument, Cidon et al., USENIX ATC 2013). Used by the client when it joins, by repairs, and by
simulations.
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
    """A node as placement sees it: its id, and the domain that it fails together with."""

    id: str
    domain: str


@dataclass(frozen=True, slots=True)
class Code:
    """RS(k, m): k data and m parity fragments. ``holders`` is k + m, or 0 for a single node."""

    k: int
    m: int
    holders: int

    def __str__(self) -> str:
        return f"RS({self.k}, {self.m})" if self.holders else "none"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which nodes hold the fragments of which home.

    ``holders[home]`` lists n nodes: entry i keeps fragment i of every shard of that home. Any
    ``nodes_survived`` nodes, or any ``domains_survived`` whole domains, may be lost at once, and
    every shard can still be restored.
    """

    code: Code
    groups: tuple[tuple[Node, ...], ...]
    holders: Mapping[str, tuple[str, ...]]
    nodes_survived: int
    domains_survived: int

    def ring(self, home: str) -> tuple[Node, ...]:
        """The other nodes of a home's group in ring order: its holders, then the spare nodes."""
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
    """The code that ``spec`` asks for on that many nodes.

    ``spec`` is ``"auto"``, ``(k, m)`` or ``"k+m"``. Raises ``InvalidCode`` for anything else and
    for k + m > 256, and ``TooFewNodes`` if there are fewer than k + m + 1 nodes.
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
    """Groups and holders for these nodes: the same on every rank, in whichever order they come.

    Raises ``DuplicateNode`` and, if an explicit code needs more nodes, ``TooFewNodes``.
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
    """Deal the nodes to the groups in turn, domain by domain: each group gets its share of each."""
    hands: list[list[Node]] = [[] for _ in range(group_count)]
    for at, node in enumerate(ordered):
        hands[at % group_count].append(node)
    return tuple(tuple(_interleave(hand)) for hand in hands)


def _interleave(group: Sequence[Node]) -> list[Node]:
    """Order a ring so that neighbours differ in domain while more than one domain is left."""
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

    ``present`` says which answering nodes have which fragment. ``nodes`` maps the nodes that could
    take one to their domains, the preferred first; nodes that are ``near`` come before all others.

    A missing fragment goes to its regular holder if that node can take one and has none of this
    shard. Otherwise it goes to another node that has none, in a domain with the fewest pieces of
    the shard. If no node is left, the fragment is not placed: a second fragment on a node adds
    nothing to the number of node losses that the shard survives.
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
