"""Reports of anything that nodes may say they have, against the rule written out header by header.

``plan_recovery`` looks at most headers once for all files of a shard. Here every file is looked at
by itself: several sizes, homes and world sizes of one shard, copies in memory and on disk.
"""

from collections import Counter, defaultdict
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.format.fragment_file import HOME
from ecckpt.policy.survival import GenerationReport, Inventory, ShardReport, plan_recovery
from ecckpt.protocol.encoding import pack_message, unpack_message
from tests.support.builders import generation, header, inventory

GENERATIONS = [generation(1, 8), generation(1, 10), generation(2, 9)]

sizes = st.sampled_from(
    [
        {"k": 3, "m": 2},
        {"k": 3, "m": 1},
        {"k": 2, "m": 2},
        {"k": 3, "m": 2, "shard_bytes": 9_999},
        {"k": 3, "m": 2, "block_bytes": 4096},
    ]
)
others = st.fixed_dictionaries(
    {},
    optional={
        "run": st.just("other"),
        "home": st.just("n1"),
        "parent": st.just(generation(1, 7)),
        "world_size": st.just(3),
        "created_unix_s": st.just(1),
    },
)


@st.composite
def files(draw):
    """A file of a shard: mostly like the others, sometimes not."""
    fields = draw(st.just({}) | others) | draw(st.just({"k": 3, "m": 2}) | sizes)
    return header(
        draw(st.integers(HOME, fields["k"] + fields["m"] - 1)),
        rank=draw(st.integers(0, 1)),
        gen=draw(st.sampled_from(GENERATIONS)),
        **{"world_size": 2} | fields,
    )


inventories = st.lists(
    st.builds(
        lambda node, memory, disk: inventory(node, memory, disk=disk),
        st.sampled_from(["n3", "n1", "n0", "n2", "n4"]),
        st.lists(files(), max_size=6),
        st.lists(files(), max_size=3),
    ),
    max_size=6,
)


def reports(told):
    """What ``plan_recovery`` says of each generation, newest first; nothing is abandoned."""
    found = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for each in sorted(told, key=lambda each: each.node):
        for file in chain(each.headers, each.disk):
            if file.shard.run == "test":
                held = found[file.shard.generation][file.shard.rank][each.node]
                if file not in held:
                    held.append(file)
    return [report(gen, found[gen]) for gen in sorted(found, reverse=True)]


def report(gen, ranks):
    first = next(held[0] for nodes in ranks.values() for held in nodes.values())
    world_size, parent = first.world_size, first.parent
    shards = tuple(shard(rank, ranks.get(rank, {})) for rank in range(world_size))
    states = [each.state for each in shards]
    worst = next(each for each in ("lost", "recoverable", "complete") if each in states)
    margin = min(each.margin for each in shards)
    return GenerationReport(
        generation=gen,
        parent=parent,
        world_size=world_size,
        state=worst,
        margin=margin,
        shards=shards,
        abandoned=None,
    )


def shard(rank, nodes):
    counts = Counter(shape(file) for held in nodes.values() for file in held)
    if not counts:
        return ShardReport(rank=rank, state="lost", margin=-1, header=None, homes=(), fragments={})
    agreed = max(counts, key=lambda each: (counts[each], each))
    kept = [(node, file) for node in sorted(nodes) for file in nodes[node] if shape(file) == agreed]
    places = defaultdict(dict)  # in order, each node once
    for node, file in kept:
        places[file.index][node] = None
    homes = tuple(places.pop(HOME, ()))
    fragments = {index: tuple(at) for index, at in places.items()}
    chosen = kept[0][1]
    margin = margin_of(chosen.k, set(homes), [set(at) for at in fragments.values()])
    whole = homes and len(fragments) == chosen.n
    state = "lost" if margin < 0 else "complete" if whole else "recoverable"
    return ShardReport(
        rank=rank,
        state=state,
        margin=margin,
        header=chosen.at(HOME),
        homes=homes,
        fragments=fragments,
    )


def shape(file):
    return file.k, file.m, file.shard_bytes, file.block_bytes


def margin_of(k, homes, fragments):
    left = sorted(len(at - homes) for at in fragments if at - homes)
    must_go = sum(left[: max(0, len(left) - k + 1)])
    loads = Counter(node for at in fragments for node in at - homes)
    removed = len(homes)
    for load in sorted(loads.values(), reverse=True):
        if must_go > 0:
            must_go -= load
            removed += 1
    return removed - 1


@settings(max_examples=50)
@given(inventories)
def test_every_report_follows_the_rule(told):
    expected = reports(told)
    assert list(plan_recovery("test", told).generations) == expected
    arrived = [unpack_message(Inventory, pack_message(each)) for each in told]
    assert list(plan_recovery("test", arrived).generations) == expected


@settings(max_examples=20)
@given(inventories, st.randoms(use_true_random=False))
def test_nor_does_it_matter_who_answered_first(told, random):
    told = list({each.node: each for each in told}.values())
    shuffled = random.sample(told, len(told))
    assert plan_recovery("test", told).generations == plan_recovery("test", shuffled).generations
