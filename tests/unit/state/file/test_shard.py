"""Shards: any tree of tensors and values goes through, and plain safetensors opens them."""

import json
import math
import mmap
from collections import OrderedDict

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ecckpt.errors import InvalidBuffer, UnsupportedState, WrongOrder
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import load
from ecckpt.state.paths import VALUES_NAME, tensor_names
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.tensors.dtypes import BYTES_NAMES, STORED


def saved(state, previous=None):
    plan = plan_shard(state, previous=previous)
    target = bytearray(b"\xaa" * plan.shard_bytes)
    plan.write(memoryview(target))
    return memoryview(target)


def bits(tensor):
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same(one, other):
    """The same tree: types, keys, and tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(bits(one), bits(other))
    elif isinstance(one, dict | list | tuple):
        assert type(one) is type(other)
        assert len(one) == len(other)
        keys = one if isinstance(one, dict) else range(len(one))
        for key in keys:
            assert_same(one[key], other[key])
    else:
        assert repr(one) == repr(other)


def blank(tree):
    """A live state of the same form, with other contents."""
    if isinstance(tree, torch.Tensor):
        return torch.empty(tree.shape, dtype=tree.dtype)
    if isinstance(tree, dict):
        return type(tree)((key, blank(value)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(map(blank, tree))
    return None


def restored(state, buffer=None):
    live = blank(state)
    load(live, read_shard(buffer if buffer is not None else saved(state)))
    return live


def tensor_of(dtype, shape, seed=0):
    count = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, max(count, 16), np.uint8)
    if dtype is torch.bool:
        data %= 2
    return torch.from_numpy(data)[:count].view(dtype).view(shape)


SHAPES = [(), (1,), (0,), (0, 4), (4, 0), (3, 5)]


@pytest.mark.parametrize("dtype", sorted(STORED, key=str), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_in_every_shape(dtype):
    state = {str(shape): tensor_of(dtype, shape) for shape in SHAPES}
    state["strided"] = tensor_of(dtype, (6, 4))[::2, 1:3]
    state["transposed"] = tensor_of(dtype, (6, 4)).t()
    state["expanded"] = tensor_of(dtype, (1, 4)).expand(3, 4)
    buffer = saved(state)
    assert_same(restored(state, buffer), state)
    loaded = safetensors.torch.load(bytes(buffer))
    for name, tensor in state.items():
        view = loaded[name].view(dtype).view(tensor.shape) if tensor.numel() else loaded[name]
        assert torch.equal(bits(view), bits(tensor))
        if dtype not in BYTES_NAMES:
            assert loaded[name].dtype == dtype


def test_layouts_are_stored_by_their_elements():
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    spectrum = torch.randn(4, 3, dtype=torch.complex64)
    state = {
        "channels_last": base.to(memory_format=torch.channels_last),
        "flipped": base.flip(0)[:, 1],
        "conj": spectrum.conj(),
        "conj_t": spectrum.mH,
        "neg": spectrum.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "graph": torch.randn(3, requires_grad=True) * 2,
    }
    assert state["neg"].is_neg()
    assert_same(restored(state), blank_values(state))


def blank_values(state):
    return {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in state.items()}


def test_live_layouts_are_filled_as_they_are():
    want = torch.randn(2, 3, 4, 4)
    spectrum = torch.randn(4, dtype=torch.complex64)
    buffer = saved({"x": want, "s": spectrum, "e": torch.full((3, 2), 5.0)})
    live = {
        "x": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "s": torch.zeros(4, dtype=torch.complex64).conj(),
        "e": torch.zeros(1, 2).expand(3, 2),
    }
    load(live, read_shard(buffer))
    assert torch.equal(live["x"], want)
    assert live["x"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(live["s"], spectrum)
    assert live["e"].tolist() == [[5.0, 5.0]] * 3


def test_a_view_costs_its_own_elements_only():
    base = torch.arange(2**20)
    state = {f"view {index}": base[index * 10 : index * 10 + 10] for index in range(100)}
    assert plan_shard(state).shard_bytes < 100 * 10 * 8 + 20_000
    assert_same(restored(state), state)


def test_tied_tensors_are_stored_once_and_untied_ones_twice():
    weight = torch.randn(100, 10)
    state = {"a": weight, "b": weight, "c": weight.detach(), "t": weight.t(), "copy": weight + 0}
    buffer = saved(state)
    shard = read_shard(buffer)
    assert shard.aliases == {"b": "a", "c": "a"}
    assert shard.tensors["b"] is shard.tensors["a"]
    assert set(safetensors.torch.load(bytes(buffer))) == {"a", "t", "copy", VALUES_NAME}
    assert_same(restored(state, buffer), state)
    tied = torch.empty_like(weight)
    live = blank(state) | {"a": tied, "b": tied, "c": tied}
    load(live, shard)
    assert live["a"] is live["b"]
    assert_same(live, state)


def test_empty_and_overlapping_tensors_are_not_tied():
    base = torch.arange(10.0)
    state = {"e1": torch.empty(0), "e2": torch.empty(0), "lo": base[:6], "hi": base[4:]}
    assert not read_shard(saved(state)).aliases
    assert_same(restored(state), state)


def test_the_file_is_plain_safetensors(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {"model": model, "ids": torch.arange(5), "half": torch.ones(3).half(), "step": 3}
    buffer = saved(state)
    path = tmp_path / "shard.safetensors"
    path.write_bytes(buffer)
    loaded = safetensors.torch.load_file(path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded[f"model.{key}"], tensor)
    assert torch.equal(loaded["ids"], state["ids"])
    header_bytes = int.from_bytes(buffer[:8], "little")
    header = json.loads(bytes(buffer[8 : 8 + header_bytes]))
    assert (8 + header_bytes) % 64 == 0
    assert list(header)[-1] == VALUES_NAME
    assert header[VALUES_NAME]["data_offsets"][1] == len(buffer) - 8 - header_bytes
    assert header["__metadata__"]["ecckpt.format"] == "1"


KEYS = st.integers(-3, 3) | st.text(".%ab", max_size=3) | st.booleans() | st.none() | st.binary()
TENSORS = st.builds(
    tensor_of,
    st.sampled_from(sorted(STORED - {torch.complex32}, key=str)),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 9),
)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        TENSORS | st.integers() | st.floats() | st.text() | st.none(),
        lambda nodes: (
            st.lists(nodes, max_size=3)
            | st.lists(nodes, max_size=3).map(tuple)
            | st.dictionaries(KEYS, nodes, max_size=3)
            | st.dictionaries(KEYS, nodes, max_size=3).map(OrderedDict)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(max_examples=120, deadline=None)
@given(TREES, TREES)
def test_any_tree_comes_back_and_previous_changes_nothing(state, other):
    buffer = saved(state)
    assert_same(restored(state, buffer), state)
    safetensors.torch.load(bytes(buffer))
    for previous in (plan_shard(state), plan_shard(other)):
        assert saved(state, previous) == buffer


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(KEYS, min_size=1, max_size=3).map(tuple), max_size=8))
def test_names_never_collide(paths):
    unique = {repr(path): path for path in paths}
    assert len(set(tensor_names(list(unique.values())))) == len(unique)


def test_keys_of_any_kind_stay_apart():
    tensors = [torch.full((1,), float(number)) for number in range(9)]
    state = {
        "a.b": tensors[0],
        "a": {"b": tensors[1], "%sb": tensors[2]},
        1: {"x": tensors[3]},
        "1": {"x": tensors[4], "\ud800\u00e9": tensors[5]},
        "__metadata__": tensors[6],
        VALUES_NAME: tensors[7],
        "": {"": tensors[8]},
    }
    buffer = saved(state)
    assert_same(restored(state, buffer), state)
    assert len(safetensors.torch.load(bytes(buffer))) == 10


def test_previous_is_reused_while_only_contents_change():
    state = {"w": torch.zeros(4), "losses": [1.0]}
    first = plan_shard(state)
    first.write(memoryview(bytearray(first.shard_bytes)))
    state["w"] = torch.ones(4)
    state["losses"] += [2.0] * 100
    second = plan_shard(state, previous=first)
    assert second._layout is first._layout
    assert_same(restored(state, saved(state, first)), state)
    state["w"] = torch.ones(4, dtype=torch.float64)
    assert plan_shard(state, previous=second)._layout is not second._layout


def test_write_fills_a_mapping_and_forgets_the_state():
    tensor = torch.arange(1000)
    plan = plan_shard({"x": tensor, "t": tensor.reshape(10, 100).t()})
    with mmap.mmap(-1, plan.shard_bytes + 5000) as slot:
        plan.write(slot)
        view = memoryview(slot)
        shard = read_shard(view[: plan.shard_bytes])
        assert torch.equal(shard.tensors["x"], tensor)
        assert not any(view[plan.shard_bytes :])
        del shard
        view.release()
    with pytest.raises(WrongOrder):
        plan.write(memoryview(bytearray(plan.shard_bytes)))


def test_a_target_that_does_not_fit_is_refused():
    plan = plan_shard({"x": torch.zeros(3)})
    with pytest.raises(InvalidBuffer, match="writable"):
        plan.write(memoryview(bytearray(plan.shard_bytes - 1)))
    with pytest.raises(InvalidBuffer, match="read-only"):
        plan.write(memoryview(bytes(plan.shard_bytes)))


def test_the_snapshot_is_of_the_moment():
    state = {
        "w": torch.zeros(1000),
        "step": torch.tensor(1.0),
        "array": np.zeros(3),
        "losses": [1.0, [2.0]],
        "progress": {"step": 1},
    }
    plan = plan_shard(state)
    state["losses"][1].append(3.0)
    state["array"] += 1
    state["progress"]["step"] = 2
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    state["w"].add_(1)
    state["step"].add_(1)
    live = {"w": torch.ones(1000), "step": torch.tensor(5.0), "array": None}
    live |= {"losses": None, "progress": {}}
    load(live, read_shard(memoryview(target)))
    assert not live["w"].any()
    assert live["step"] == 1.0
    assert not live["array"].any()
    assert (live["losses"], live["progress"]) == ([1.0, [2.0]], {"step": 1})


def test_nothing_restored_looks_into_the_buffer():
    parameter = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    state = {"w": torch.randn(5), "optim": optimizer, "array": np.arange(3.0)}
    buffer = saved(state)
    other = torch.nn.Parameter(torch.zeros(4))
    live = {"w": torch.zeros(5), "optim": torch.optim.Adam([other]), "array": None}
    load(live, read_shard(buffer))
    want = [live["w"].clone(), live["optim"].state[other]["exp_avg"].clone(), live["array"].copy()]
    buffer[:] = b"\x55" * len(buffer)
    assert torch.equal(live["w"], want[0])
    assert torch.equal(live["optim"].state[other]["exp_avg"], want[1])
    assert np.array_equal(live["array"], want[2])


class Wrapper(torch.Tensor):
    pass


def fake_tensor():
    with FakeTensorMode():
        return torch.empty(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.empty(2, device="meta"), "meta"),
        (fake_tensor, "FakeTensor"),
        (lambda: torch.ones(2).as_subclass(Wrapper), "Wrapper"),
        (torch.nn.parameter.UninitializedParameter, "UninitializedParameter"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "bits8"),
    ],
)
def test_tensors_without_plain_memory_are_refused(make, name):
    with pytest.raises(UnsupportedState, match=name) as caught:
        plan_shard({"model": {"w": [make()]}})
    assert caught.value.path == "model.w.0"
    assert "leave it out" in caught.value.hint


def test_the_state_is_a_dict():
    for state in ([torch.ones(1)], torch.nn.Linear(1, 1), None):
        with pytest.raises(UnsupportedState, match="pass a dict"):
            plan_shard(state)


class Outer:
    def __init__(self, inner):
        self.inner = inner

    def state_dict(self):
        return {"inner": self.inner}

    def load_state_dict(self, state_dict):
        self.inner = state_dict["inner"]


def test_an_object_in_the_state_of_an_object_is_refused():
    with pytest.raises(UnsupportedState) as caught:
        plan_shard({"outer": Outer(torch.nn.Linear(1, 1))})
    assert caught.value.path == "outer.inner"
    buffer = saved({"outer": Outer({"x": torch.ones(2), "n": (1,)})})
    live = Outer(None)
    load({"outer": live}, read_shard(buffer))
    assert torch.equal(live.inner["x"], torch.ones(2))
    assert live.inner["n"] == (1,)
