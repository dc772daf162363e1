"""Values of every kind, and whether two of them are the same: for several test files."""

import dataclasses
import enum
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial

import numpy as np
import torch
from hypothesis import strategies as st

import ecckpt


@ecckpt.register
class Colour(enum.IntEnum):
    RED = 1


@ecckpt.register
@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: tuple = ()


REGISTERED = (Colour.RED, Point(1), Point(2, (Colour.RED, Point(3))))


def bits(tensor):
    """The bytes of a tensor's elements, in order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(one, other):
    """Equal in type and value all the way down; NaN equals NaN, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        if getattr(one, "default_factory", None) is not getattr(other, "default_factory", None):
            return False
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple | deque):
        if getattr(one, "maxlen", None) != getattr(other, "maxlen", None):
            return False
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and repr(one) == repr(other)
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return one == other


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
    | st.binary().map(bytearray)
    | st.text(st.characters(exclude_characters="\0"), max_size=9).map(pathlib.Path)
    | st.sampled_from([np.float32(0.1), np.arange(3), torch.int8, torch.Size([2]), *REGISTERED])
)
KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, pathlib.PurePosixPath("a"), *REGISTERED]),
    lambda keys: st.lists(keys, max_size=3).map(tuple),
    max_leaves=4,
)
VALUES = st.recursive(
    SCALARS,
    lambda values: (
        st.lists(values, max_size=4)
        | st.lists(values, max_size=4).map(tuple)
        | st.dictionaries(KEYS, values, max_size=4)
        | st.dictionaries(KEYS, values, max_size=4).map(OrderedDict)
        | st.dictionaries(KEYS, values, max_size=4).map(partial(defaultdict, list))
        | st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter)
        | st.builds(deque, st.lists(values, max_size=4), st.none() | st.integers(0, 6))
        | st.frozensets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4).map(set)
    ),
    max_leaves=12,
)
