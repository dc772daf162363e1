"""From inventories to a ``RecoveryPlan``: what survives, and which generation to restore. Pure.

The plan is a value. It can be printed, asked what would be left without some nodes (leave their
inventories out), and tested over every pattern of loss. Files that no inventory lists may still
exist on a node that did not answer, so nothing is deleted because of a plan. Used by restores, by
the tools of client/admin and by the CLI.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, repeat
from operator import attrgetter

from ecckpt.errors import TwoHistories
from ecckpt.format.fragment_file import HOME, Header
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation, is_run
from ecckpt.policy.rollbacks import RollBack, abandoned_by, in_force


class Survival(StrEnum):
    """How well a shard, or the generation that it belongs to, has survived.

    ``COMPLETE``: a home copy and every fragment are there. ``RECOVERABLE``: some of them are
    missing, and the rest suffices. ``LOST``: the rest does not suffice.
    """

    COMPLETE = "complete"
    RECOVERABLE = "recoverable"
    LOST = "lost"


UNREADABLE_DISK = "disk"
"""Key in ``rejected`` for a disk that cannot be used at all."""

UNREAD_DISK = "disk, for now"
"""Key in ``rejected`` for a disk that the agent is still reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What one agent holds of one run: ``headers`` of files in memory, and of files on ``disk``.

    ``stored`` are the generations, oldest first, that the agent was told are on disk everywhere and
    kept. ``rejected`` maps the name of a file that was not adopted to the reason.
    """

    node: str
    headers: Headers
    disk: Headers
    stored: tuple[Generation, ...]
    committed: Generation | None
    fence: int
    roll_backs: tuple[RollBack, ...]
    rejected: Mapping[str, str]

    @property
    def awaits_disk(self) -> bool:
        """Whether files may be on the disk that are not listed, because it is still being read."""
        return UNREAD_DISK in self.rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """What is left of one shard.

    ``margin`` is how many more node losses it survives, whichever nodes they are; -1 if it is lost.
    ``header`` has the index of a home copy; it is None if nothing was found. ``fragments`` maps an
    index to the nodes that have the fragment; ``homes`` are the nodes with a home copy.
    """

    rank: int
    state: Survival
    margin: int
    header: Header | None
    homes: tuple[str, ...]
    fragments: Mapping[int, tuple[str, ...]]

    def why(self) -> str:
        """One clause for people: what was found."""
        if self.header is None:
            return f"rank {self.rank}: nothing of it was found"
        have, need = len(self.fragments), self.header.k
        return f"rank {self.rank}: {have} of {need} needed fragments, {len(self.homes)} home copies"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationReport:
    """One generation, as bad as its worst shard. ``abandoned``: the roll-back that abandons it."""

    generation: Generation
    parent: Generation | None
    world_size: int
    state: Survival
    margin: int
    shards: tuple[ShardReport, ...]
    abandoned: RollBack | None

    def why(self) -> str:
        """Why it is not restored, or only by name; empty if a restart may choose it."""
        lost = [shard for shard in self.shards if shard.state is Survival.LOST]
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        if lost:
            some = "; ".join(shard.why() for shard in lost[:4])
            return f"{len(lost)} of {self.world_size} shards lost: {some}{more}"
        if self.abandoned:
            return (
                f"left by going back to {self.abandoned.target} on timeline "
                f'{self.abandoned.timeline}; restore(generation="{self.generation}") takes it'
            )
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPlan:
    """All generations of a run with a trace, newest first, and the one that is ``chosen``.

    ``ruins`` are traces that belong to no generation here. They show that something existed, so an
    empty plan with ruins does not prove a first start. ``vanished`` are generations that agents
    were told of as committed, and that no file was found of.
    """

    run: str
    generations: tuple[GenerationReport, ...]
    chosen: GenerationReport | None
    newest_timeline: int
    refused: frozenset[Generation]
    ruins: Mapping[str, str]
    roll_backs: tuple[RollBack, ...]
    vanished: Mapping[Generation, str]

    def rejected(self) -> dict[str, str]:
        """Generations newer than the chosen one that were not chosen -> why."""
        reasons = {
            report.generation: report.why() or "refused"
            for report in self.generations
            if report.why() or report.generation in self.refused
        }
        reasons |= self.vanished
        return {
            str(generation): why
            for generation, why in sorted(reasons.items(), reverse=True)
            if self.chosen is None or generation > self.chosen.generation
        }


def plan_recovery(
    run: str,
    inventories: Iterable[Inventory],
    *,
    step: int | None = None,
    generation: Generation | None = None,
    refused: Collection[Generation] = (),
) -> RecoveryPlan:
    """Classify every generation of ``run``, and choose the newest that all shards survive in.

    A generation that a roll-back abandons is chosen only by name: by ``generation``, or by ``step``
    (the newest timeline with that step, preferably one that is not abandoned). ``refused`` are
    generations that were tried and failed.

    Raises ``TwoHistories`` if files of several runs are there that ``run`` may mean.
    """
    inventories = list(inventories)
    found = _found(run, inventories)
    newest_timeline = 0
    for inventory in inventories:
        newest_timeline = max(newest_timeline, inventory.fence)
        if inventory.committed:
            newest_timeline = max(newest_timeline, inventory.committed.timeline)
    roll_backs = in_force(each for inventory in inventories for each in inventory.roll_backs)
    reports = tuple(
        _report(each, found[each], abandoned_by(each, roll_backs))
        for each in sorted(found, reverse=True)
    )
    if reports:
        newest_timeline = max(newest_timeline, reports[0].generation.timeline)
    if roll_backs:
        newest_timeline = max(newest_timeline, roll_backs[0].timeline)
    candidates = [
        report
        for report in reports
        if report.state is not Survival.LOST
        and report.generation not in refused
        and step in (None, report.generation.step)
        and generation in (None, report.generation)
    ]
    chosen = next((report for report in candidates if not report.abandoned), None)
    if chosen is None and candidates and (step is not None or generation is not None):
        chosen = candidates[0]
    return RecoveryPlan(
        run=run,
        generations=reports,
        chosen=chosen,
        newest_timeline=newest_timeline,
        refused=frozenset(refused),
        ruins=_ruins(inventories, found),
        roll_backs=roll_backs,
        vanished=_vanished(inventories, found, roll_backs),
    )


def _vanished(
    inventories: Iterable[Inventory],
    found: Collection[Generation],
    roll_backs: tuple[RollBack, ...],
) -> dict[Generation, str]:
    vanished: dict[Generation, str] = {}
    for inventory in inventories:
        generation = inventory.committed
        if generation is None or generation in found or abandoned_by(generation, roll_backs):
            continue
        why = f"it was committed, as {inventory.node} was told, and nothing of it was found"
        vanished.setdefault(generation, why)
    return vanished


def _ruins(inventories: Iterable[Inventory], found: Collection[Generation]) -> dict[str, str]:
    ruins: dict[str, str] = {}
    inventories = list(inventories)
    # A run leaves traces on several nodes. Disks that cannot be read hide a run only if no disk can
    # be read.
    hidden = all(UNREADABLE_DISK in inventory.rejected for inventory in inventories)
    for inventory in inventories:
        for name, why in inventory.rejected.items():
            if name == UNREADABLE_DISK and not hidden:
                continue
            ruins[f"{inventory.node}/{name}"] = why
    return ruins


_Piece = tuple[int, tuple[str, ...]]
"""The index of a file, and a tuple of the one node that has it."""

_Found = list[tuple[Header, list[_Piece]]]
"""The headers found of one shard, each with its files; usually there is one header."""


def _found(run: str, inventories: list[Inventory]) -> dict[Generation, dict[int, _Found]]:
    """Generation -> rank -> what was found of the shard, in the order of the nodes' names."""
    # Files of a shard mostly share one header object (format/header_columns.py). Grouped by
    # identity, each object is looked at once; the inventories of a large run list hundreds of
    # thousands of files.
    headers: dict[int, Header] = {}
    pieces: dict[int, list[_Piece]] = defaultdict(list)
    for inventory in sorted(inventories, key=attrgetter("node")):
        node = (inventory.node,)
        for files in (inventory.headers, inventory.disk):
            keys = tuple(map(id, files.shards))
            headers.update(zip(keys, files.shards, strict=True))
            for key, piece in zip(keys, zip(files.indices, repeat(node)), strict=True):
                pieces[key].append(piece)
    found: dict[Generation, dict[int, _Found]] = defaultdict(lambda: defaultdict(list))
    names = {header.shard.run for header in headers.values()}
    names = {name for name in names if is_run(name, run)}
    if len(names) > 1:
        raise TwoHistories(run, {name: _nodes_of(name, inventories) for name in names})
    for key, header in headers.items():
        if header.shard.run in names:
            found[header.shard.generation][header.shard.rank].append((header, pieces[key]))
    return found


