"""The decisions of a restore: from a recovery plan to orders for all ranks, and a verdict.

Pure: no I/O, no clock. Rank 0 (client/restore/coordinator.py) plans, makes the orders and judges
the outcomes. Every rank (client/restore/restorer.py) carries out its order. ``Order`` and
``Outcome`` travel between ranks as messages, by field name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ecckpt.errors import NoRoomToRestore, StateMismatch
from ecckpt.format.fragment_file import HOME, Header
from ecckpt.format.ids import Generation
from ecckpt.policy.placement import Placement, plan_repair
from ecckpt.policy.rollbacks import abandoned_by
from ecckpt.policy.survival import Inventory, RecoveryPlan, ShardReport, ShardSources, sources_of
from ecckpt.protocol.messages.restore import Sources
from ecckpt.protocol.messages.save import Target


@dataclass(frozen=True, slots=True)
class Way:
    """How one shard gets to the node where its rank runs now.

    Attributes:
        local: that node has a whole copy, so nothing needs to be pulled.
        sources: fragment index -> addresses of the agents that have the fragment.
        repair: the fragments to make again after the restore, with their new holders.
    """

    header: Header
    local: bool
    sources: Mapping[int, tuple[str, ...]]
    repair: tuple[Target, ...]


def passes_over(plan: RecoveryPlan) -> bool:
    """Whether a newer generation than the chosen one counts as lost.

    If none was chosen: whether there is any trace of a generation.
    """
    if plan.chosen is None:
        return bool(plan.generations or plan.ruins or plan.vanished)
    newest = plan.chosen.generation
    newer = [report for report in plan.generations if report.generation > newest]
    return any(report.state == "lost" for report in newer) or any(
        generation > newest for generation in plan.vanished
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller of a restore asked for by name. With neither field: the newest generation."""

    step: int | None = None
    generation: Generation | None = None

    @property
    def named(self) -> bool:
        """Whether the caller named a generation or a step.

        Such a restore is recorded as a roll-back, and later restarts do not go beyond it by
        themselves.
        """
        return self.step is not None or self.generation is not None

    @property
    def hint(self) -> str:
        """What the user can do if the restore fails."""
        if not self.named:
            return (
                "bring the nodes and disks back that are named here, and look at ecckpt "
                "plan-restore; only if all of it is lost, start from scratch under another name"
            )
        what = f"generation {self.generation}" if self.generation else f"step {self.step}"
        return f"{what} was asked for; ecckpt plan-restore lists what there is"


