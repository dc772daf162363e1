"""What is fuzzed: every parser of bytes that others may have written.

A target takes any bytes. It must return or raise an ``EcckptError``, in bounded time and memory;
what it takes for good must come out again as it went in, where there is a way back.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import torch

from ecckpt.agent.records.run_notes import RunNotes
from ecckpt.agent.runtime.run_state_file import pack_notes, unpack_notes
from ecckpt.coding.crc32c import crc32c
from ecckpt.errors import EcckptError
from ecckpt.format.fragment_file import (
    FORMAT_VERSION,
    SUPERBLOCK_BYTES,
    Header,
    pack_superblock,
    pack_table,
    parse_superblock,
    parse_table,
)
from ecckpt.format.ids import Generation
from ecckpt.integrations.dcp.pickle_opcodes import read_opcodes
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.encoding import pack_message, unpack_message, version_of
from ecckpt.protocol.http import split_address
from ecckpt.protocol.messages.node import Done
from ecckpt.state.file.header import parse_header
from ecckpt.state.file.metadata import parse_notes
from ecckpt.state.file.shard import read_shard
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.tree.decoding import decode
from tests.support.builders import SESSION, generation, header, message_classes, table_of

CORPUS = Path(__file__).parent / "corpus"
MESSAGES: list[type] = sorted(
    {*message_classes(), Inventory},
    key=lambda each: each.__name__,
)
_HEAD = header(block_bytes=4096)


def superblock(data: bytes) -> None:
    """The first bytes of a file; the checksum is made right, or nothing else would be reached."""
    if data[:1] == b"\0":
        parse_superblock(data[1:], "fuzz")
        return
    prefix = b"\x89ecckpt\n" + FORMAT_VERSION.to_bytes(4, "little")
    block = (prefix + data[1:]).ljust(SUPERBLOCK_BYTES - 4, b"\0")[: SUPERBLOCK_BYTES - 4]
    found = parse_superblock(block + crc32c(block).to_bytes(4, "little"), "fuzz")
    if found is not None:
        assert parse_superblock(pack_superblock(found), "again") == found


def table(data: bytes) -> None:
    """A checksum table, as it is and with its checksum made right."""
    for trailer in (data, data + crc32c(data).to_bytes(4, "little") + b"ecckpt.\n"):
        try:
            found = parse_table(trailer, _HEAD, "fuzz")
        except EcckptError:
            continue
        assert pack_table(found) == trailer


def message(data: bytes) -> None:
    """A control message; the first byte says of which kind."""
    kind = MESSAGES[data[0] % len(MESSAGES)] if data else Done
    found = unpack_message(kind, data[1:])
    assert unpack_message(kind, pack_message(found)) == found


def version(data: bytes) -> None:
    """The protocol version of another agent."""
    version_of(data)


def notes(data: bytes) -> None:
    """What an agent wrote down of a run, its checksum made right."""
    found = unpack_notes(crc32c(data).to_bytes(4, "little") + data, "fuzz")
    assert unpack_notes(pack_notes(found), "again") == found


def shard(data: bytes) -> None:
    """A shard: header, notes and values, all the way to the tree."""
    read_shard(memoryview(bytearray(data))).tree()


def shard_header(data: bytes) -> None:
    """The JSON header of a shard, its length made right."""
    text = data + b" " * (-(8 + len(data)) % 64)
    found = parse_header(memoryview(len(text).to_bytes(8, "little") + text), 1 << 40)
    parse_notes(found.metadata)


def values(data: bytes) -> None:
    """The values of a shard; their tensors are anything."""
    decode(data, lambda index: torch.empty(0) if index < 100 else [][index])


def pickled(data: bytes) -> None:
    """The opcodes of somebody else's pickle."""
    try:
        read_opcodes(data)
    except ValueError as error:
        raise EcckptError(str(error)) from error


def text(data: bytes) -> None:
    """Texts that come over the network: generations, addresses."""
    said = data.decode(errors="surrogateescape")
    for parse in (Generation.parse, split_address):
        try:
            parse(said)
        except EcckptError:
            continue


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (
        superblock,
        table,
        message,
        version,
        notes,
        shard,
        shard_header,
        values,
        pickled,
        text,
    )
}


# -- what to begin from ---------------------------------------------------------------------------


def seeds(name: str) -> list[bytes]:
    """Good inputs, and those that were kept: crashes of the past and what reached new code."""
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    return [*_SEEDS.get(name, list)(), *kept]


def _superblocks() -> list[bytes]:
    packed = [pack_superblock(head) for head in (header(), header(2, shard_bytes=0, m=0, k=3))]
    return [b"\1" + each[12:200] for each in packed] + [b"\0" + packed[0]]


def _messages() -> list[bytes]:
    return [bytes([number]) + pack_message(_sample(kind)) for number, kind in enumerate(MESSAGES)]


def _sample(kind: Any) -> Any:
    """A value of an annotated type."""
    plain = {int: 3, float: 1.5, str: "n0", bool: True, bytes: b"abc"}
    if kind in plain:
        return plain[kind]
    if kind is Header:
        return header()
    if kind is Generation:
        return generation()
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return (_sample(inner[0]),)
    if origin is types.UnionType:
        return _sample(inner[0])
    if origin is not None and issubclass(origin, Mapping):
        return {_sample(inner[0]): _sample(inner[1])}
    if typing.get_origin(kind) is typing.Literal:
        return inner[0]
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: _sample(hints[field.name]) for field in dataclasses.fields(kind)})


def _notes() -> list[bytes]:
    full = RunNotes(
        fence=3,
        committed=generation(),
        restored=generation(),
        roll_backs=(RollBack(2, generation()),),
        stored=(generation(),),
    )
    return [pack_notes(each)[4:] for each in (RunNotes(), full)]


def _state() -> dict[str, Any]:
    return {
        "weights": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "values": [1, -(2**70), 1.5, "text", b"bytes", None, {"a": (1, 2), 3: {4, 5}}, 1 + 2j],
    }


def _shards() -> list[bytes]:
    plan = plan_shard(_state())
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return [bytes(target)]


def _values() -> list[bytes]:
    return [read_shard(memoryview(bytearray(each))).packed_tree for each in _shards()]


def _headers() -> list[bytes]:
    return [each[8 : 8 + int.from_bytes(each[:8], "little")] for each in _shards()]


def _pickles() -> list[bytes]:
    # Protocol 2, written out: a dict of a list, a tuple and a global that is called.
    return [
        b"\x80\x02}q\x00(X\x01\x00\x00\x00a]q\x01(K\x01K\x02eX\x01\x00\x00\x00bK\x03\x85u.",
        b"\x80\x02ctorch\nSize\nK\x02K\x03\x86\x85R.",
    ]


_SEEDS: dict[str, Callable[[], Iterable[bytes]]] = {
    "superblock": _superblocks,
    "table": lambda: [pack_table(table_of(_HEAD))[:-12]],
    "message": _messages,
    "version": lambda: [msgpack.packb({"protocol_version": 2})],
    "notes": _notes,
    "shard": _shards,
    "shard_header": _headers,
    "values": _values,
    "pickled": _pickles,
    "text": lambda: [f"1.2.{SESSION}".encode(), b"[::1]:80", b"host:65535"],
}
