"""The bytes of messages: small msgpack maps, checked field by field when they are read. Pure.

The annotations of a message's fields say what is valid; there is no other schema.
"""

from __future__ import annotations

import collections.abc
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar, get_args, get_origin

import msgpack

from ecckpt.errors import CorruptFragment, InvalidMessage
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation, RunWriter

PROTOCOL_VERSION = 9
REQUEST_LIMIT_BYTES = 8 << 20
MESSAGE_LIMIT_BYTES = 64 << 20  # of an answer: an inventory grows with the number of ranks

T = TypeVar("T")


def run_of(message: Any) -> str:
    """The run that a request is about: its own ``run``, or that of its header or shard."""
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


def pack_message(message: Any) -> bytes:
    """The bytes of a message: any dataclass of protocol/messages."""
    return typing.cast(bytes, msgpack.packb(message, default=_plain))


def unpack_message(kind: type[T], body: bytes) -> T:
    """The message of class ``kind`` in ``body``; ``InvalidMessage`` if it is not one."""
    if len(body) > MESSAGE_LIMIT_BYTES:
        raise InvalidMessage(f"message of {len(body)} bytes, limit {MESSAGE_LIMIT_BYTES}")
    try:
        plain = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(f"{kind.__name__}: not msgpack: {error}") from error
    return typing.cast(T, _typed(kind, plain, kind.__name__))


def _plain(value: Any) -> Any:
    """Convert a value that msgpack does not know to values that it knows."""
    kind: Any = type(value)
    write = _WRITERS.get(kind)
    if write is not None:
        return write(value)
    if isinstance(value, Mapping):
        return dict(value)
    return {name: getattr(value, name) for name in _names(kind)}


def _plain_headers(files: Headers) -> dict[str, Any]:
    packer = msgpack.Packer()
    return {
        "shards": [packer.pack(header.to_wire()) for header in files.shards],
        "indices": files.indices,
    }


_WRITERS: dict[type, Callable[[Any], Any]] = {
    Header: Header.to_wire,
    Generation: str,
    RunWriter: str,
    Headers: _plain_headers,
}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache  # ``get_type_hints`` takes ten times as long as reading a message
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


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


def _headers(kind: Any, value: Any, where: str) -> Headers:
    plain = _fields(Headers, value, where)
    bodies = _expect(list, plain["shards"], f"{where}.shards")
    indices = _expect(list, plain["indices"], f"{where}.indices")
    for name, column, item in (("shards", bodies, bytes), ("indices", indices, int)):
        for odd in set(map(type, column)) - {item}:
            raise InvalidMessage(f"{where}.{name}: {odd.__name__} where {item.__name__} belongs")
    try:
        shards = tuple(map(_packed_header, bodies))
    except (CorruptFragment, InvalidMessage) as error:
        raise InvalidMessage(f"{where}.shards: {error}") from error
    if len(shards) != len(indices):
        raise InvalidMessage(f"{where}: {len(shards)} shards, {len(indices)} indices")
    beyond = any(map(operator.ge, indices, map(_N, shards)))
    if beyond or min(indices, default=HOME) < HOME:
        raise InvalidMessage(f"{where}.indices: no such fragment of a shard")
    return Headers(shards, tuple(indices))


_N = operator.attrgetter("n")


# Several nodes send the same header of a shard; it is parsed once, and its files share one object.
# The cache has room for 8 generations of 16,384 ranks.
@lru_cache(maxsize=1 << 17)
def _packed_header(body: bytes) -> Header:
    if len(body) > SUPERBLOCK_BYTES:
        raise InvalidMessage(f"header of {len(body)} bytes, limit {SUPERBLOCK_BYTES}")
    try:
        fields = msgpack.unpackb(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(f"header is not msgpack: {error}") from error
    header = Header.from_wire(fields, "one of them")
    if header.index != HOME:
        raise InvalidMessage(f"header with index {header.index} where {HOME} belongs")
    return header


def _generation(kind: Any, value: Any, where: str) -> Generation:
    return Generation.parse(_expect(str, value, where))


def _writer(kind: Any, value: Any, where: str) -> RunWriter:
    return RunWriter.parse(_expect(str, value, where))


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
    Headers: _headers,
    Generation: _generation,
    RunWriter: _writer,
    tuple: _list,
    collections.abc.Mapping: _map,
    types.UnionType: _optional,
}


def _message(kind: Any, value: Any, where: str) -> Any:
    plain = _fields(kind, value, where)
    return kind(
        **{
            name: _typed(hint, plain[name], f"{where}.{name}")
            for name, hint in _hints(kind).items()
        }
    )


def _fields(kind: Any, value: Any, where: str) -> dict[str, Any]:
    """``value`` as a map with the fields of a message and no others."""
    plain: dict[str, Any] = _expect(dict, value, where)
    names = _hints(kind).keys()
    if plain.keys() != names:
        odd = sorted(str(name)[:80] for name in plain.keys() ^ names)
        raise InvalidMessage(f"{where}: missing or unknown fields: {', '.join(odd[:8])}")
    return plain
