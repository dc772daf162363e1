"""Roll-backs: what somebody left on purpose stays left, and nothing else does."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecckpt.policy.rollbacks import RollBack, abandoned_by, in_force
from ecckpt.policy.survival import plan_recovery
from tests.support.builders import generation, header, inventory


def world_of(gens, roll_backs=(), fence=0):
    headers = [header(world_size=1, gen=gen) for gen in gens]
    return [inventory("n0", headers, fence=fence, roll_backs=roll_backs)]


def chosen(gens, roll_backs, **wanted):
    plan = plan_recovery("test", world_of(gens, roll_backs), **wanted)
    return plan.chosen.generation if plan.chosen else None


def test_a_restart_after_a_roll_back_comes_back_to_its_target():
    old, target, tail = (generation(1, step) for step in (200, 300, 5000))
    assert chosen([old, target, tail], []) == tail
    assert chosen([old, target, tail], [RollBack(2, target)]) == target
    assert chosen([old, tail], [RollBack(2, target)]) == old


def test_what_the_new_timeline_saves_is_newest():
    gens = [generation(1, 300), generation(1, 5000), generation(2, 301)]
    assert chosen(gens, [RollBack(2, gens[0])]) == gens[2]


def test_if_only_the_abandoned_tail_is_left_it_is_named_and_not_taken():
    tail = generation(1, 5000)
    plan = plan_recovery("test", world_of([tail], [RollBack(2, generation(1, 300))]))
    assert plan.chosen is None
    assert plan.rejected() == {
        str(tail): f"left by going back to {generation(1, 300)} on timeline 2; "
        f'restore(generation="{tail}") takes it'
    }


def test_by_name_what_is_abandoned_is_taken():
    target, tail = generation(1, 300), generation(1, 5000)
    assert chosen([target, tail], [RollBack(2, target)], step=5000) == tail
    assert chosen([target, tail], [RollBack(2, target)], generation=tail) == tail
    assert chosen([target, tail], [RollBack(2, target)], generation=generation(1, 6)) is None


def test_of_two_with_the_step_the_one_that_counts_is_taken():
    target, tail, again = generation(1, 300), generation(1, 350), generation(2, 350)
    assert chosen([target, tail, again], [RollBack(2, target)], step=350) == again
    back = generation(3, 300)
    # Timeline 3 began at 1.300 too, past what timeline 2 did.
    gens = [target, tail, again, back]
    assert chosen(gens, [RollBack(2, target), RollBack(3, target)], step=350) == again


def test_going_forward_again_by_name_voids_the_roll_back():
    target, tail, between = generation(1, 300), generation(1, 5000), generation(2, 400)
    back, forward = RollBack(2, target), RollBack(3, tail)
    for order in permutations([back, forward]):
        assert in_force(order) == (forward,)
        assert chosen([target, tail, between], order) == tail
        assert chosen([target, generation(1, 4000), between], order) == generation(1, 4000)


def test_roll_backs_on_the_way_to_the_target_stay_in_force():
    first, second = RollBack(2, generation(1, 300)), RollBack(4, generation(3, 50))
    assert in_force([first, second]) == (second, first)
    gens = [generation(1, 300), generation(1, 5000), generation(3, 60)]
    assert chosen(gens, [first, second]) == generation(1, 300)


def test_knowledge_of_any_survivor_counts_for_all():
    target, tail = generation(1, 300), generation(1, 5000)
    gens = [header(world_size=1, gen=gen) for gen in (target, tail)]
    told = inventory("n1", roll_backs=[RollBack(2, target)])
    plan = plan_recovery("test", [inventory("n0", gens), told])
    assert plan.chosen.generation == target
    assert plan.roll_backs == (RollBack(2, target),)
    assert plan.newest_timeline == 2


def test_an_automatic_fallback_abandons_nothing():
    headers = [header(world_size=1, gen=generation(1, step)) for step in (300, 5000)]
    plan = plan_recovery("test", [inventory("n0", headers, fence=7)])
    assert plan.chosen.generation == generation(1, 5000)


def test_what_is_remembered_is_bounded():
    many = [RollBack(at + 1, generation(at, 1)) for at in range(1, 200)]
    assert in_force(many) == tuple(many[:-65:-1])


points = st.builds(generation, st.integers(1, 6), st.integers(0, 6))
made = st.builds(lambda target, ahead: RollBack(target.timeline + ahead, target), points,
                 st.integers(1, 4))  # fmt: skip


@given(st.lists(made, max_size=6), st.lists(points, max_size=8))
def test_the_newest_target_is_never_abandoned_and_learning_twice_changes_nothing(known, gens):
    counting = in_force(known)
    assert in_force(counting) == counting
    assert in_force([*counting, *known]) == counting
    assert in_force(reversed(known)) == counting
    if counting:
        assert counting[0] == max(known)
        assert abandoned_by(counting[0].target, counting) is None
    for gen in gens:
        by = abandoned_by(gen, counting)
        assert (by is not None) == any(
            each.target < gen and gen.timeline < each.timeline for each in counting
        )


@pytest.mark.parametrize("step", [None, 300])
def test_a_target_that_is_lost_falls_back_along_its_own_line(step):
    older, tail = generation(1, 200), generation(1, 5000)
    found = chosen([older, tail], [RollBack(2, generation(1, 300))], step=step)
    assert found == (older if step is None else None)
