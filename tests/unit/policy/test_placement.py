"""Groups, holders and codes: what is promised is what every pattern of loss leaves."""

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.errors import DuplicateNode, InvalidCode, TooFewNodes
from ecckpt.policy.placement import Code, Node, Placement, parse_code, plan_placement, plan_repair


def cluster(count, domains=0):
    """n0, n1, ..., each its own domain or dealt over so many."""
    return [Node(f"n{at}", f"d{at % domains}" if domains else f"n{at}") for at in range(count)]


@st.composite
def plans(draw, max_nodes=40):
    """Nodes in domains of any sizes, and a code that fits them."""
    count = draw(st.integers(2, max_nodes))
    domains = draw(st.integers(1, count))
    nodes = [Node(f"n{at}", f"d{draw(st.integers(0, domains - 1))}") for at in range(count)]
    k = draw(st.integers(1, count - 1))
    m = draw(st.integers(0, count - 1 - k))
    return nodes, Code(k, m, holders=k + m)


def lost_homes(placement, gone):
    """Homes whose shards cannot be rebuilt when these nodes are gone."""
    k = placement.code.k
    return [
        home
        for home, holders in placement.holders.items()
        if home in gone and len(set(holders) - gone) < k
    ]


# -- groups and holders ---------------------------------------------------------------------------


@given(plans())
def test_every_node_is_in_one_group_of_even_size(plan):
    nodes, code = plan
    groups = plan_placement(nodes, code).groups
    assert sorted(node.id for group in groups for node in group) == sorted(n.id for n in nodes)
    sizes = [len(group) for group in groups]
    assert min(sizes) >= code.holders + 1
    assert max(sizes) - min(sizes) <= 1
    assert len(groups) == len(nodes) // (code.holders + 1)


@given(plans())
def test_holders_are_other_nodes_of_the_group_and_all_different(plan):
    placement = plan_placement(*plan)
    group_of = {node.id: group for group in placement.groups for node in group}
    for home, holders in placement.holders.items():
        assert len(set(holders)) == len(holders) == plan[1].holders
        assert home not in holders
        assert set(holders) <= {node.id for node in group_of[home]}
    assert placement.holders.keys() == group_of.keys()


@given(plans())
def test_every_node_holds_as_much_as_it_has_held(plan):
    placement = plan_placement(*plan)
    load = Counter(holder for holders in placement.holders.values() for holder in holders)
    assert set(load.values()) == {plan[1].holders}


