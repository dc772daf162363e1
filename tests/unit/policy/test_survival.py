"""Recovery plans against a model that knows nothing but sets, and against every loss."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.client.restore.protocol import passes_over
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import Generation
from ecckpt.policy.on_disk import OnDisk, on_disk
from ecckpt.policy.placement import Code, Node, plan_placement
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import plan_recovery
from tests.support.builders import SESSION, generation, header, inventory

GENERATIONS = [generation(1, 8), generation(1, 10), generation(2, 9), generation(2, 9, "f" * 16)]


@st.composite
def worlds(draw, nodes=5, ranks=3):
    """Node -> the headers it holds: pieces of a few generations, anywhere."""
    k, m = draw(st.sampled_from([(1, 0), (1, 1), (2, 1), (3, 2)]))
    pieces = st.tuples(
        st.integers(0, nodes - 1),
        st.sampled_from(GENERATIONS),
        st.integers(0, ranks - 1),
        st.integers(HOME, k + m - 1),
    )
    held = {f"n{at}": [] for at in range(nodes)}
    for node, gen, rank, index in draw(st.sets(pieces, max_size=60)):
        held[f"n{node}"].append(header(index, rank=rank, world_size=ranks, k=k, m=m, gen=gen))
    return held


def pieces_of(held, gen, rank):
    """(node, index) of everything of one shard."""
    return {
        (node, each.index)
        for node, headers in held.items()
        for each in headers
        if (each.shard.generation, each.shard.rank) == (gen, rank)
    }


def state_of(pieces, k, n):
    have = {index for _, index in pieces}
    if HOME in have and len(have) == n + 1:
        return "complete"
    return "recoverable" if HOME in have or len(have) >= k else "lost"


def survives(pieces, gone, k):
    return state_of({piece for piece in pieces if piece[0] not in gone}, k, 256) != "lost"


def plan_of(held, **options):
    return plan_recovery("test", [inventory(node, held[node]) for node in held], **options)


def sample_of(held):
    return next((each for headers in held.values() for each in headers), header())


# -- against the model ----------------------------------------------------------------------------


@settings(max_examples=150)
@given(worlds())
def test_states_are_those_of_the_model(held):
    sample = sample_of(held)
    reports = plan_of(held).generations
    traces = {each.shard.generation for headers in held.values() for each in headers}
    assert [report.generation for report in reports] == sorted(traces, reverse=True)
    for report in reports:
        expected = [
            state_of(pieces_of(held, report.generation, rank), sample.k, sample.n)
            for rank in range(3)
        ]
        assert [shard.state for shard in report.shards] == expected
        worst = next(each for each in ("lost", "recoverable", "complete") if each in expected)
        assert report.state == worst
        assert bool(report.why()) == (worst == "lost")
        assert report.margin == min(shard.margin for shard in report.shards)


@settings(max_examples=100)
@given(
    worlds(),
    st.none() | st.sampled_from([8, 9, 10, 11]),
    st.sets(st.sampled_from(GENERATIONS), max_size=2),
)
def test_the_newest_that_can_be_restored_is_chosen(held, step, refused):
    plan = plan_of(held, step=step, refused=refused)
    sample = sample_of(held)
    good = [
        gen
        for gen in GENERATIONS
        if gen not in refused
        and step in (None, gen.step)
        and all(
            state_of(pieces_of(held, gen, rank), sample.k, sample.n) != "lost" for rank in range(3)
        )
    ]
    assert (plan.chosen.generation if plan.chosen else None) == max(good, default=None)


@settings(max_examples=150)
@given(worlds(ranks=1))
def test_a_margin_is_never_too_optimistic(held):
    sample = sample_of(held)
    for report in plan_of(held).generations:
        pieces = pieces_of(held, report.generation, 0)
        if report.state == "lost":
            assert report.margin == -1
            continue
        assert 0 <= report.margin < len(held)
        for gone in combinations(held, report.margin):
            assert survives(pieces, gone, sample.k)
        if len({index for _, index in pieces}) == len(pieces):  # no copies: exact
            worse = combinations(held, report.margin + 1)
            assert not all(survives(pieces, gone, sample.k) for gone in worse)


def test_a_full_holder_of_copies_does_not_hide_the_one_that_matters():
    held = {"a": [0], "x": [1, 2], "y": [1, 2]}
    plan = plan_of({node: [header(at, world_size=1) for at in held[node]] for node in held})
    assert plan.chosen.margin == 0  # k = 3: without "a" two different fragments are left


@settings(max_examples=50)
@given(worlds())
def test_the_order_of_the_inventories_does_not_matter(held):
    backwards = {node: held[node][::-1] for node in sorted(held, reverse=True)}
    first, second = plan_of(held), plan_of(backwards)
    for one, other in zip(first.generations, second.generations, strict=True):
        assert one.generation == other.generation
        for left, right in zip(one.shards, other.shards, strict=True):
            header = left.header and right.header.at(left.header.index)
            assert replace(right, header=header) == left


@settings(max_examples=100)
@given(worlds(), st.sampled_from(["n0", "n1", "n2"]))
def test_losing_a_node_never_helps(held, gone):
    before = {report.generation: report.margin for report in plan_of(held).generations}
    left = {node: headers for node, headers in held.items() if node != gone}
    for report in plan_of(left).generations:
        assert before[report.generation] - 1 <= report.margin <= before[report.generation]


# -- six nodes, RS(3, 2) --------------------------------------------------------------------------

SIX = [f"n{at}" for at in range(6)]
PLACEMENT = plan_placement([Node(node, node) for node in SIX], Code(3, 2, holders=5))
SHARD = {"world_size": 6, "k": 3, "m": 2}
WHOLE = {
    node: [header(HOME, rank=rank, home=node, **SHARD)]
    + [
        header(PLACEMENT.holders[home].index(node), rank=other, home=home, **SHARD)
        for other, home in enumerate(SIX)
        if home != node
    ]
    for rank, node in enumerate(SIX)
}


def without(*gone):
    return plan_of({node: WHOLE[node] for node in SIX if node not in gone})


def test_nothing_lost_is_complete():
    chosen = without().chosen
    assert (chosen.state, chosen.margin) == ("complete", 3)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_nodes_up_to_the_promise_may_be_lost(count):
    for gone in combinations(SIX, count):
        plan = without(*gone)
        assert plan.chosen.state == "recoverable"
        assert plan.chosen.margin == 3 - count
        assert not plan.rejected()


def test_one_more_loses_exactly_the_shards_at_home_there():
    for gone in combinations(SIX, 4):
        plan = without(*gone)
        assert plan.chosen is None
        lost = [each.rank for each in plan.generations[0].shards if each.state == "lost"]
        assert [SIX[rank] for rank in lost] == list(gone)
        (why,) = plan.rejected().values()
        assert "4 of 6 shards lost" in why
        for rank in lost:
            assert f"rank {rank}: 2 of 3 needed fragments, 0 home copies" in why


# -- what people are told -------------------------------------------------------------------------


def test_a_rank_without_a_trace_is_lost_by_name():
    plan = plan_of({"n0": [header(rank=0, world_size=2)]})
    assert plan.chosen is None
    assert plan.rejected() == {
        f"1.10.{SESSION}": "1 of 2 shards lost: rank 1: nothing of it was found"
    }


def test_many_lost_ranks_are_counted():
    (why,) = plan_of({"n0": [header(rank=0, world_size=100)]}).rejected().values()
    assert why.startswith("99 of 100 shards lost: rank 1: nothing")
    assert why.endswith("rank 4: nothing of it was found and 95 more")


def test_only_what_is_newer_than_the_choice_was_rejected():
    old, new = generation(1, 8), generation(1, 9)
    plan = plan_of(
        {"n0": [header(world_size=1, gen=old), header(0, world_size=1, gen=new)]}, refused=[]
    )
    assert plan.chosen.generation == old
    assert list(plan.rejected()) == [str(new)]
    assert "rank 0: 1 of 3 needed fragments" in plan.rejected()[str(new)]


def test_a_refused_generation_is_passed_over_and_said_so():
    old, new = generation(1, 8), generation(1, 9)
    held = {"n0": [header(world_size=1, gen=old), header(world_size=1, gen=new)]}
    plan = plan_of(held, refused={new})
    assert plan.chosen.generation == old
    assert plan.rejected() == {str(new): "refused"}
    assert plan_of(held, refused={old, new}).chosen is None


def test_absence_is_no_error():
    for inventories in ([], [inventory("n0")], [inventory("n0"), inventory("n1")]):
        plan = plan_recovery("test", inventories)
        assert (plan.chosen, plan.generations, plan.rejected()) == (None, (), {})


def test_with_a_step_only_what_could_not_be_taken_was_rejected():
    held = {"n0": [header(world_size=1, gen=generation(1, step)) for step in (5, 6)]}
    held["n0"].append(header(0, world_size=1, gen=generation(1, 7)))
    plan = plan_of(held, step=5)
    assert plan.chosen.generation == generation(1, 5)
    assert list(plan.rejected()) == [str(generation(1, 7))]


def test_ruins_are_what_no_generation_could_be_made_of():
    ruin = replace(inventory("n0"), rejected={"x.region": "cut off"})
    plan = plan_recovery("test", [ruin, inventory("n1", [header(world_size=1)])])
    assert plan.ruins == {"n0/x.region": "cut off"}


def test_a_generation_that_agents_were_told_of_and_that_is_gone_is_rejected_by_name():
    old, gone = generation(1, 8), generation(1, 9)
    held = inventory("n1", [header(world_size=1, gen=old)], committed=old)
    plan = plan_recovery("test", [held, inventory("n0", committed=gone)])
    assert plan.chosen.generation == old
    assert plan.rejected() == {
        str(gone): "it was committed, as n0 was told, and nothing of it was found",
    }
    assert passes_over(plan)
    # Not if a roll-back left it on purpose, and not if it is there.
    left = inventory("n0", committed=gone, roll_backs=[RollBack(2, old)])
    assert plan_recovery("test", [held, left]).rejected() == {}
    whole = inventory("n0", [header(world_size=1, gen=gone)], committed=gone)
    assert plan_recovery("test", [whole, held]).vanished == {}


# -- on disk --------------------------------------------------------------------------------------


def test_on_disk_is_what_was_told_and_what_is_seen():
    old, new, half = (generation(1, step) for step in (8, 9, 10))
    files = [header(at, world_size=1, gen=gen) for gen in (old, new) for at in (0, 2, 4)]
    files += [header(at, world_size=1, gen=half) for at in (HOME, 0, 1)]
    held = [inventory("n0", disk=files[:2], stored=[old]), inventory("n1", disk=files[2:])]
    there = on_disk("test", held)
    assert (there.told, there.seen) == ((old,), (old, new))  # of the last one k are not there
    assert on_disk("test", held[:1]) == OnDisk((old,), ())
    assert on_disk("test", [inventory("n0", headers=files)]) == OnDisk()


def test_a_home_copy_alone_counts_where_it_is_all_there_is():
    alone = header(world_size=1, k=1, m=0)
    assert on_disk("test", [inventory("n0", disk=[alone])]).seen == (generation(),)
    coded = header(world_size=1)
    assert on_disk("test", [inventory("n0", disk=[coded])]).seen == ()


def test_memory_and_disk_of_a_node_are_one_place():
    files = [header(at, world_size=1) for at in range(5)]
    held = [inventory(f"n{at}", [file], disk=[file]) for at, file in enumerate(files)]
    report = plan_recovery("test", held).chosen
    assert report.margin == 2
    assert all(len(at) == 1 for at in report.shards[0].fragments.values())


# -- what never mixes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [{"shard_bytes": 9_999}, {"k": 2, "m": 3}, {"m": 1}, {"block_bytes": 4096}]
)
def test_fragments_of_different_shapes_never_mix(other):
    shard = {"world_size": 1, "k": 3, "m": 2}
    first = {"n0": [header(0, **shard)], "n1": [header(1, **shard)]}
    second = {"n2": [header(2, **shard | other)]}
    assert plan_of(first | second).chosen is None
    third = {"n3": [header(3, **shard)]}
    (shard_report,) = plan_of(first | second | third).chosen.shards
    assert shard_report.header.same_shard(header(0, **shard))
    assert shard_report.fragments == {0: ("n0",), 1: ("n1",), 3: ("n3",)}


@pytest.mark.parametrize(
    "other", [generation(1, 11), generation(2, 10), generation(1, 10, "f" * 16)]
)
def test_generations_never_mix(other):
    plan = plan_of(
        {
            "n0": [header(0, world_size=1), header(1, world_size=1)],
            "n1": [header(2, world_size=1, gen=other), header(3, world_size=1, gen=other)],
        }
    )
    assert plan.chosen is None
    assert len(plan.generations) == 2


def test_runs_never_mix():
    held = {"n0": [header(0, world_size=1)], "n1": [header(at, run="other") for at in range(5)]}
    plan = plan_of(held)
    assert [report.world_size for report in plan.generations] == [1]
    assert plan.chosen is None


def test_one_fragment_in_two_places_counts_once():
    held = {node: [header(0, world_size=1)] for node in ("n0", "n1", "n2")}
    assert plan_of(held).chosen is None


# -- timelines ------------------------------------------------------------------------------------


def test_the_newest_timeline_is_the_newest_that_left_any_trace():
    shard = header(world_size=1, gen=generation(3, 5))
    plan = plan_recovery("test", [inventory("n0", [shard]), inventory("n1", fence=2)])
    assert plan.newest_timeline == 3
    plan = plan_recovery("test", [inventory("n0", [shard]), inventory("n1", fence=7)])
    assert plan.newest_timeline == 7
    committed = Generation(9, 1, SESSION)
    assert plan_recovery("test", [inventory("n0", committed=committed)]).newest_timeline == 9


def test_a_lower_step_of_a_newer_timeline_wins():
    back, abandoned = generation(2, 400), generation(1, 5000)
    plan = plan_of({"n0": [header(world_size=1, gen=gen) for gen in (abandoned, back)]})
    assert plan.chosen.generation == back
    assert plan.rejected() == {}


def test_a_step_means_its_newest_timeline():
    twice = [header(world_size=1, gen=generation(timeline, 5)) for timeline in (1, 2)]
    held = {"n0": [*twice, header(world_size=1, gen=generation(2, 6))]}
    assert plan_of(held, step=5).chosen.generation == generation(2, 5)
    assert plan_of(held, step=4).chosen is None
