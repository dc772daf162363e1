"""Everything in a state that is no tensor, as msgpack: the vocabulary.

Plain msgpack types mean themselves; every other type is an extension whose payload is msgpack
again, so that a tuple comes back a tuple and the key 1 never becomes "1". Nothing here can name
code to run. `encoding.py` writes it, `reading.py` reads it.
"""

from __future__ import annotations

import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NoReturn

import msgpack

from ecckpt.errors import UnsupportedState
from ecckpt.state.paths import Path, describe

DEPTH_MAX = 64
PLAIN = frozenset({type(None), bool, int, float, str, bytes})
# What numpy calls the kinds whose bytes are the whole value: no objects, no structures.
NUMPY_KINDS = "biufcSUmM"

# Extension codes. They are part of the format: add, never renumber.
TENSOR, TUPLE, PAIRS, ORDERED, SET, FROZENSET, BIG_INT, COMPLEX = range(8)
ARRAY, SCALAR, SIZE, DTYPE, DEVICE, OBJECT = range(8, 14)
DEFAULT, COUNTER, DEQUE, PATH, BYTEARRAY, REGISTERED = range(14, 20)

# What may fill a missing key of a defaultdict, by the name it is stored under.
FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes),
        *(list, tuple, dict, set, frozenset),
        *(OrderedDict, Counter, deque, defaultdict),
    )
}
PATHS: dict[str, type[pathlib.PurePath]] = {
    "path": type(pathlib.Path()),
    "posix": pathlib.PurePosixPath,
    "windows": pathlib.PureWindowsPath,
}

_WAYS_OUT = (
    "say how to store its class: ecckpt.register(), or state_dict() and load_state_dict(); "
    "or leave it out of the state"
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


def _big_int(value: Any) -> msgpack.ExtType:
    """Called by msgpack for the one thing that it cannot hold by itself."""
    if type(value) is not int:
        raise TypeError(f"{kind_name(value)} was not encoded")
    return msgpack.ExtType(BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