def likely_home(inventory: Inventory, wanted: Wanted, *, rank: int, ranks: int) -> Header | None:
    """The home copy that rank 0 will most likely order this rank to load; None without one.

    A rank verifies it ahead, while rank 0 still plans. It is the newest home copy of this rank that
    fits what was asked for. Only rank 0 knows what other nodes have, so the order may be another.
    """
    candidates = [
        header
        for header in inventory.headers
        if header.index == HOME
        and (header.shard.rank, header.world_size) == (rank, ranks)
        and wanted.step in (None, header.shard.generation.step)
        and wanted.generation in (None, header.shard.generation)
        and (wanted.named or not abandoned_by(header.shard.generation, inventory.roll_backs))
    ]
    return max(candidates, key=lambda header: header.shard.generation, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What rank 0 orders one rank to do: get the shard of ``header`` from ``sources``.

    ``header`` is None if nothing can be restored. If ``shards`` is not empty, the rank makes a new
    shard from all of these. ``header`` is then the rank's own one of them or, if another number of
    ranks saved, the first.

    Attributes:
        local: the rank's node has a whole copy of the shard.
        sources: fragment index -> addresses of the agents that have the fragment.
        repair: the fragments to make again after the restore, with their new holders.
        margin: how many more node losses the shard survives; -1 if nothing can be restored.
        rejected: generation, file or node -> why the restore passes over it, for messages.
        witnesses: rank -> a shard that it gathers and drops, because a rank on another node could
            not bring it. What is here for other ranks is not for this one.
    """

    timeline: int
    header: Header | None
    local: bool
    sources: Mapping[int, tuple[str, ...]]
    repair: tuple[Target, ...]
    margin: int
    rejected: Mapping[str, str]
    shards: tuple[ShardSources, ...]
    witnesses: Mapping[int, ShardSources]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rank's order.

    Attributes:
        kind: "ok"; "bad" if the bytes could not be had or verified; "room" if there is no memory
            for them; "mismatch" if they do not fit the state; "relaid" if they do, but DTensors are
            cut in another way than they were saved.
        text: the reason, for the error message; empty for "ok".
        lacks: the saved shard, by its rank, that could not be had or proven; -1: none or unknown.
        witnessed: the saved shard, by its rank, that this rank gathered as a witness; -1 if none.
    """

    kind: str
    text: str
    lacks: int = -1
    witnessed: int = -1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from the outcomes of all ranks.

    Attributes:
        go: all ranks load.
        failed: why some rank could not get its shard; empty if all could.
        relaid: every rank has to make its shard anew, from all shards.
    """

    go: bool
    failed: str
    relaid: bool


def judge(outcomes: Sequence[Outcome]) -> Verdict:
    """Decide from the outcomes of all ranks whether all may load.

    Raises ``StateMismatch`` if the shard does not fit the state of some rank, and
    ``NoRoomToRestore`` if a node has no memory for it. Neither leads to an older generation, which
    would not fit better and would need as much memory.
    """
    mismatches = [outcome.text for outcome in outcomes if outcome.kind == "mismatch"]
    if mismatches:
        raise StateMismatch(mismatches)
    room = [outcome.text for outcome in outcomes if outcome.kind == "room"]
    if room:
        raise NoRoomToRestore("; ".join(room[:4]))
    bad = [outcome.text for outcome in outcomes if outcome.kind == "bad"]
    relaid = any(outcome.kind == "relaid" for outcome in outcomes)
    # Four reasons are enough for a message; a partition can produce one per rank.
    return Verdict(not bad and not relaid, "; ".join(bad[:4]), relaid)


@dataclass(frozen=True, slots=True)
class Ground:
    """What the orders depend on beside the recovery plan.

    Attributes:
        timeline: the one that this restore begins.
        homes: the node of each rank.
        address: of each node's agent.
    """

    timeline: int
    homes: Sequence[str]
    placement: Placement
    address: Mapping[str, str]


def orders(
    plan: RecoveryPlan,
    ground: Ground,
    rejected: Mapping[str, str],
    *,
    alike: bool,
    relaid: bool,
    witnesses: Mapping[int, int],
) -> list[Order]:
    """Make the order for each rank; ``witnesses`` are from ``Refusals``.

    If as many ranks restore as saved, each gets its own shard and re-makes the lost fragments of
    it; with ``relaid`` it then makes another shard from all of them. If another number saved, or
    with ``alike``, all orders are the same and consist of all shards.
    """
    ranks, chosen = len(ground.homes), plan.chosen
    if chosen is None:
        return [_shared_order(ground, None, -1, rejected, ())] * ranks
    saved = sources_of(chosen)
    gathered = {rank: saved[shard] for rank, shard in witnesses.items()}
    if alike or chosen.world_size != ranks:
        order = _shared_order(ground, saved[0].header, chosen.margin, rejected, saved)
        return [replace(order, witnesses=gathered)] * ranks
    shards = saved if relaid else ()
    own = [_own_order(shard, ground, rejected, shards) for shard in chosen.shards]
    for rank, sources in gathered.items():
        own[rank] = replace(own[rank], witnesses={rank: sources})
    return own


def _shared_order(
    ground: Ground,
    header: Header | None,
    margin: int,
    rejected: Mapping[str, str],
    shards: tuple[ShardSources, ...],
) -> Order:
    """The order that all ranks get alike. Nothing is pulled to a home or repaired with it."""
    return Order(
        timeline=ground.timeline,
        header=header,
        local=False,
        sources={},
        repair=(),
        margin=margin,
        rejected=rejected,
        shards=shards,
        witnesses={},
    )


def _own_order(
    shard: ShardReport,
    ground: Ground,
    rejected: Mapping[str, str],
    shards: tuple[ShardSources, ...],
) -> Order:
    way = way_home(shard, ground.homes[shard.rank], ground.placement, ground.address)
    return Order(
        timeline=ground.timeline,
        header=way.header,
        local=way.local,
        sources=way.sources,
        repair=way.repair,
        margin=shard.margin,
        rejected=rejected,
        shards=shards,
        witnesses={},
    )


def way_home(
    shard: ShardReport, home: str, placement: Placement, address: Mapping[str, str]
) -> Way:
    """How a shard that is not lost gets to ``home``; ``address`` maps nodes to addresses.

    For each data fragment the nodes with a whole copy are sources too, after those that hold the
    fragment.
    """
    assert shard.header is not None
    header = shard.header
    if header.home != home:  # the rank has moved since the save
        header = replace(header, home=home)
    sources = {}
    for index in range(header.n):
        nodes = shard.fragments.get(index, ())
        if index < header.k:
            nodes += tuple([node for node in shard.homes if node not in nodes])
        if nodes:
            sources[index] = tuple([address[node] for node in nodes])
    missing: Mapping[int, str] = {}
    if placement.code.holders and len(shard.fragments) < header.n:
        missing = plan_repair(
            home=home,
            indices=header.n,
            present=shard.fragments,
            holders=placement.holders[home],
            nodes=placement.domains,
            # The own group first, so that a shard depends on one group as far as possible.
            near=(node.id for node in placement.ring(home)),
        )
    targets = tuple([Target(index, node, address[node]) for index, node in missing.items()])
    return Way(header, home in shard.homes, sources, targets)


def as_told(sources: Mapping[int, tuple[str, ...]]) -> tuple[Sources, ...]:
    """The sources of a way or an order, as the messages to an agent have them."""
    return tuple(Sources(index, addresses) for index, addresses in sources.items())
