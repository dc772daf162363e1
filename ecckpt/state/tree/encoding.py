"""The encoder of the vocabulary in ``values.py``: from a tree of values to msgpack types.

``tree.py`` encodes states with it, ``reshard/diff.py`` compares values by their encodings.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np
import torch

from ecckpt.errors import UnsupportedState
from ecckpt.state.paths import Path, describe
from ecckpt.state.tree import values
from ecckpt.state.tree.nodes import StoredValue
from ecckpt.state.tree.registry import codec_of
from ecckpt.state.tree.values import DEPTH_MAX, PLAIN, extension, kind_name, pack, refuse

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


class Encoder:
    """Encodes a tree of values for ``values.pack``.

    Args:
        leaf: called as ``leaf(value, path)`` for tensors, objects and unknown types. It returns an
            encoding, or raises ``UnsupportedState``.
        leaves: called as ``leaves(tensors, path)`` for a dict with text keys that has only tensors,
            the form of most large states; it returns the encoding of the dict. Without it, ``leaf``
            is called for each tensor.
    """

    def __init__(
        self,
        leaf: Callable[[Any, Path], Any] = refuse,
        leaves: Callable[[dict[str, torch.Tensor], Path], Any] | None = None,
    ) -> None:
        self._leaf = leaf
        self._leaves = leaves

    def encode(self, value: Any, path: Path) -> Any:
        """Return ``value`` as plain msgpack types and extensions.

        Raises ``UnsupportedState``, with the path, for a value that cannot be stored.
        """
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind in _TENSORS:
            return self._leaf(value, path)
        if len(path) > DEPTH_MAX:
            raise UnsupportedState(
                f"{describe(path[:4])}...",
                f"{kind_name(value)} more than {DEPTH_MAX} levels deep",
                hint="flatten it; a container that contains itself cannot be stored",
            )
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self, value, path)
        scalar = _scalar(value, path)
        return self._registered(value, path) if scalar is None else scalar

    def _items(self, items: Iterable[Any], path: Path) -> list[Any]:
        # Copy first: another thread may change the container while it is encoded.
        items = list(items)
        if PLAIN.issuperset(map(type, items)):  # a fast path in C for long lists of numbers
            return items
        return [self.encode(item, (*path, index)) for index, item in enumerate(items)]

    def _dict(self, entries: dict[Any, Any], path: Path) -> Any:
        if {str}.issuperset(map(type, entries)):
            if self._leaves and _TENSORS.issuperset(map(type, entries.values())):
                return self._leaves(entries, path)
            return {
                key: value if type(value) in PLAIN else self.encode(value, (*path, key))
                for key, value in entries.items()
            }
        return extension(values.PAIRS, self._pairs(entries, path))

    def _pairs(self, entries: dict[Any, Any], path: Path) -> list[Any]:
        pairs: list[Any] = []
        for key, value in entries.items():
            pairs += (_key(key, path), self.encode(value, (*path, key)))
        return pairs

    def _tuple(self, value: tuple[Any, ...], path: Path) -> Any:
        return extension(values.TUPLE, self._items(value, path))

    def _ordered(self, value: dict[Any, Any], path: Path) -> Any:
        return extension(values.ORDERED, self._pairs(value, path))

    def _counter(self, value: dict[Any, Any], path: Path) -> Any:
        return extension(values.COUNTER, self._pairs(value, path))

    def _default(self, value: defaultdict[Any, Any], path: Path) -> Any:
        factory = value.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and values.FACTORIES.get(name) is not factory:
            raise UnsupportedState(
                describe(path),
                f"a defaultdict with the factory {factory!r:.60}",
                hint=f"the factory may be None or one of {', '.join(values.FACTORIES)}",
            )
        stored = None if factory is None else name
        return extension(values.DEFAULT, [stored, *self._pairs(value, path)])

    def _deque(self, value: deque[Any], path: Path) -> Any:
        return extension(values.DEQUE, [value.maxlen, self._items(value, path)])

    def _registered(self, value: Any, path: Path) -> Any:
        codec = codec_of(type(value))
        if codec is None:
            return self._leaf(value, path)
        payload = codec.encode(value, path)
        if type(payload) is type(value):
            raise UnsupportedState(
                describe(path),
                f"{kind_name(value)}, whose encode() returned the same type",
                hint="encode() must return plain values",
            )
        # No tensors inside: a restore makes a new instance, so there is no tensor to fill in place.
        return extension(values.REGISTERED, [codec.name, Encoder().encode(payload, path)])


def _key(key: Any, path: Path) -> Any:
    kind = type(key)
    if kind in PLAIN:
        return key
    if kind is tuple and len(path) <= DEPTH_MAX:
        return extension(values.TUPLE, [_key(part, (*path, key)) for part in key])
    if kind is StoredValue or codec_of(kind) is not None:
        return Encoder().encode(key, path)
    if kind not in _KEYS:
        raise UnsupportedState(
            describe(path),
            f"a dict key of type {kind_name(key)}",
            hint="keys may be scalars, members of a registered enum, and tuples of these; "
            "of a numpy scalar, store int(key) or float(key)",
        )
    return _SCALARS[kind](key)


def _stored_value(_: Encoder, value: StoredValue, __: Path) -> msgpack.ExtType:
    """Encode an instance that was read from a shard and not resolved: its bytes as they were."""
    return msgpack.ExtType(values.REGISTERED, value.packed)


def _set(_: Encoder, members: Iterable[Any], path: Path) -> Any:
    encoder = Encoder()
    # Sorted by encoding: equal sets get equal bytes, independent of Python's hash seed.
    items = sorted((encoder.encode(member, (*path, "{}")) for member in members), key=pack)
    return extension(values.SET if type(members) is set else values.FROZENSET, items)


_CONTAINERS: dict[type, Callable[[Encoder, Any, Path], Any]] = {
    dict: Encoder._dict,
    list: Encoder._items,
    tuple: Encoder._tuple,
    OrderedDict: Encoder._ordered,
    defaultdict: Encoder._default,
    Counter: Encoder._counter,
    deque: Encoder._deque,
    set: _set,
    frozenset: _set,
    StoredValue: _stored_value,
}


def _scalar(value: Any, path: Path) -> msgpack.ExtType | None:
    """Encode a value without parts; return None for other types."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return _numpy(value, path)
    encode = _SCALARS.get(type(value))
    return None if encode is None else encode(value)