@given(plans(), st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_does_not_matter(plan, random):
    nodes, code = plan
    shuffled = random.sample(nodes, len(nodes))
    assert plan_placement(shuffled, code) == plan_placement(nodes, code)


@given(plans())
def test_domains_are_spread_evenly_over_the_groups(plan):
    nodes, code = plan
    groups = plan_placement(nodes, code).groups
    for domain, count in Counter(node.domain for node in nodes).items():
        most = max(sum(node.domain == domain for node in group) for group in groups)
        assert most <= -(-count // len(groups))


def test_no_group_has_two_of_a_domain_while_there_are_enough_domains():
    placement = plan_placement(cluster(24, domains=6), Code(3, 2, holders=5))
    for group in placement.groups:
        assert len({node.domain for node in group}) == len(group) == 6
    assert placement.domains_survived == placement.nodes_survived == 3


# -- promises -------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(plans(max_nodes=9))
def test_any_nodes_as_many_as_promised_may_be_lost_and_not_one_more(plan):
    placement = plan_placement(*plan)
    ids = sorted(placement.holders)
    survived = placement.nodes_survived
    assert survived == plan[1].m + 1
    assert not any(lost_homes(placement, set(gone)) for gone in combinations(ids, survived))
    assert any(lost_homes(placement, set(gone)) for gone in combinations(ids, survived + 1))


@settings(max_examples=40)
@given(plans(max_nodes=9))
def test_any_domains_as_many_as_promised_may_be_lost(plan):
    nodes, code = plan
    placement = plan_placement(nodes, code)
    domains = sorted({node.domain for node in nodes})
    for gone in combinations(domains, min(placement.domains_survived, len(domains))):
        assert not lost_homes(placement, {node.id for node in nodes if node.domain in gone})


@pytest.mark.parametrize(
    ("count", "domains", "code", "words"),
    [
        (1, 0, "auto", "process crashes only"),
        (2, 0, "auto", "survives any 1 node or any 1 domain"),
        (6, 0, (3, 2), "survives any 3 nodes or any 3 domains"),
        (6, 3, (3, 2), "survives any 3 nodes or any 1 domain"),
        (6, 1, (3, 2), "survives any 3 nodes; losing one whole domain can lose a shard"),
        (8, 2, (4, 2), "can lose a shard: too few domains"),
    ],
)
def test_the_promise_says_what_may_be_lost(count, domains, code, words):
    placement = plan_placement(cluster(count, domains), parse_code(code, count))
    assert words in placement.promise()


def test_one_node_is_a_group_of_its_own():
    placement = plan_placement(cluster(1), parse_code("auto", 1))
    assert placement == Placement(
        code=Code(1, 0, 0),
        groups=((Node("n0", "n0"),),),
        holders={"n0": ()},
        nodes_survived=0,
        domains_survived=0,
    )


# -- what cannot be placed ------------------------------------------------------------------------


def test_too_few_nodes_are_refused_with_both_numbers():
    with pytest.raises(TooFewNodes, match=r"RS\(8, 2\) needs 11 nodes .* there are 10") as caught:
        plan_placement(cluster(10), Code(8, 2, holders=10))
    assert (caught.value.have, caught.value.need) == (10, 11)


@pytest.mark.parametrize("code", [Code(1, 0, holders=0), Code(1, 1, holders=2)])
def test_two_nodes_of_one_name_are_refused(code):
    nodes = [*cluster(3), Node("n1", "elsewhere")]
    with pytest.raises(DuplicateNode, match="'n1' is claimed"):
        plan_placement(nodes, code)


# -- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["8+2", " 8 + 2 ", "08+2", (8, 2), [8, 2]])
def test_spellings_of_a_code(spec):
    assert parse_code(spec, 11) == Code(8, 2, holders=10)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "8", "8+", "+2", "8+2+1", "8:2", "8,2", "(8, 2)", "-8+2", "8.0+2", "AUTO"),
        *("9" * 5000 + "+2", "x" * 10_000, "\u0668+2"),
        *((8,), (8, 2, 1), ("8", "2"), (8.0, 2), (True, 2), (None, 2)),
        *(8, None, 8.2, {8, 2}, {8: 2}, b"8+2", object()),
    ],
)
def test_what_is_no_code_is_refused_with_the_spellings(spec):
    with pytest.raises(InvalidCode, match="is not understood") as caught:
        parse_code(spec, 100)
    assert '"8+2" or (8, 2)' in str(caught.value)


@pytest.mark.parametrize(("k", "m"), [(0, 2), (-1, 2), (8, -1), (255, 2), (256, 1), (1, 256)])
def test_codes_beyond_the_field_are_refused_with_the_numbers(k, m):
    with pytest.raises(InvalidCode, match=rf"k={k} and m={m} cannot be used .*k \+ m <= 256"):
        parse_code((k, m), 1000)


@pytest.mark.parametrize(("k", "m"), [(256, 0), (255, 1), (1, 255), (1, 0)])
def test_codes_at_the_edge_of_the_field(k, m):
    assert parse_code((k, m), k + m + 1) == Code(k, m, holders=k + m)


@pytest.mark.parametrize(("k", "m"), list(product((1, 2, 8), (0, 1, 3))))
def test_a_code_needs_its_holders_and_the_home(k, m):
    assert parse_code((k, m), k + m + 1).holders == k + m
    with pytest.raises(TooFewNodes, match=f"needs {k + m + 1} nodes .* are {k + m}") as caught:
        parse_code(f"{k}+{m}", k + m)
    assert (caught.value.have, caught.value.need) == (k + m, k + m + 1)


