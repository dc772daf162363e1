"""Values: every type comes back as itself, everything else is refused by path and name."""

import datetime
import enum
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import suppress
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.errors import CorruptFragment, UnsupportedState
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import load
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.tree.decoding import decode
from ecckpt.state.tree.encoding import Encoder
from ecckpt.state.tree.resolving import resolve
from ecckpt.state.tree.values import COUNTER, DEFAULT, DEPTH_MAX, DEQUE, PATH, extension, pack
from ecckpt.state.tree.values import REGISTERED as REGISTERED_CODE
from tests.support.trees import VALUES, Colour, Point, same


def round_trip(value):
    problems = []
    stored = decode(pack(Encoder().encode(value, ())), [].__getitem__)
    tree = resolve(stored, lambda *problem: problems.append(problem))
    assert not problems
    return tree


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_any_tree_of_values_comes_back_as_it_was(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63) - 1,
        2**64,
        -(2**4000),
        math.nan,
        -math.inf,
        -0.0,
        complex(-0.0, math.nan),
        "half a pair: \ud800",
        {1: "int"},
        {True: "bool"},
        {1.0: "float"},
        {None: 0, b"x": 1, (1, ("a", None)): 2, "": 3},
        {},
        [[], (), {}, set(), OrderedDict(), defaultdict(), Counter(), deque(), bytearray()],
        defaultdict(None, a=1),
        defaultdict(defaultdict, {1: defaultdict(int, {2: 3})}),
        Counter("abca"),
        Counter({"a": -1.5}),
        deque([1, [2]], maxlen=2),
        deque(maxlen=0),
        bytearray(b"\0x"),
        pathlib.Path("/a/b c"),
        pathlib.Path("caf\udce9"),
        pathlib.PurePosixPath("a"),
        pathlib.PureWindowsPath("c:/a"),
        {1j: 0, pathlib.Path(): 1, torch.int8: 2, Colour.RED: 3, Point(1): 4},
        {Colour.RED, (Point(2), 3)},
        torch.Size([2, 0, 3]),
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.device("cuda", 3),
        torch.device("cpu"),
        np.float32(1.5),
        np.bool_(True),
        np.int64(-7),
        np.str_(""),
        np.str_("text"),
        np.bytes_(b"bytes"),
        np.datetime64("2024-02-29T12:00", "s"),
        np.complex128(1 - 2j),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.zeros((0, 3), np.float16),
        np.array(3.5),
        np.array(["a", "bcd"]),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::3],
    ],
    ids=repr,
)
def test_rarer_values_come_back_as_they_were(value):
    assert same(round_trip(value), value)


def test_arrays_come_back_writable_and_their_own():
    array = np.arange(4)
    restored = round_trip({"a": array})["a"]
    restored += 1
    assert array.tolist() == [0, 1, 2, 3]


def test_equal_sets_give_equal_bytes():
    words = [f"word {number}" for number in range(50)]
    one, other = set(words), set()
    other.update(words[25:], words[:25])
    assert pack(Encoder().encode(one, ())) == pack(Encoder().encode(other, ()))


class Unknown(enum.IntEnum):
    RED = 1


class MyList(list):
    pass


class NoState:
    state_dict = None


REFUSED = {
    "Unknown": Unknown.RED,
    "Decimal": Decimal(1),
    "datetime.date": datetime.date(2024, 1, 1),
    "slice": slice(1),
    "range": range(3),
    "a defaultdict": defaultdict(lambda: 1),
    "memoryview": memoryview(b"x"),
    "Pair": namedtuple("Pair", "x")(1),
    "MyList": MyList([1]),
    "function": same,
    "NoState": NoState(),
    "type": torch.nn.Linear,
    "object": np.array([object()]),
    "numpy.ndarray|matrix": np.ma.masked_array([1]),
    "datetime64|numpy void": np.zeros(1, [("x", "i4")])[0],
    "torch.strided|layout": torch.strided,
}


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_by_path_and_type(name):
    with pytest.raises(UnsupportedState) as caught:
        plan_shard({"progress": {"deep": [1, REFUSED[name]]}})
    assert caught.value.path == "progress.deep.1"
    assert caught.value.kind
    assert caught.value.hint
    if "|" not in name:
        assert name in str(caught.value)


