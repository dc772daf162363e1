"""Any state: random trees of tensors and values of every kind come back exactly."""

import math
from collections import OrderedDict, defaultdict, deque
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import load
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.tensors.dtypes import STORED
from ecckpt.state.tree.nodes import dict_like, items_like
from tests.support.trees import KEYS, VALUES, same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

DTYPES = sorted(STORED, key=str)
LAYOUTS = {
    "plain": lambda tensor: tensor,
    "reversed dimensions": lambda tensor: tensor.permute(list(range(tensor.dim()))[::-1]),
    "every second": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.expand(3, *tensor.shape),
    "conjugate": lambda tensor: tensor.conj() if tensor.is_complex() else tensor,
    "negative": lambda tensor: tensor.conj().imag if tensor.dtype == torch.complex64 else tensor,
    "channels last": lambda tensor: (
        tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
    ),
}


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size_bytes = math.prod(shape) * dtype.itemsize
    seed = draw(st.integers(0, 9))
    # Aligned to its element: torch.view wants that of memory that numpy made.
    data = np.random.default_rng(seed).integers(0, 256, size_bytes + 16, np.uint8)
    if dtype is torch.bool:
        data %= 2
    tensor = torch.from_numpy(data)[:size_bytes].view(dtype).view(shape)
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](tensor)


def trees(leaves):
    return st.recursive(
        leaves,
        lambda parts: (
            st.lists(parts, max_size=3)
            | st.lists(parts, max_size=3).map(tuple)
            | st.lists(parts, max_size=3).map(deque)
            | st.dictionaries(KEYS, parts, max_size=3)
            | st.dictionaries(KEYS, parts, max_size=3).map(OrderedDict)
            | st.dictionaries(KEYS, parts, max_size=3).map(partial(defaultdict, list))
            | parts.map(lambda part: [part, part])  # tied
        ),
        max_leaves=8,
    )


STATES = st.dictionaries(st.text(max_size=5) | KEYS, trees(tensors() | VALUES), max_size=4)


def saved(state, previous=None):
    plan = plan_shard(state, previous=previous)
    target = bytearray(b"\xaa" * plan.shard_bytes)
    plan.write(memoryview(target))
    return memoryview(target), plan


def blank(tree):
    """A live state of the same form around its tensors, with other contents."""
    if isinstance(tree, torch.Tensor):
        return torch.empty(tree.shape, dtype=tree.dtype)
    if not holds_tensors(tree):
        return None
    if isinstance(tree, dict):
        return dict_like(tree, [(key, blank(part)) for key, part in tree.items()])
    return items_like(tree, map(blank, tree))


def holds_tensors(tree):
    if isinstance(tree, dict):
        return any(map(holds_tensors, tree.values()))
    if type(tree) in (list, tuple, deque):
        return any(map(holds_tensors, tree))
    return isinstance(tree, torch.Tensor)


def assert_comes_back(state, buffer):
    live = {key: blank(part) for key, part in state.items()}
    load(live, read_shard(buffer))
    assert same(live, state)
    safetensors.torch.load(bytes(buffer))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STATES)
def test_any_state_comes_back_exactly(state):
    assert_comes_back(state, saved(state)[0])


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STATES, min_size=2, max_size=3))
def test_a_plan_never_leaks_into_the_next_state(states):
    """Structure that grows, shrinks or changes between saves; each is stored as it is then."""
    plan = None
    for state in [*states, states[0], {**states[0], **states[1]}]:
        buffer, plan = saved(state, plan)
        assert_comes_back(state, buffer)
