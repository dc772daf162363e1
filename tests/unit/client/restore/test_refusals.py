"""When a restore passes over a generation, and when it does not because one node is cut off."""

from __future__ import annotations

import pytest

from ecckpt.client.restore.protocol import Outcome
from ecckpt.client.restore.refusals import Refusals
from ecckpt.errors import NodeCutOff
from tests.support.builders import generation

OLD, NEW = generation(1, 9), generation(1, 10)
HOMES = ["n0", "n0", "n1", "n1", "n2", "n2"]
OK = Outcome("ok", "")


def outcomes(bad=(), *, witnessed=None, lacks=None):
    """Of six ranks; ``bad`` ones lack their own shard, or ``lacks``."""
    made = [OK] * len(HOMES)
    for rank in bad:
        made[rank] = Outcome("bad", "late", lacks=rank if lacks is None else lacks)
    for rank, shard in (witnessed or {}).items():
        made[rank] = Outcome(made[rank].kind, made[rank].text, made[rank].lacks, shard)
    return made


def test_a_generation_is_refused_when_it_fails_twice_and_a_witness_fails_too():
    refusals = Refusals(HOMES)
    assert refusals.fail(NEW, outcomes([3]), "late") is False
    assert refusals.refused == {}
    assert refusals.fail(OLD, outcomes([3]), "late") is False
    ((witness, shard),) = refusals.witnesses(NEW).items()
    assert (HOMES[witness] != "n1", shard) == (True, 3)
    assert refusals.fail(NEW, outcomes([3]), "damaged") is True
    assert refusals.refused == {NEW: "damaged"}


def test_a_node_that_cannot_gather_what_another_can_is_cut_off():
    refusals = Refusals(HOMES)
    refusals.fail(NEW, outcomes([2]), "late")
    (witness,) = refusals.witnesses(NEW)
    text = f"node n1 cannot gather rank 2 of generation {NEW}, and node {HOMES[witness]} can: late"
    with pytest.raises(NodeCutOff, match=text):
        refusals.fail(NEW, outcomes([2], witnessed={witness: 2}), "late")
    assert refusals.refused == {}


def test_a_witness_proves_nothing_once_the_rank_has_its_shard():
    refusals = Refusals(HOMES)
    refusals.fail(NEW, outcomes([2]), "late")
    (witness,) = refusals.witnesses(NEW)
    # Another shard is lacking now: it had no witness, so there is one more try.
    assert refusals.fail(NEW, outcomes([5], witnessed={witness: 2}), "late") is False
    assert sorted(refusals.witnesses(NEW).values()) == [2, 5]
    assert refusals.fail(NEW, outcomes([5]), "late") is True


def test_ranks_that_make_their_shards_from_all_name_the_shard_that_they_lack():
    refusals = Refusals(HOMES)
    refusals.fail(NEW, outcomes([0, 2, 4], lacks=7), "late")
    # Ranks of every node lack it: there is no witness, and nothing more to learn.
    assert refusals.witnesses(NEW) == {}
    assert refusals.fail(NEW, outcomes([0, 2, 4], lacks=7), "late") is True


def test_where_all_ranks_are_on_one_node_two_failures_suffice():
    refusals = Refusals(["n0", "n0"])
    for refused in (False, True):
        assert refusals.fail(NEW, [OK, Outcome("bad", "late", lacks=1)], "late") is refused
    assert Refusals([]).witnesses(NEW) == {}


def test_an_unknown_shard_has_no_witness():
    refusals = Refusals(HOMES)
    assert refusals.fail(NEW, [OK, Outcome("bad", "late")], "late") is False
    assert refusals.witnesses(NEW) == {}
    assert refusals.fail(NEW, [OK, Outcome("bad", "late")], "late") is True


def test_tries_and_witnesses_are_bounded():
    refusals = Refusals(HOMES)
    assert [refusals.fail(NEW, outcomes([rank]), "late") for rank in (0, 2, 4, 1)] == [
        False,
        False,
        False,
        True,
    ]
    many = Refusals([f"n{at}" for at in range(100)])
    bad = [Outcome("bad", "late", lacks=at) if at < 50 else OK for at in range(100)]
    many.fail(NEW, bad, "late")
    assert sorted(many.witnesses(NEW).values()) == list(range(16))
