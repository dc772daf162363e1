"""RngState: every generator, each on its own, all or none."""

import random

import numpy as np
import pytest
import torch

from ecckpt.errors import StateMismatch
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import load
from ecckpt.state.rng import RngState
from ecckpt.state.snapshot.plan import plan_shard


def shard_of(state):
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return read_shard(memoryview(target))


def generators(seed=0):
    return {
        "torch": torch.Generator().manual_seed(seed),
        "pcg": np.random.default_rng(seed),
        "mt": np.random.Generator(np.random.MT19937(seed)),
        "philox": np.random.Generator(np.random.Philox(seed)),
    }


def draw(own):
    return [
        random.gauss(0, 1),
        np.random.standard_normal(),
        torch.randn(3).tolist(),
        torch.randn(3, generator=own["torch"]).tolist(),
        *(own[name].standard_normal() for name in ("pcg", "mt", "philox")),
    ]


def test_every_stream_continues_where_it_was():
    own = generators()
    draw(own)  # leaves half a pair of normal numbers in the caches
    shard = shard_of({"rng": RngState(own)})
    want = draw(own)
    other = generators(7)
    draw(other)
    load({"rng": RngState(other)}, shard)
    assert draw(other) == want


@pytest.mark.parametrize("part", ["python", "numpy", "torch", "cuda", "generators"])
def test_a_missing_part_is_named_and_nothing_is_set(part):
    state = RngState().state_dict()
    del state[part]
    with pytest.raises(StateMismatch, match=f"rng: no {part} part was saved") as caught:
        draw_nothing(lambda: load({"rng": RngState()}, shard_of({"rng": state})))
    assert len(caught.value.problems) == 1
    with pytest.raises(StateMismatch, match=f"no {part} part"):
        RngState().load_state_dict(state)


def draw_nothing(action):
    before = repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state()
    try:
        action()
    finally:
        assert repr(random.getstate()) == before[0]
        assert repr(np.random.get_state()) == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("python", (3, (1, 2), None)),
        ("python", None),
        ("numpy", ("PCG64", np.zeros(3), 0, 0, 0.0)),
        ("numpy", 3),
        ("torch", torch.zeros(3, dtype=torch.uint8)),
        ("torch", torch.zeros(3)),
        ("torch", "x"),
        ("cuda", [torch.zeros(16, dtype=torch.uint8)] * 99),
        ("generators", {"g": torch.zeros(2)}),
        ("generators", {}),
        (
            "generators",
            {"g": RngState({"g": torch.Generator()}).state_dict()["generators"]["g"], "x": 1},
        ),
    ],
)
def test_a_part_that_does_not_fit_is_named_and_nothing_is_set(part, value):
    live = RngState({"g": torch.Generator()})
    state = live.state_dict() | {part: value}
    with pytest.raises(
        StateMismatch,
        match="generator" if part == "generators" else part.upper() if part == "cuda" else part,
    ):
        draw_nothing(lambda: live.load_state_dict(state))


def test_numpy_generators_of_another_kind_do_not_fit():
    saved = RngState({"g": np.random.default_rng()}).state_dict()
    live = RngState({"g": np.random.Generator(np.random.MT19937())})
    assert len(live.check_state_dict(saved)) == 1


def test_cuda_can_be_left_out():
    saved = RngState().state_dict() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 99}
    RngState(cuda=False).load_state_dict(saved)
    assert RngState(cuda=False).state_dict()["cuda"] == []


def test_it_is_restored_after_everything_that_may_draw():
    class Draws:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            torch.randn(3)

    state = {"rng": RngState(), "loader": Draws()}
    shard = shard_of(state)
    want = torch.randn(3)
    load(state, shard)
    assert torch.equal(torch.randn(3), want)


# -- generators of the program ---------------------------------------------------------------------


def _numbers(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    return [float(generator.random()) for _ in range(3)]


GENERATORS = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "numpy": np.random.default_rng,
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "random state": np.random.RandomState,
    "python": random.Random,
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_every_kind_of_generator_goes_on_and_is_seeded_anew(kind):
    make = GENERATORS[kind]
    saved, live = make(1), make(2)
    _numbers(saved)
    load({"r": RngState({"g": live})}, shard_of({"r": RngState({"g": saved})}))
    assert _numbers(live) == _numbers(saved)
    for generator in (saved, live):
        RngState({"g": generator}).reseed(b"seed")
    numbers = _numbers(live)
    assert numbers == _numbers(saved)
    assert numbers != _numbers(make(1))


@pytest.mark.parametrize("spawned", [0, 1, 3])
def test_children_of_a_restored_generator_are_those_of_the_saved_one(spawned):
    saved, live = np.random.default_rng([1, 2]), np.random.default_rng(9)
    saved.spawn(spawned)
    live.spawn(5)
    load({"r": RngState({"g": live})}, shard_of({"r": RngState({"g": saved})}))
    for one, other in zip(saved.spawn(2), live.spawn(2), strict=True):
        assert one.random() == other.random()
        assert one.spawn(1)[0].random() == other.spawn(1)[0].random()


def test_what_is_no_generator_is_refused_at_once():
    with pytest.raises(TypeError, match="generator 'g' is a int"):
        RngState({"g": 3})
    with pytest.raises(TypeError, match="generator 'g' is a SystemRandom"):
        RngState({"g": random.SystemRandom()})
