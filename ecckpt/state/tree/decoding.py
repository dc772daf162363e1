"""The decoder of the vocabulary in ``values.py``. It does not trust its input.

``file/shard.py`` decodes trees with it. Depth and memory are bounded by the input, and no code of
the user runs.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np
import torch

from ecckpt.errors import CorruptFragment
from ecckpt.state.tree import values
from ecckpt.state.tree.nodes import CONTAINERS, StoredObject, StoredTensor, StoredValue, dict_like
from ecckpt.state.tree.values import DEPTH_MAX, PLAIN

_LEAVES = PLAIN | {StoredTensor}
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSUmM]\d{1,9}(\[\d{0,9}[A-Za-z\u03bc]{1,8}\])?")
_TORCH_DTYPE = re.compile(r"[a-z][a-z0-9_]{1,31}")
# The exceptions that msgpack, numpy and torch raise in the parsers below for malformed bytes.
MALFORMED = (
    ValueError,
    TypeError,
    OverflowError,
    LookupError,
    RuntimeError,
    MemoryError,
    struct.error,
)


def decode(data: bytes, leaf: Callable[[int], Any]) -> Any:
    """Decode a tree that ``pack(Encoder(...).encode(...))`` has made.

    Args:
        data: the packed tree.
        leaf: called as ``leaf(index)`` for a reference to a tensor; raises ``LookupError`` if there
            is no such tensor.

    Returns:
        The tree, in new containers and arrays that the caller owns. Instances of registered classes
        are ``StoredValue``s.

    Raises:
        CorruptFragment: bytes that the encoder cannot have written.
    """
    try:
        tree = _Decoder(leaf).unpack(data)
        _check_nodes(tree)
    except (*MALFORMED, msgpack.UnpackException) as error:
        raise CorruptFragment(f"the values of a shard cannot be read: {error}") from error
    return tree


class _Decoder:
    def __init__(self, leaf: Callable[[int], Any]) -> None:
        self._leaf = leaf
        self._depth = 0

    def unpack(self, data: bytes) -> Any:
        if self._depth > DEPTH_MAX + 2:  # the encoder's levels, the root, and one object
            raise ValueError(f"more than {DEPTH_MAX} levels")
        self._depth += 1
        tree = msgpack.unpackb(data, ext_hook=self._extension, unicode_errors="surrogatepass")
        self._depth -= 1
        return tree

    def _extension(self, code: int, data: bytes) -> Any:
        if code == values.TENSOR:
            return self._leaf(int.from_bytes(data, "big"))
        if code in _RAW:
            return _RAW[code](data)
        if code == values.REGISTERED:
            return _registered(self.unpack(data), data)
        if code in _PACKED:
            return _PACKED[code](self.unpack(data))
        raise ValueError(f"unknown extension {code}")


def _pairs(items: list[Any]) -> zip[tuple[Any, Any]]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return zip(items[::2], items[1::2], strict=True)


def _array(parts: list[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    name, shape, data = parts
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"numpy dtype {name!r:.40}")
    dtype = np.dtype(name)
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("the bytes of a numpy array do not match its shape")
    return np.frombuffer(data, dtype).reshape(shape).copy()  # aligned and writable


def _scalar(parts: list[Any]) -> Any:
    name, data = parts
    return _array([name, [], data])[()]


def _dtype(data: bytes) -> torch.dtype:
    name = data.decode()
    dtype = getattr(torch, name, None) if _TORCH_DTYPE.fullmatch(name) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no such torch dtype: {name!r:.40}")
    return dtype


def _check_nodes(tree: Any) -> None:
    """Check depth and types, level by level: malformed input may be deeper than Python recurses."""
    level = [tree]
    for _ in range(DEPTH_MAX + 2):
        below: list[Any] = []
        for node in level:
            if type(node) is msgpack.Timestamp:
                raise ValueError("a msgpack timestamp")
            below += [child for child in _children(node) if type(child) not in _LEAVES]
        if not below:
            return
        level = below
    raise ValueError(f"more than {DEPTH_MAX} levels")


def _children(node: Any) -> Iterable[Any]:
    if type(node) is StoredObject:
        return (node.state,)
    if type(node) is StoredValue:
        return (node.payload,)
    if type(node) not in CONTAINERS:
        return ()
    return node.values() if isinstance(node, dict) else node


def _default(items: list[Any]) -> defaultdict[Any, Any]:
    name, *pairs = items
    factory = None if name is None else values.FACTORIES[name]
    return defaultdict(factory, _pairs(pairs))


def _deque(parts: list[Any]) -> deque[Any]:
    maxlen, items = parts
    if type(items) is not list or (maxlen is not None and len(items) > maxlen):
        raise ValueError("a deque is longer than its maxlen")
    return deque(items, maxlen)


def _path(parts: list[Any]) -> Any:
    kind, text = parts
    if type(text) is not str:
        raise TypeError("a path is not a text")
    return values.PATHS[kind](text)


def _registered(parts: list[Any], packed: bytes) -> StoredValue:
    name, payload = parts
    if type(name) is not str:
        raise TypeError("a value without the name of its class")
    return StoredValue(name, payload, packed)


def _object(parts: list[Any]) -> StoredObject:
    kind, state = parts
    if type(kind) is not str:
        raise TypeError("an object without the name of its class")
    return StoredObject(kind, state)


_RAW: dict[int, Callable[[bytes], Any]] = {
    values.BIG_INT: lambda data: int.from_bytes(data, "big", signed=True),
    values.COMPLEX: lambda data: complex(*struct.unpack(">dd", data)),
    values.BYTEARRAY: bytearray,
    values.DTYPE: _dtype,
    values.DEVICE: lambda data: torch.device(data.decode()),
}
_PACKED: dict[int, Callable[[Any], Any]] = {
    values.TUPLE: tuple,
    values.PAIRS: lambda items: dict(_pairs(items)),
    values.ORDERED: lambda items: OrderedDict(_pairs(items)),
    values.DEFAULT: _default,
    values.COUNTER: lambda items: dict_like(Counter(), _pairs(items)),
    values.DEQUE: _deque,
    values.SET: set,
    values.FROZENSET: frozenset,
    values.ARRAY: _array,
    values.SCALAR: _scalar,
    values.SIZE: torch.Size,
    values.PATH: _path,
    values.OBJECT: _object,
}
