"""The msgpack vocabulary for values: everything in a state that is not a tensor (docs/FORMAT.md).

``encoding.py`` writes it, ``decoding.py`` reads it. Plain msgpack types stand for themselves. Any
other type is a msgpack extension, most of them with msgpack inside: a tuple stays a tuple, and the
key 1 does not become "1". No extension names code to import or run, so reading a shard is safe.
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
# numpy's `dtype.kind` of arrays whose bytes are the whole value: neither objects nor structures.
NUMPY_KINDS = "biufcSUmM"

# Extension codes. They are in files: add new ones at the end, never renumber.
TENSOR, TUPLE, PAIRS, ORDERED, SET, FROZENSET, BIG_INT, COMPLEX = range(8)
ARRAY, SCALAR, SIZE, DTYPE, DEVICE, OBJECT = range(8, 14)
DEFAULT, COUNTER, DEQUE, PATH, BYTEARRAY, REGISTERED = range(14, 20)

# The factories of a defaultdict that can be stored, by the name that is stored.
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
    "register its class (ecckpt.register()), give it state_dict() and load_state_dict(), "
    "or leave it out of the state"
)


def kind_name(value: object) -> str:
    """Return the type of ``value`` as messages show it."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def refuse(value: Any, path: Path) -> NoReturn:
    """Raise ``UnsupportedState``: the ``leaf`` function of an encoder that allows only values."""
    raise UnsupportedState(describe(path), kind_name(value), hint=_WAYS_OUT)


def extension(code: int, payload: Any) -> msgpack.ExtType:
    """Make an extension with one of the codes above and the packed ``payload``."""
    return msgpack.ExtType(code, pack(payload))


def pack(encoded: Any) -> bytes:
    """Pack what ``Encoder.encode`` has returned into bytes."""
    packed: bytes = msgpack.packb(
        encoded, default=_big_int, strict_types=True, unicode_errors="surrogatepass"
    )
    return packed


def _big_int(value: Any) -> msgpack.ExtType:
    """Encode an integer of more than 64 bits: the one type that msgpack itself cannot pack."""
    if type(value) is not int:
        raise TypeError(f"{kind_name(value)} was not encoded")
    return msgpack.ExtType(BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
