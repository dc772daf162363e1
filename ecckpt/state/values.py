"""Everything in a state that is no tensor, as msgpack: the encoder.

Plain msgpack types mean themselves; every other type is an extension whose payload is msgpack
again, so that a tuple comes back a tuple and the key 1 never becomes "1". Nothing here can name
code to run. `reading.py` is the other half.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgpack
import numpy as np
import torch

from ecckpt.errors import UnsupportedState
from ecckpt.state.paths import Path, describe

DEPTH_MAX = 64
PLAIN = frozenset({type(None), bool, int, float, str, bytes})
# What numpy calls the kinds whose bytes are the whole value: no objects, no structures.
NUMPY_KINDS = "biufcSUmM"

# Extension codes. They are part of the format: add, never renumber.
TENSOR, TUPLE, PAIRS, ORDERED, SET, FROZENSET, BIG_INT, COMPLEX = range(8)
ARRAY, SCALAR, SIZE, DTYPE, DEVICE, OBJECT = range(8, 14)

_WAYS_OUT = (
    "turn it into numbers, text, bytes, lists, tuples, dicts, sets, numpy arrays or tensors, "
    "wrap it in an object with state_dict() and load_state_dict(), or leave it out of the state"
)


def kind_name(value: object) -> str:
    """The type of ``value`` as messages show it."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def refuse(value: Any, path: Path) -> NoReturn:
    """Raise ``UnsupportedState`` for ``value``: the leaf function where only values may be."""
    raise UnsupportedState(describe(path), kind_name(value), hint=_WAYS_OUT)


def extension(code: int, payload: Any) -> msgpack.ExtType:
    """``payload``, packed, under one of the codes above."""
    return msgpack.ExtType(code, pack(payload))


def pack(encoded: Any) -> bytes:
    """What ``Encoder.encode`` returned, as bytes."""
    packed: bytes = msgpack.packb(
        encoded, default=_big_int, strict_types=True, unicode_errors="surrogatepass"
    )
    return packed


class Encoder:
    """Turns a tree of values into what ``pack`` takes.

    ``leaf(value, path)`` is called for whatever is no value (tensors, objects with a state): it
    returns something already encoded, or raises ``UnsupportedState``.
    """

    def __init__(self, leaf: Callable[[Any, Path], Any] = refuse) -> None:
        self._leaf = leaf

    def encode(self, value: Any, path: Path) -> Any:
        """``value`` as plain msgpack types and extensions; raises ``UnsupportedState``."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if len(path) > DEPTH_MAX:
            raise UnsupportedState(
                f"{describe(path[:4])}...",
                f"{kind_name(value)} more than {DEPTH_MAX} levels deep",
                hint="flatten it; a container that holds itself cannot be stored",
            )
        if kind is dict:
            return self._dict(value, path)
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return extension(TUPLE, self._items(value, path))
        if kind is OrderedDict:
            return extension(ORDERED, self._pairs(value, path))
        return self._rare(value, path)

    def _items(self, items: list[Any] | tuple[Any, ...], path: Path) -> list[Any]:
        if PLAIN.issuperset(map(type, items)):  # a long list of numbers costs no Python per number
            return list(items)
        return [self.encode(item, (*path, index)) for index, item in enumerate(items)]

    def _dict(self, values: dict[Any, Any], path: Path) -> Any:
        if {str}.issuperset(map(type, values)):
            return {
                key: value if type(value) in PLAIN else self.encode(value, (*path, key))
                for key, value in values.items()
            }
        return extension(PAIRS, self._pairs(values, path))

    def _pairs(self, values: dict[Any, Any], path: Path) -> list[Any]:
        pairs: list[Any] = []
        for key, value in values.items():
            pairs += (_key(key, path), self.encode(value, (*path, key)))
        return pairs

    def _rare(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind is complex:
            return msgpack.ExtType(COMPLEX, struct.pack(">dd", value.real, value.imag))
        if kind is set or kind is frozenset:
            return extension(SET if kind is set else FROZENSET, _members(value, path))
        if kind is np.ndarray or isinstance(value, np.generic):
            return _numpy(value, path)
        if kind is torch.Size:
            return extension(SIZE, [int(size) for size in value])
        if kind is torch.dtype or kind is torch.device:
            text = str(value).removeprefix("torch.")
            return msgpack.ExtType(DTYPE if kind is torch.dtype else DEVICE, text.encode())
        return self._leaf(value, path)


def _key(key: Any, path: Path) -> Any:
    if type(key) in PLAIN:
        return key
    if type(key) is tuple and len(path) <= DEPTH_MAX:
        return extension(TUPLE, [_key(part, (*path, key)) for part in key])
    raise UnsupportedState(
        describe(path),
        f"a dict key of type {kind_name(key)}",
        hint="keys may be text, bytes, numbers, bools, None, and tuples of these",
    )


def _members(members: Iterable[Any], path: Path) -> list[Any]:
    encoder = Encoder()
    # Sorted by their bytes: two equal sets give two equal shards, whatever the hash seed.
    return sorted((encoder.encode(member, (*path, "{}")) for member in members), key=pack)


def _numpy(value: Any, path: Path) -> msgpack.ExtType:
    array = np.asarray(value)
    if array.dtype.kind not in NUMPY_KINDS:
        raise UnsupportedState(
            describe(path),
            f"a numpy {type(value).__name__} of dtype {array.dtype}",
            hint="split structures into one array per field, objects into lists of values",
        )
    if array.dtype.itemsize == 0:  # text of length zero: numpy pads with NULs, and strips them
        array = array.astype(f"{array.dtype.kind}1")
    if isinstance(value, np.generic):
        return extension(SCALAR, [array.dtype.str, array.tobytes()])
    return extension(ARRAY, [array.dtype.str, list(array.shape), array.tobytes()])


def _big_int(value: Any) -> msgpack.ExtType:
    """Called by msgpack for the one thing that it cannot hold by itself."""
    if type(value) is not int:
        raise TypeError(f"{kind_name(value)} was not encoded")
    return msgpack.ExtType(BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
