"""The registry of user classes whose instances a state may hold; ``ecckpt.register`` fills it.

``encoding.py`` and ``resolving.py`` look classes up. A shard stores the registered name and plain
values. Reading a name that is not registered is an error and never imports anything: the program
decides which code runs, not the bytes that it reads.
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
    """How instances of one class are stored.

    ``encode(value, path)`` returns plain values, ``decode(payload)`` makes an instance from them.
    """

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
    """Allow instances of a class, but not of its subclasses, as values in a state.

    For an enum or a dataclass ``@ecckpt.register`` above the class is enough. A shard stores an
    enum member by its name, a flag by its number, and a dataclass by its fields; instances of
    dataclasses are made without ``__init__``. Any other class needs both functions, as in
    ``ecckpt.register(Decimal, encode=str, decode=Decimal)``.

    Call it in each start of the program, before the first ``save`` and before ``restore``. A second
    registration of a class replaces the first.

    Args:
        kind: the class.
        encode: returns plain values for an instance.
        decode: makes an equal instance from these values.
        name: stored in place of the class (default: its qualified name without the module).

    Returns:
        ``kind``, so that it works as a decorator.

    Raises:
        InvalidConfig: another class has that name, or the class needs ``encode`` and ``decode``, or
            ecckpt stores it without registration.
    """
    if not isinstance(kind, type) or (encode is None) != (decode is None):
        raise InvalidConfig("register() takes a class, and encode and decode or neither")
    if kind in _NATIVE or issubclass(kind, torch.Tensor) or hasattr(kind, "load_state_dict"):
        raise InvalidConfig(f"{kind.__name__} needs no register(): ecckpt stores it as it is")
    name = name or kind.__qualname__
    other = _by_name.get(name)
    if other is not None and _origin(other.kind) != _origin(kind):
        raise InvalidConfig(
            f"{name!r} is registered for {other.kind.__module__}.{other.kind.__qualname__}",
            hint="give one of the classes another name=",
        )
    codec = _codec(kind, encode, decode, name)
    for old in (other, _by_kind.get(kind)):
        if old is not None:
            _by_name.pop(old.name, None)
            _by_kind.pop(old.kind, None)
    _by_kind[kind] = _by_name[name] = codec
    return kind


def codec_of(kind: type) -> ClassCodec | None:
    """Return the codec of exactly this class; None if it is not registered."""
    return _by_kind.get(kind)


def codec_named(name: str) -> ClassCodec | None:
    """Return the codec registered under ``name``; None if there is none."""
    return _by_name.get(name)


def _codec(
    kind: type,
    encode: Callable[[Any], Any] | None,
    decode: Callable[[Any], Any] | None,
    name: str,
) -> ClassCodec:
    if encode is not None and decode is not None:
        user_encode = encode
        return ClassCodec(name, kind, lambda value, _: user_encode(value), decode)
    if issubclass(kind, enum.Flag):  # a combination of flags has no name
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
            f"a {type(value).__qualname__} with attributes that are not fields ({extra[0]!r:.60})",
            hint="register it with encode= and decode=",
        )
    return {name: getattr(value, name) for name in names}


def _from_fields(kind: type, payload: dict[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    if names != payload.keys():
        raise ValueError(f"saved with the fields {sorted(payload)}, here it has {sorted(names)}")
    value: Any = object.__new__(kind)
    for name, field in payload.items():
        object.__setattr__(value, name, field)  # works for frozen dataclasses as well
    return value


def _origin(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