def _nodes_of(run: str, inventories: Iterable[Inventory]) -> str:
    return "nodes " + ", ".join(
        each.node
        for each in inventories
        if any(header.shard.run == run for header in chain(each.headers, each.disk))
    )


def _report(
    generation: Generation, ranks: Mapping[int, _Found], abandoned: RollBack | None
) -> GenerationReport:
    sample = next(header for found in ranks.values() for header, _ in found)
    shards = tuple([_shard(rank, ranks.get(rank, [])) for rank in range(sample.world_size)])
    return GenerationReport(
        generation=generation,
        parent=sample.parent,
        world_size=sample.world_size,
        state=_worst({shard.state for shard in shards}),
        margin=min(shard.margin for shard in shards),
        shards=shards,
        abandoned=abandoned,
    )


def _worst(states: Collection[Survival]) -> Survival:
    if Survival.LOST in states:
        return Survival.LOST
    return Survival.RECOVERABLE if Survival.RECOVERABLE in states else Survival.COMPLETE


def _shard(rank: int, found: _Found) -> ShardReport:
    if not found:
        return ShardReport(
            rank=rank, state=Survival.LOST, margin=-1, header=None, homes=(), fragments={}
        )
    header, pieces = found[0] if len(found) == 1 else _agreed(found)
    fragments = dict(sorted(pieces))
    if len(fragments) < len(pieces):
        fragments = _places(pieces)
    homes = fragments.pop(HOME, ())
    margin = margin_of(header.k, homes, fragments)
    if margin < 0:
        state = Survival.LOST
    elif homes and len(fragments) == header.n:
        state = Survival.COMPLETE
    else:
        state = Survival.RECOVERABLE
    return ShardReport(
        rank=rank, state=state, margin=margin, header=header, homes=homes, fragments=fragments
    )


