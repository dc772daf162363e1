"""Registered classes: stored by name and plain values, made again only by what is registered."""

import dataclasses
import enum
from collections import Counter, defaultdict, deque
from decimal import Decimal

import numpy as np
import pytest
import torch

import ecckpt
from ecckpt.errors import InvalidConfig, StateMismatch, UnsupportedState
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import load
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.tree import registry
from ecckpt.state.tree.encoding import Encoder
from ecckpt.state.tree.values import pack


def shard_of(state):
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return read_shard(memoryview(target))


def restored(value):
    live = {"value": None}
    load(live, shard_of({"value": value}))
    return live["value"]


@pytest.fixture(autouse=True)
def fresh_table(monkeypatch):
    monkeypatch.setattr(registry, "_by_kind", dict(registry._by_kind))
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))


class Phase(enum.Enum):
    WARM_UP = enum.auto()
    DECAY = "decay"
    COOL = DECAY  # an alias


class Part(enum.Flag):
    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    start: int
    stop: int = 9


@dataclasses.dataclass
class Plan:
    phase: Phase
    spans: list = dataclasses.field(default_factory=list)
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.made += 1


def test_members_flags_and_dataclasses_come_back():
    for kind in (Phase, Part, Span, Plan):
        assert ecckpt.register(kind) is kind
    plan = Plan(Phase.WARM_UP, [Span(1), Span(2, 3)])
    plan.made = 7
    value = [
        Phase.DECAY,
        Phase.COOL,
        Part.LEFT | Part.RIGHT,
        Part(0),
        plan,
        {Phase.DECAY: {Span(1)}},
    ]
    other = restored(value)
    assert other == value
    assert other[0] is Phase.DECAY
    assert other[4].made == 7  # __post_init__ did not run again


def test_a_codec_of_the_users_own():
    ecckpt.register(Decimal, encode=str, decode=Decimal)
    assert restored({"price": [Decimal("1.10")]}) == {"price": [Decimal("1.10")]}
    ecckpt.register(range, encode=lambda r: [r.start, r.stop, r.step], decode=lambda p: range(*p))
    assert restored(range(3, 9, 2)) == range(3, 9, 2)


def test_what_is_not_registered_is_refused_with_both_ways_out():
    for value in (Phase.DECAY, Span(1), Decimal(1)):
        with pytest.raises(UnsupportedState, match=r"a\.0: .*ecckpt\.register\(\).*leave it out"):
            plan_shard({"a": [value]})
    ecckpt.register(Span)

    class Longer(Span):
        pass

    with pytest.raises(UnsupportedState, match="Longer"):  # exactly the class, no other
        plan_shard({"a": Longer(1)})


def test_tensors_are_refused_in_registered_values():
    ecckpt.register(Span)
    with pytest.raises(UnsupportedState, match=r"a\.start: cannot store torch\.Tensor"):
        plan_shard({"a": Span(torch.zeros(1))})


def test_an_encoder_that_returns_its_argument_is_refused():
    ecckpt.register(Decimal, encode=lambda value: value, decode=Decimal)
    with pytest.raises(UnsupportedState, match=r"a: .*encode\(\) returned the same"):
        plan_shard({"a": Decimal(1)})


def test_attributes_that_are_no_fields_are_refused():
    ecckpt.register(Plan)
    plan = Plan(None)
    plan.extra = 1
    with pytest.raises(UnsupportedState, match=r"attributes that are not fields.*extra"):
        plan_shard({"a": plan})


class Holder:
    state = None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_unknown_names_are_listed_by_path_and_nothing_changes():
    for kind in (Phase, Span):
        ecckpt.register(kind)
    holder = Holder()
    holder.state = {"span": Span(1)}
    shard = shard_of(
        {"w": torch.ones(2), "a": {"b": [Phase.DECAY]}, "c": {Span(4)}, "holder": holder, "n": 1}
    )
    registry._by_name.clear()
    live = {"w": torch.zeros(2), "a": {"b": [None]}, "c": None, "holder": Holder(), "n": 0}
    with pytest.raises(StateMismatch) as caught:
        load(live, shard)
    assert [text.split(":")[0] for text in caught.value.problems] == [
        "a.b.0",
        "c.{}",
        "holder.span",
    ]
    assert all("not registered here" in text for text in caught.value.problems)
    assert "'Phase'" in caught.value.problems[0]
    assert not live["w"].any()
    assert live["n"] == 0
    for kind in (Phase, Span):
        ecckpt.register(kind)
    load(live, shard)
    assert live["holder"].state == {"span": Span(1)}
    assert live["c"] == {Span(4)}


def test_what_was_read_compares_and_is_written_as_it_was():
    ecckpt.register(Span)
    shard = shard_of({"a": {Span(1): Span(2)}, "b": {Span(1): Span(2)}, "c": {Span(3): None}})
    tree = shard.tree()
    assert tree["a"] == tree["b"] == shard.tree()["a"]
    assert tree["a"].keys() != tree["c"].keys()
    registry._by_name.clear()
    registry._by_kind.clear()
    assert pack(Encoder().encode(tree, ())) == pack(Encoder().encode(shard.tree(), ()))
    again = shard_of(tree)
    ecckpt.register(Span)
    live = {"a": None, "b": None, "c": None}
    load(live, again)
    assert live == {"a": {Span(1): Span(2)}, "b": {Span(1): Span(2)}, "c": {Span(3): None}}