@pytest.mark.parametrize("count", range(1, 41))
def test_auto_uses_what_there_is(count):
    code = parse_code("auto", count)
    plan_placement(cluster(count), code)
    if count == 1:
        assert code == Code(1, 0, holders=0)
        return
    assert code.holders == code.k + code.m
    assert code.m == (0 if count < 3 else 1 if count < 5 else 2)
    assert code.k == min(8, count - 1 - code.m)


def test_codes_have_names():
    assert [str(parse_code("auto", count)) for count in (1, 2, 11)] == [
        "none",
        "RS(1, 0)",
        "RS(8, 2)",
    ]


# -- repair ---------------------------------------------------------------------------------------


@st.composite
def damages(draw):
    """Arguments for ``plan_repair``: a shard of which fragments are missing or have moved."""
    ids = [f"n{at}" for at in range(draw(st.integers(1, 9)))]
    home = draw(st.sampled_from(ids))
    others = draw(st.permutations([node for node in ids if node != home]))
    holders = others[: draw(st.integers(0, len(others)))]
    indices = draw(st.integers(len(holders), 9))
    sets = st.sets(st.sampled_from(ids), max_size=2)
    present = draw(st.dictionaries(st.integers(0, 8), sets))
    living = draw(st.sets(st.sampled_from(ids)))
    return {
        "home": home,
        "indices": indices,
        "present": present,
        "holders": holders,
        "nodes": {node: draw(st.sampled_from("abc")) for node in ids if node in living},
    }


def taken_by(damage):
    return {node for at in damage["present"].values() for node in at} | {damage["home"]}


@settings(max_examples=100)
@given(damages())
def test_repair_never_puts_two_pieces_of_a_shard_on_one_node(damage):
    plan = plan_repair(**damage)
    assert len(set(plan.values())) == len(plan)
    assert not taken_by(damage) & set(plan.values())
    assert all(not damage["present"].get(index) for index in plan)
    assert set(plan) <= set(range(damage["indices"]))
    assert set(plan.values()) <= set(damage["nodes"])


@settings(max_examples=100)
@given(damages())
def test_repair_goes_to_the_regular_holder_wherever_that_is_free(damage):
    plan = plan_repair(**damage)
    for index, holder in enumerate(damage["holders"]):
        missing = not damage["present"].get(index)
        if missing and holder in damage["nodes"] and holder not in taken_by(damage):
            assert plan[index] == holder


@settings(max_examples=100)
@given(damages())
def test_repair_leaves_out_only_what_finds_no_node(damage):
    plan = plan_repair(**damage)
    missing = [at for at in range(damage["indices"]) if not damage["present"].get(at)]
    free = set(damage["nodes"]) - taken_by(damage)
    assert len(plan) == min(len(missing), len(free))


def test_a_whole_shard_needs_no_repair():
    holders = ("n1", "n2", "n3")
    present = {at: {node} for at, node in enumerate(holders)}
    nodes = {node: node for node in ("n0", *holders)}
    damage = {"home": "n0", "indices": 3, "present": present, "holders": holders, "nodes": nodes}
    assert plan_repair(**damage) == {}
    del present[1]
    assert plan_repair(**damage) == {1: "n2"}


def test_a_stray_fragment_goes_to_the_domain_with_the_least_of_the_shard():
    domains = {"n0": "a", "n1": "b", "n2": "c", "n3": "b", "n4": "a", "n5": "c", "n6": "d"}
    lost = {"n2"}
    plan = plan_repair(
        home="n0",
        indices=3,
        present={0: ["n1"]},
        holders=("n1", "n2", "n3"),
        nodes={node: domain for node, domain in domains.items() if node not in lost},
    )
    assert plan == {2: "n3", 1: "n5"}  # b has two pieces, a the home copy; the first of c and d


@pytest.mark.parametrize("count", [6, 8, 11, 13, 24])
def test_a_ring_begins_with_the_holders_and_has_the_whole_group(count):
    nodes = [Node(f"n{at}", f"d{at % 4}") for at in range(count)]
    placement = plan_placement(nodes, parse_code((3, 2), count))
    for group in placement.groups:
        for node in group:
            ring = [each.id for each in placement.ring(node.id)]
            assert tuple(ring[:5]) == placement.holders[node.id]
            assert {*ring, node.id} == {each.id for each in group}
