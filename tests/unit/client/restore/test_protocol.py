"""What a restore does with a plan: timelines, ways home, and when it passes over something."""

import pytest

from ecckpt.client.restore.protocol import (
    Outcome,
    Wanted,
    judge,
    likely_home,
    passes_over,
    way_home,
)
from ecckpt.errors import NoRoomToRestore, StateMismatch
from ecckpt.format.fragment_file import HOME
from ecckpt.policy.placement import Node, parse_code, plan_placement
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import plan_recovery
from tests.support.builders import generation, header, inventory

OLD, NEW = generation(1, 9), generation(1, 10)
NODES = [f"n{at}" for at in range(6)]
ADDRESS = {node: f"{node}:1" for node in NODES}
PLACEMENT = plan_placement([Node(node, node) for node in NODES], parse_code((3, 2), 6))


def kept(node, *indices, gen=NEW):
    return inventory(node, [header(index, gen=gen, world_size=1) for index in indices])


def test_all_load_or_none():
    fine, bad, relaid = Outcome("ok", ""), Outcome("bad", "late"), Outcome("relaid", "")
    assert judge([fine, fine]).go
    assert (judge([fine, bad]).go, judge([fine, bad]).failed) == (False, "late")
    assert (judge([fine, relaid]).go, judge([fine, relaid]).relaid) == (False, True)
    with pytest.raises(StateMismatch):
        judge([bad, Outcome("mismatch", "a/b")])


def test_no_room_is_no_reason_to_look_for_an_older_one():
    with pytest.raises(NoRoomToRestore, match="rank 3"):
        judge([Outcome("bad", "late"), Outcome("room", "rank 3: none")])


def test_what_is_passed_over_is_newer_and_lost():
    lost, there = kept("n1", 0), kept("n0", HOME, gen=OLD)
    assert passes_over(plan_recovery("test", [lost, there]))
    assert passes_over(plan_recovery("test", [lost]))
    assert not passes_over(plan_recovery("test", [there]))
    assert not passes_over(plan_recovery("test", [inventory("n0")]))
    older = kept("n1", 0, gen=generation(1, 8))
    assert not passes_over(plan_recovery("test", [older, there]))


def test_a_shard_comes_home_from_every_place_that_has_it():
    holders = PLACEMENT.holders["n0"]
    pieces = [kept(holders[0], 0), kept(holders[3], 3), kept(holders[4], HOME)]
    (shard,) = plan_recovery("test", pieces).chosen.shards
    way = way_home(shard, "n0", PLACEMENT, ADDRESS)
    assert (way.local, way.header.index, way.header.home) == (False, HOME, "n0")
    home, first = ADDRESS[holders[4]], ADDRESS[holders[0]]
    assert way.sources == {
        0: (first, home),
        1: (home,),
        2: (home,),
        3: (ADDRESS[holders[3]],),
    }
    assert {each.index: each.node for each in way.repair} == {
        index: holders[index] for index in (1, 2, 4)
    }


def test_a_node_that_has_a_shard_whole_and_a_fragment_of_it_is_one_source():
    (shard,) = plan_recovery("test", [kept("n1", HOME, 0, 4), kept("n2", 0)]).chosen.shards
    first, second = ADDRESS["n1"], ADDRESS["n2"]
    assert way_home(shard, "n0", PLACEMENT, ADDRESS).sources == {
        0: (first, second),
        1: (first,),
        2: (first,),
        4: (first,),
    }


def test_what_has_no_regular_holder_left_goes_to_the_homes_own_group_first():
    names = [f"n{at:02}" for at in range(14)]
    nodes = [Node(name, name) for name in names]
    placement = plan_placement(nodes, parse_code((3, 2), len(nodes)))
    address = {name: f"{name}:1" for name in names}
    assert [len(group) for group in placement.groups] == [7, 7]
    home = placement.groups[1][2].id
    holders, spare = placement.holders[home], placement.ring(home)[-1].id
    # Fragment 0 is where 4 belongs.
    pieces = [kept(holders[4], 0), *(kept(holders[at], at) for at in (1, 2, 3))]
    (shard,) = plan_recovery("test", pieces).chosen.shards
    (target,) = way_home(shard, home, placement, address).repair
    assert (target.index, target.node) == (4, holders[0])
    pieces.append(kept(holders[0], 1))
    (shard,) = plan_recovery("test", pieces).chosen.shards
    (target,) = way_home(shard, home, placement, address).repair
    assert (target.index, target.node) == (4, spare)


def test_a_home_copy_at_home_is_local():
    (shard,) = plan_recovery("test", [kept("n0", HOME)]).chosen.shards
    assert way_home(shard, "n0", PLACEMENT, ADDRESS).local


def test_the_newest_home_copy_of_a_rank_is_what_it_will_likely_load():
    mine = [header(gen=gen, rank=1, world_size=2) for gen in (NEW, OLD)]
    others = [
        header(gen=generation(1, 11), rank=0, world_size=2),
        header(gen=generation(1, 11), rank=1, world_size=3),
        header(2, gen=generation(1, 11), rank=1, world_size=2),
    ]
    here = inventory("n0", [*mine, *others])

    def likely(wanted, inventory=here):
        found = likely_home(inventory, wanted, rank=1, ranks=2)
        return found and found.shard.generation

    assert likely(Wanted()) == NEW
    assert likely(Wanted(step=9)) == OLD
    assert likely(Wanted(generation=OLD)) == OLD
    assert likely(Wanted(step=8)) is None
    assert likely(Wanted(), inventory("n0", others)) is None
    went_back = inventory("n0", mine, roll_backs=[RollBack(2, OLD)])
    assert likely(Wanted(), went_back) == OLD
    assert likely(Wanted(step=10), went_back) == NEW
