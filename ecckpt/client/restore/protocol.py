"""From a recovery plan to what one rank has to do: the decisions of a restore. Pure."""

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
    """How a shard comes to a home: ``local`` if it is there, else from these sources.

    ``sources`` maps a fragment's index to the addresses that have it, ``repair`` are the fragments
    to make again afterwards.
    """

    header: Header
    local: bool
    sources: Mapping[int, tuple[str, ...]]
    repair: tuple[Target, ...]


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a restore was asked for by name; neither: the newest."""

    step: int | None = None
    generation: Generation | None = None

    @property
    def named(self) -> bool:
        """Whether somebody chose: later restarts then do not go beyond it by themselves."""
        return self.step is not None or self.generation is not None

    @property
    def hint(self) -> str:
        """What to do where it cannot be had."""
        if not self.named:
            return "to start from scratch, give the run another name"
        what = f"generation {self.generation}" if self.generation else f"step {self.step}"
        return f"{what} was asked for; ecckpt plan-restore lists what there is"


def likely_home(inventory: Inventory, wanted: Wanted, *, rank: int, ranks: int) -> Header | None:
    """The home copy of this node that the rank will most likely be told to load, if there is one.

    The newest of its own that fits what was asked for. Only rank 0 knows what others have.
    """
    found = [
        header
        for header in inventory.headers
        if header.index == HOME
        and (header.shard.rank, header.world_size) == (rank, ranks)
        and wanted.step in (None, header.shard.generation.step)
        and wanted.generation in (None, header.shard.generation)
        and (wanted.named or not abandoned_by(header.shard.generation, inventory.roll_backs))
    ]
    return max(found, key=lambda header: header.shard.generation, default=None)


@dataclass(frozen=True, slots=True)
class Order:
    """What one rank shall do: bring this shard home from these sources; None: nothing is left.

    With ``shards``, make one from these instead; ``header`` is then this rank's own of them, or,
    if another number of ranks saved, the first.
    """

    timeline: int
    header: Header | None
    local: bool
    sources: Mapping[int, tuple[str, ...]]
    repair: tuple[Target, ...]
    margin: int
    rejected: Mapping[str, str]
    shards: tuple[ShardSources, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it went.

    ok, bad (the bytes cannot be had or proven), room (there is none for them), mismatch (they do
    not fit) or relaid (they do, but for DTensors that are cut in another way here).
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from the outcomes of all ranks: go on and load, or try something else.

    ``failed`` is why some rank could not have its shard; ``relaid`` says that every rank has to
    make its own from all.
    """

    go: bool
    failed: str
    relaid: bool


def judge(outcomes: Sequence[Outcome]) -> Verdict:
    """Whether all ranks may load.

    Raises ``StateMismatch`` if a state does not fit, and ``NoRoomToRestore``: an older generation
    would need as much.
    """
    mismatches = [each.text for each in outcomes if each.kind == "mismatch"]
    if mismatches:
        raise StateMismatch(mismatches)
    room = [each.text for each in outcomes if each.kind == "room"]
    if room:
        raise NoRoomToRestore("; ".join(room[:4]))
    bad = [each.text for each in outcomes if each.kind == "bad"]
    relaid = any(each.kind == "relaid" for each in outcomes)
    return Verdict(not bad and not relaid, "; ".join(bad[:4]), relaid)


@dataclass(frozen=True, slots=True)
class Ground:
    """What orders go by beside the plan: the restore's timeline, the ranks' homes, the nodes."""

    timeline: int
    homes: Sequence[str]
    placement: Placement
    address: Mapping[str, str]


def orders(
    plan: RecoveryPlan, ground: Ground, rejected: Mapping[str, str], *, alike: bool, relaid: bool
) -> list[Order]:
    """An order for each rank.

    On as many ranks as saved each brings home its own shard, and re-makes what was lost of it;
    ``relaid``: it then makes another one from all shards. On another number, or if all orders shall
    be ``alike``, there is nothing but all shards.
    """
    ranks, chosen = len(ground.homes), plan.chosen
    if chosen is None:
        return [Order(ground.timeline, None, False, {}, (), -1, rejected, ())] * ranks
    if alike or chosen.world_size != ranks:
        shards, margin = sources_of(chosen), chosen.margin
        header = shards[0].header
        return [Order(ground.timeline, header, False, {}, (), margin, rejected, shards)] * ranks
    shards = sources_of(chosen) if relaid else ()
    return [_own_order(shard, ground, rejected, shards) for shard in chosen.shards]


def _own_order(
    shard: ShardReport,
    ground: Ground,
    rejected: Mapping[str, str],
    shards: tuple[ShardSources, ...],
) -> Order:
    way = way_home(shard, ground.homes[shard.rank], ground.placement, ground.address)
    return Order(
        ground.timeline,
        way.header,
        way.local,
        way.sources,
        way.repair,
        shard.margin,
        rejected,
        shards,
    )


def way_home(
    shard: ShardReport, home: str, placement: Placement, address: Mapping[str, str]
) -> Way:
    """How a shard that is not lost comes to its rank's node; ``address`` is each node's."""
    assert shard.header is not None
    header = shard.header
    if header.home != home:
        header = replace(header, home=home)
    sources = {}
    for index in range(header.n):
        nodes = shard.fragments.get(index, ())
        if index < header.k:
            nodes += tuple([each for each in shard.homes if each not in nodes])
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
            near=(node.id for node in placement.ring(home)),  # losses stay within the group
        )
    targets = tuple([Target(index, node, address[node]) for index, node in missing.items()])
    return Way(header, home in shard.homes, sources, targets)


def as_told(sources: Mapping[int, tuple[str, ...]]) -> tuple[Sources, ...]:
    """The sources of a way or an order, as an agent is told them."""
    return tuple(Sources(index, addresses) for index, addresses in sources.items())
