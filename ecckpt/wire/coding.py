"""Bytes of messages: small msgpack maps, checked field by field. Pure."""

from __future__ import annotations

import collections.abc
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin

import msgpack

from ecckpt.errors import CorruptFragment, InvalidMessage
from ecckpt.fragment import Header
from ecckpt.generation import Generation

PROTOCOL_VERSION = 6
REQUEST_LIMIT_BYTES = 8 << 20
MESSAGE_LIMIT_BYTES = 64 << 20  # of an answer: an inventory grows with the cluster

T = TypeVar("T")


def run_of(message: Any) -> str:
    """The run that a request is about, wherever it says so."""
    if hasattr(message, "header"):
        message = message.header.shard
    elif hasattr(message, "shard"):
        message = message.shard
    return typing.cast(str, message.run)


def version_of(body: bytes) -> int:
    """The protocol version in a packed ``NodeInfo`` of any version; ``InvalidMessage`` if none."""
    try:
        fields = msgpack.unpackb(body)
        return int(fields["protocol_version"])
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise InvalidMessage(f"NodeInfo: no protocol version: {error!r}") from error


def pack(message: Any) -> bytes:
    """The bytes of a message (any dataclass of this package)."""
    return typing.cast(bytes, msgpack.packb(_plain(message)))


def unpack(kind: type[T], body: bytes) -> T:
    """The message of that kind in ``body``; ``InvalidMessage`` if it is none."""
    if len(body) > MESSAGE_LIMIT_BYTES:
        raise InvalidMessage(f"message of {len(body)} bytes, limit {MESSAGE_LIMIT_BYTES}")
    try:
        plain = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(f"{kind.__name__}: not msgpack: {error}") from error
    return typing.cast(T, _typed(kind, plain, kind.__name__))


def _plain(value: Any) -> Any:
    if isinstance(value, Header):
        return value.to_wire()
    if isinstance(value, Generation):
        return str(value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _typed(kind: Any, value: Any, where: str) -> Any:
    """``value`` as the annotated ``kind``, or ``InvalidMessage``."""
    return _reader_of(kind)(kind, value, where)


def _reader_of(kind: Any) -> Any:
    reader = _READERS.get(kind) or _READERS.get(get_origin(kind))
    if reader is None and is_dataclass(kind):
        reader = _message
    return reader or _scalar


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        value = float(value) if type(value) is int else _expect(float, value, where)
        if not math.isfinite(value):
            raise InvalidMessage(f"{where}: {value} where a finite number belongs")
        return value
    return _expect(kind, value, where)


def _expect(kind: type[T], value: Any, where: str) -> T:
    if type(value) is not kind:
        raise InvalidMessage(f"{where}: {type(value).__name__} where {kind.__name__} belongs")
    return value


def _header(kind: Any, value: Any, where: str) -> Header:
    try:
        return Header.from_wire(value, where)
    except CorruptFragment as error:
        raise InvalidMessage(str(error)) from error


def _generation(kind: Any, value: Any, where: str) -> Generation:
    return Generation.parse(_expect(str, value, where))


def _list(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    inner = get_args(kind)[0]
    read = _reader_of(inner)
    return tuple([read(inner, item, where) for item in _expect(list, value, where)])


def _map(kind: Any, value: Any, where: str) -> dict[Any, Any]:
    key_kind, item_kind = get_args(kind)
    return {
        _typed(key_kind, key, where): _typed(item_kind, item, where)
        for key, item in _expect(dict, value, where).items()
    }


def _optional(kind: Any, value: Any, where: str) -> Any:
    return None if value is None else _typed(get_args(kind)[0], value, where)


_READERS: dict[Any, Any] = {
    Header: _header,
    Generation: _generation,
    tuple: _list,
    collections.abc.Mapping: _map,
    types.UnionType: _optional,
}


def _message(kind: Any, value: Any, where: str) -> Any:
    value = _expect(dict, value, where)
    hints = _hints_of(kind)
    if value.keys() != hints.keys():
        odd = sorted(str(name)[:80] for name in value.keys() ^ hints.keys())
        raise InvalidMessage(f"{where}: missing or unknown fields: {', '.join(odd[:8])}")
    return kind(
        **{name: _typed(hint, value[name], f"{where}.{name}") for name, hint in hints.items()}
    )


@functools.cache  # to find them out takes ten times as long as all else that is done here
def _hints_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