@pytest.mark.parametrize("key", [frozenset({1}), Unknown.RED, np.int64(1), (1, Unknown.RED)])
def test_other_keys_are_refused(key):
    with pytest.raises(UnsupportedState, match=r"^progress.*: cannot store a dict key of type"):
        plan_shard({"progress": {key: 1}})


def test_tensors_are_refused_in_sets_and_as_keys():
    tensor = torch.zeros(1)
    with pytest.raises(UnsupportedState, match=r"progress\.\{\}: cannot store torch\.Tensor"):
        plan_shard({"progress": {tensor}})
    with pytest.raises(UnsupportedState, match=r"a dict key of type torch\.Tensor"):
        plan_shard({"progress": {tensor: 1}})


def nested(levels, wrap):
    value = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}]
)
def test_depth_is_limited_in_both_directions(wrap):
    deepest = nested(DEPTH_MAX, wrap)
    assert round_trip(deepest) == deepest
    state = {"x": nested(DEPTH_MAX, wrap)}
    load(state, read_shard(saved(state)))
    with pytest.raises(UnsupportedState, match=f"more than {DEPTH_MAX} levels"):
        plan_shard({"x": nested(DEPTH_MAX + 1, wrap)})


def test_a_container_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="levels deep"):
        plan_shard({"loop": loop})


def saved(state):
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return memoryview(target)


def bomb(code, levels):
    data = b"\xc0"
    for _ in range(levels):
        data = b"\xc9" + len(data).to_bytes(4, "big") + bytes([code]) + data
    return data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # a list of four billion
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100 + b"\xc0",
        b"\x91" * 5000 + b"\xc0",
        bomb(1, 1000),
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xd4\x63\x00",  # an unknown extension
        b"\xd4\x00\x09",  # a tensor that is not there
        b"\xd4\x0b\x01",  # a dtype of one unprintable letter
        b"\xc7\x04\x0bload",  # torch.load is no dtype
        b"\xc7\x05\x0cmoon!",
        pack(Encoder().encode({1: 2}, ())).replace(b"\x92\x01\x02", b"\x92\xc0\xc1"),
        extension(DEFAULT, ["eval"]),
        extension(DEFAULT, [None, 1]),
        extension(DEFAULT, []),
        extension(DEQUE, [1, [1, 2]]),
        extension(DEQUE, [-1, []]),
        extension(DEQUE, [None, "ab"]),
        extension(PATH, ["path", 1]),
        extension(PATH, ["other", "a"]),
        extension(COUNTER, [1]),
        extension(REGISTERED_CODE, [1, 2]),
        extension(REGISTERED_CODE, ["Colour"]),
        b"\xc0\xc0",
        b"\x81\x01\x02",  # msgpack's own map with a key that is no text
    ],
    ids=lambda data: repr(data)[:30],
)
def test_malformed_values_are_corrupt(data):
    data = data if isinstance(data, bytes) else pack(data)
    with pytest.raises(CorruptFragment):
        decode(data, [].__getitem__)


@pytest.mark.parametrize(
    "parts",
    [
        ["|O", [1], b"12345678"],
        ["<i8", [2], b"12345678"],
        ["<i8", [-1], b"12345678"],
        ["<i8", [2**62, 4], b""],
        ["<U0", [10**18], b""],
        ["<S999999999", [0], b""],
        ["i4,i4", [1], b"12345678"],
        ["<i8", "ab", b"12345678"],
        [b"<i8", [1], b"12345678"],
        ["<i8", [1.0], b"12345678"],
        ["<i8"],
    ],
    ids=repr,
)
def test_malformed_arrays_are_corrupt_or_empty(parts):
    data = pack(Encoder().encode(parts, ()))
    data = b"\xc9" + len(data).to_bytes(4, "big") + b"\x08" + data
    with suppress(CorruptFragment):
        assert decode(data, [].__getitem__).nbytes == 0


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_crash_the_decoder(data):
    with suppress(CorruptFragment):
        decode(data, [].__getitem__)
