"""What a restore does with a plan: timelines, ways home, and when it passes over something."""

import pytest
from builders import generation, header, inventory

from ecckpt.errors import NoRoomToRestore, StateMismatch
from ecckpt.fragment import HOME
from ecckpt.lineage import RollBack
from ecckpt.ordering import (
    Outcome,
    Refusals,
    Wanted,
    judge,
    likely_home,
    passes_over,
    way_home,
)
from ecckpt.placement import Node, parse_code, plan_placement
from ecckpt.recovery import plan_recovery

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


def test_a_generation_is_refused_when_it_has_failed_twice():
    refusals = Refusals()
    assert refusals.fail(NEW, "late") is False
    assert refusals.refused == {}
    assert refusals.fail(OLD, "late") is False
    assert refusals.fail(NEW, "damaged") is True
    assert refusals.refused == {NEW: "damaged"}


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
    assert {each.index: each.addresses for each in way.sources} == {
        0: (first, home),
        1: (home,),
        2: (home,),
        3: (ADDRESS[holders[3]],),
    }
    assert {each.index: each.node for each in way.repair} == {
        index: holders[index] for index in (1, 2, 4)
    }


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