def test_a_class_that_changed_is_named_and_nothing_changes():
    ecckpt.register(Phase)
    ecckpt.register(Span)
    shard = shard_of({"w": torch.ones(1), "phase": Phase.DECAY, "span": Span(1)})

    class Fewer(enum.Enum):
        WARM_UP = 1

    @dataclasses.dataclass
    class Wider:
        start: int
        width: int

    for kind, old in ((Fewer, Phase), (Wider, Span)):
        registry._by_kind.pop(old)
        registry._by_name.pop(old.__qualname__)
        ecckpt.register(kind, name=old.__qualname__)
    live = {"w": torch.zeros(1), "phase": None, "span": None}
    with pytest.raises(StateMismatch) as caught:
        load(live, shard)
    assert "phase: decode() of Phase failed" in caught.value.problems[0]
    assert "DECAY" in caught.value.problems[0]
    assert "['start', 'stop']" in caught.value.problems[1]
    assert not live["w"].any()


def test_what_decodes_to_no_key_is_named():
    ecckpt.register(Span)
    shard = shard_of({"a": {Span(1): 2}, "b": {Span(1)}})
    ecckpt.register(Span, encode=str, decode=lambda payload: [payload])
    with pytest.raises(StateMismatch) as caught:
        load({"a": None, "b": None}, shard)
    assert [text.split(":")[0] for text in caught.value.problems] == ["a", "b"]


def test_names_are_unique_and_a_class_may_be_registered_again():
    ecckpt.register(Span)

    def namesake():
        @dataclasses.dataclass
        class Span:
            start: int

        return Span

    other = namesake()
    ecckpt.register(other)  # its qualified name differs
    with pytest.raises(InvalidConfig, match=r"'Span' is registered for .*test_registry.Span"):
        ecckpt.register(other, name="Span")
    ecckpt.register(namesake())  # the same definition, run again
    with pytest.raises(UnsupportedState):
        plan_shard({"a": other(1)})
    ecckpt.register(Span, name="span/1")
    assert restored(Span(3)) == Span(3)
    assert registry.codec_named("Span") is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (int, {}),
        (dict, {}),
        (torch.nn.Linear, {}),
        (torch.nn.Parameter, {}),
        (Decimal, {}),
        (Decimal, {"encode": str}),
        (Decimal, {"decode": Decimal}),
        (3, {}),
    ],
)
def test_what_cannot_be_registered(kind, options):
    with pytest.raises(InvalidConfig):
        ecckpt.register(kind, **options)


def test_mutable_values_keep_their_identity():
    state = {
        "default": defaultdict(int, a=1),
        "counter": Counter("aab"),
        "deque": deque([1, 2], maxlen=3),
        "set": {1, 2},
        "bytes": bytearray(b"xyz"),
        "array": np.arange(3.0),
        "deep": [deque([1])],
    }
    live = {
        "default": defaultdict(list, z=[]),
        "counter": Counter("zz"),
        "deque": deque([9], maxlen=3),
        "set": {9},
        "bytes": bytearray(b"ab"),
        "array": np.zeros(3),
        "deep": [deque([9, 9])],
    }
    before = dict(live, deeper=live["deep"][0])
    load(live, shard_of(state))
    assert all(live[key] is before[key] for key in live)
    assert live["deep"][0] is before["deeper"]
    assert {key: value for key, value in live.items() if key != "array"} == {
        key: value for key, value in state.items() if key != "array"
    }
    assert live["array"].tolist() == [0, 1, 2]
    assert live["default"].default_factory is int
    assert live["deque"].maxlen == 3


def test_what_does_not_fit_is_replaced():
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    exported = bytearray(b"ab")
    view = memoryview(exported)
    live = {"d": deque([9], 1), "a": np.zeros(2), "f": frozen, "b": exported}
    live["e"] = np.broadcast_to(np.zeros(1), (3,))
    one = np.arange(3.0)
    state = {"d": deque([1, 2], 2), "a": one, "f": one, "b": bytearray(b"abc"), "e": one}
    load(live, shard_of(state))
    assert live["d"] == deque([1, 2], 2)
    assert live["d"].maxlen == 2
    assert live["b"] == b"abc"
    assert all(live[key].tolist() == [0, 1, 2] for key in "afe")
    assert not frozen.any()
    view.release()


def test_tensors_in_every_container():
    def make(fill):
        full = [torch.full((2,), fill + index) for index in range(4)]
        default = defaultdict(dict, {3: {"x": full[0]}})
        return {
            "default": default,
            "deque": deque([full[1], (full[2],)], 5),
            "c": Counter(a=full[3]),
        }

    live = make(0.0)
    inside = live["deque"][0]
    load(live, shard_of(make(5.0)))
    assert inside.tolist() == [6.0, 6.0]
    assert live["deque"][1][0].tolist() == [7.0, 7.0]
    assert live["default"][3]["x"].tolist() == [5.0, 5.0]
    assert live["c"]["a"].tolist() == [8.0, 8.0]
    holder = Holder()
    holder.state = make(5.0)
    other = Holder()
    load({"h": other}, shard_of({"h": holder}))
    assert type(other.state["c"]) is Counter
    assert other.state["deque"].maxlen == 5
    assert other.state["default"].default_factory is dict
    assert torch.equal(other.state["deque"][0], holder.state["deque"][0])