def _complex(value: complex) -> msgpack.ExtType:
    return msgpack.ExtType(values.COMPLEX, struct.pack(">dd", value.real, value.imag))


def _torch_name(code: int) -> Callable[[Any], msgpack.ExtType]:
    return lambda value: msgpack.ExtType(code, str(value).removeprefix("torch.").encode())


def _path(name: str) -> Callable[[Any], msgpack.ExtType]:
    return lambda value: extension(values.PATH, [name, str(value)])


_SCALARS: dict[type, Callable[[Any], msgpack.ExtType]] = {
    complex: _complex,
    bytearray: lambda value: msgpack.ExtType(values.BYTEARRAY, bytes(value)),
    torch.Size: lambda value: extension(values.SIZE, [int(size) for size in value]),
    torch.dtype: _torch_name(values.DTYPE),
    torch.device: _torch_name(values.DEVICE),
    **{kind: _path(name) for name, kind in values.PATHS.items()},
}
_KEYS = _SCALARS.keys() - {bytearray}


def _numpy(value: Any, path: Path) -> msgpack.ExtType:
    array = np.asarray(value)
    if array.dtype.kind not in values.NUMPY_KINDS:
        raise UnsupportedState(
            describe(path),
            f"a numpy {type(value).__name__} of dtype {array.dtype}",
            hint="split structures into one array per field, objects into lists of values; "
            "or leave it out of the state",
        )
    # Text of length zero has elements of 0 bytes, which the decoder refuses. With a width of 1 the
    # text stays empty, because numpy pads with NULs and strips them.
    if array.dtype.itemsize == 0:
        array = array.astype(f"{array.dtype.kind}1")
    if isinstance(value, np.generic):
        return extension(values.SCALAR, [array.dtype.str, array.tobytes()])
    return extension(values.ARRAY, [array.dtype.str, list(array.shape), array.tobytes()])