def _places(pieces: Iterable[_Piece]) -> dict[int, tuple[str, ...]]:
    """Index -> nodes, each once: a node's copies in memory and on disk are lost together."""
    nodes: dict[int, tuple[str, ...]] = {}
    for index, node in sorted(set(pieces)):
        nodes[index] = nodes.get(index, ()) + node
    return nodes


def _agreed(found: _Found) -> tuple[Header, list[_Piece]]:
    """The header of a shard, and its files.

    Files whose headers disagree on the shape of the shard are never mixed: the shape of most files
    wins.
    """
    alike: _Found = []
    for header, pieces in found:
        same = next((others for known, others in alike if known == header), None)
        if same is None:
            alike.append((header, pieces[:]))
        else:
            same += pieces
    if len(alike) == 1:
        return alike[0]
    files: Counter[_Shape] = Counter()
    for header, pieces in alike:
        files[_shape(header)] += len(set(pieces))
    shape = max(files, key=lambda key: (files[key], key))
    kept = [each for each in alike if _shape(each[0]) == shape]
    return kept[0][0], [piece for _, pieces in kept for piece in pieces]


_Shape = tuple[int, int, int, int]


def _shape(header: Header) -> _Shape:
    return header.k, header.m, header.shard_bytes, header.block_bytes


def margin_of(k: int, homes: Collection[str], fragments: Mapping[int, Collection[str]]) -> int:
    """Node losses that the shard survives, whichever nodes they are; never too many.

    To lose the shard, all homes must go, and then fragments until k - 1 are left. The cheapest are
    those with the fewest copies; a node that is lost takes along no more copies than it holds. The
    result is exact while no fragment has copies.
    """
    holders = [node for at in fragments.values() for node in at]
    if len(holders) == len(fragments) == len({*homes, *holders}) - len(homes) and all(
        fragments.values()
    ):  # the common case, quickly recognised: no copies, and no node with two pieces
        return len(homes) + max(0, len(fragments) - k + 1) - 1
    lost = set(homes)
    left = [nodes for at in fragments.values() if (nodes := set(at) - lost)]
    copies = sorted(len(nodes) for nodes in left)
    must_go = sum(copies[: max(0, len(copies) - k + 1)])
    removed = len(lost)
    for load in sorted(Counter(chain.from_iterable(left)).values(), reverse=True):
        if must_go <= 0:
            break
        must_go -= load
        removed += 1
    return removed - 1


@dataclass(frozen=True, slots=True)
class ShardSources:
    """Which nodes have a home copy of a shard, and which hold its fragments."""

    header: Header
    homes: tuple[str, ...]
    fragments: Mapping[int, tuple[str, ...]]


def sources_of(chosen: GenerationReport) -> tuple[ShardSources, ...]:
    """The sources of the shards of a generation that can be restored, in the order of ranks."""
    return tuple(
        ShardSources(shard.header, shard.homes, shard.fragments)
        for shard in chosen.shards
        if shard.header is not None  # true for every shard of a chosen generation
    )
