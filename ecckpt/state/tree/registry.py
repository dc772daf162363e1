"""Classes of the user whose instances are values: one table, filled by ``register`` alone.

What is stored is a registered name and plain values. A name that is not in the table is an error,
never an import: which code runs is decided by the program, not by the bytes it reads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ecckpt.errors import InvalidConfig, UnsupportedState
from ecckpt.state.paths import Path, describe
from ecckpt.state.tree.values import FACTORIES, PATHS, PLAIN

_Kind = TypeVar("_Kind", bound=type)


@dataclass(frozen=True, slots=True)
class ClassCodec:
    """How instances of one class are stored: ``encode(value, path)`` and ``decode(payload)``."""

    name: str
    kind: type
    encode: Callable[[Any, Path], Any]
    decode: Callable[[Any], Any]


_NATIVE = {
    *PLAIN,
    *FACTORIES.values(),
    *PATHS.values(),
    *(bytearray, np.ndarray, torch.Size, torch.dtype, torch.device),
}
_by_kind: dict[type, ClassCodec] = {}
_by_name: dict[str, ClassCodec] = {}


def register(
    kind: _Kind,
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    name: str = "",
) -> _Kind:
    """Make instances of exactly this class values that a state may hold; returns ``kind``.

    Enums and dataclasses need nothing more (``@ecckpt.register`` above the class does it): a member
    is stored by its name, a flag by its number, a dataclass by its fields, and made again without
    ``__init__``. Any other class gives both functions: ``encode(value)`` returns plain values, from
    which ``decode`` makes an equal one; ``ecckpt.register(Decimal, encode=str, decode=Decimal)``.

    ``name`` is what is stored (default: the class's qualified name, without its module). Register
    before the first ``save`` and before ``restore``, in every start of the program. The same class
    may be registered again; it replaces the earlier one.

    Raises ``InvalidConfig`` for a name that another class has, or a class with no way to store it.
    """
    if not isinstance(kind, type) or (encode is None) != (decode is None):
        raise InvalidConfig("register() takes a class, and encode and decode or neither")
    if kind in _NATIVE or issubclass(kind, torch.Tensor) or hasattr(kind, "load_state_dict"):
        raise InvalidConfig(f"{kind.__name__} is stored without register(), in its own way")
    name = name or kind.__qualname__
    other = _by_name.get(name)
    if other is not None and _origin(other.kind) != _origin(kind):
        raise InvalidConfig(
            f"{name!r} is registered for {other.kind.__module__}.{other.kind.__qualname__}",
            hint="give one of them another name=",
        )
    codec = _codec(kind, encode, decode, name)
    for old in (other, _by_kind.get(kind)):
        if old is not None:
            _by_name.pop(old.name, None)
            _by_kind.pop(old.kind, None)
    _by_kind[kind] = _by_name[name] = codec
    return kind


def codec_of(kind: type) -> ClassCodec | None:
    """How instances of exactly ``kind`` are stored; None if it was not registered."""
    return _by_kind.get(kind)


def codec_named(name: str) -> ClassCodec | None:
    """The codec registered under ``name``, or None."""
    return _by_name.get(name)


def _codec(
    kind: type,
    encode: Callable[[Any], Any] | None,
    decode: Callable[[Any], Any] | None,
    name: str,
) -> ClassCodec:
    if encode is not None and decode is not None:
        given = encode
        return ClassCodec(name, kind, lambda value, _: given(value), decode)
    if issubclass(kind, enum.Flag):  # a combination of flags has no name of its own
        return ClassCodec(name, kind, lambda value, _: value.value, kind)
    if issubclass(kind, enum.Enum):
        return ClassCodec(name, kind, lambda value, _: value.name, kind.__getitem__)
    if is_dataclass(kind):
        return ClassCodec(name, kind, _fields_of, lambda payload: _from_fields(kind, payload))
    raise InvalidConfig(
        f"{kind.__qualname__} is neither an enum nor a dataclass",
        hint="give encode= and decode=",
    )


def _fields_of(value: Any, path: Path) -> dict[str, Any]:
    names = [field.name for field in fields(value)]
    if extra := [name for name in getattr(value, "__dict__", ()) if name not in names]:
        raise UnsupportedState(
            describe(path),
            f"a {type(value).__qualname__} with attributes that are no fields ({extra[0]!r:.60})",
            hint="register it with encode= and decode=",
        )
    return {name: getattr(value, name) for name in names}


def _from_fields(kind: type, payload: dict[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    if names != payload.keys():
        raise ValueError(f"saved with the fields {sorted(payload)}, here it has {sorted(names)}")
    value: Any = object.__new__(kind)
    for name, field in payload.items():
        object.__setattr__(value, name, field)  # frozen ones too
    return value


def _origin(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
