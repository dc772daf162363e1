"""The safetensors container of a shard: its header, written and read. No torch in here.

8 bytes of header length (little endian), a JSON header padded with spaces, the tensors one after
another without holes, and the values blob as the last of them. The data begins at a multiple of 64
and the widest elements come first, so every tensor is aligned to its element.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecckpt.errors import CorruptFragment
from ecckpt.state.paths import VALUES_NAME

HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
_ALIGN_BYTES = 64
_INT64_MAX = 2**63 - 1
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the file; ``begin`` and ``end`` count from the start of the data."""

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header, read: the entries in the order of their bytes."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    data_start: int


def arrange(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], parts: Collection[str] = ()
) -> list[Entry]:
    """Entries for (name, dtype code, shape, alignment), in the order given.

    Their places go by alignment, the widest first, and then by name, as in safetensors. Only that
    those among ``parts`` (of global tensors) come before the others: whoever reads shards of
    another world size wants the small whole ones of many shards, and finds them side by side.
    """
    entries: dict[int, Entry] = {}
    offset = 0

    def place(index: int) -> tuple[int, bool, str]:
        name, _, _, align_bytes = tensors[index]
        return -align_bytes, name not in parts, name

    order = sorted(range(len(tensors)), key=place)
    for index in order:
        name, code, shape, _ = tensors[index]
        end = offset + math.prod(shape) * _ITEM_BYTES[code]
        entries[index] = Entry(name, code, shape, offset, end)
        offset = end
    return [entries[index] for index in range(len(tensors))]


def render_entries(entries: Sequence[Entry], metadata: Mapping[str, str]) -> str:
    """The JSON of a header but for the values blob: what stays the same from save to save."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        fields[entry.name] = _fields(entry)
    return _json(fields)[:-1]


def render_header(entries: str, *, data_bytes: int, values_bytes: int) -> bytes:
    """The first bytes of a shard, up to its data: ``entries`` with the values blob added."""
    blob = Entry(VALUES_NAME, "U8", (values_bytes,), data_bytes, data_bytes + values_bytes)
    text = f"{entries},{_json(VALUES_NAME)}:{_json(_fields(blob))}}}".encode()
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def header_bytes(prefix: memoryview, shard_bytes: int) -> int:
    """Length of a shard's header, from the shard's first 8 bytes; its data begins there.

    ``CorruptFragment`` if a shard of that many bytes cannot have such a header.
    """
    if len(prefix) < 8:
        raise CorruptFragment(f"a shard of {len(prefix)} bytes has no header")
    text_bytes = int.from_bytes(prefix[:8], "little")
    if text_bytes > min(HEADER_BYTES_MAX, shard_bytes - 8):
        raise CorruptFragment(f"a header of {text_bytes} bytes in {shard_bytes} bytes of shard")
    if (8 + text_bytes) % _ALIGN_BYTES:
        raise CorruptFragment(f"a header of {text_bytes} bytes misaligns the data behind it")
    return 8 + text_bytes


def parse_header(buffer: memoryview, shard_bytes: int | None = None) -> Header:
    """The header of the shard that fills ``buffer``; ``CorruptFragment`` if it cannot be one.

    With ``shard_bytes``, the length of the shard, ``buffer`` need be no more than its header.
    Allocates no more than the header's own length asks for, which is checked first.
    """
    shard_bytes = len(buffer) if shard_bytes is None else shard_bytes
    data_start = header_bytes(buffer, min(shard_bytes, len(buffer)))
    try:
        fields = json.loads(bytes(buffer[8:data_start]), object_pairs_hook=_no_duplicates)
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        metadata = fields.pop("__metadata__", {})
        if not _all_text(metadata):
            raise ValueError("__metadata__ is no map of texts")
        entries = sorted(
            (_entry(name, entry) for name, entry in fields.items()),
            key=lambda entry: (entry.begin, entry.end),
        )
        _check_places(entries, shard_bytes - data_start)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptFragment(f"the header of a shard cannot be read: {error}") from error
    return Header(tuple(entries), metadata, data_start)


def _entry(name: str, fields: Any) -> Entry:
    code, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if len(fields) != 3 or code not in _ITEM_BYTES or type(shape) is not list:
        raise ValueError(f"{name!r:.80} is not described as a tensor")
    if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise ValueError(f"{name!r:.80} has sizes that are none")
    if math.prod(max(size, 1) for size in shape) > _INT64_MAX:
        raise ValueError(f"{name!r:.80} has a shape that is too large")
    if end - begin != math.prod(shape) * _ITEM_BYTES[code]:
        raise ValueError(f"{name!r:.80} has {end - begin} bytes, its shape wants another number")
    return Entry(name, code, tuple(shape), begin, end)


def _check_places(entries: Sequence[Entry], data_bytes: int) -> None:
    offset = 0
    for entry in entries:
        if entry.begin != offset:
            raise ValueError(f"{entry.name!r:.80} begins at {entry.begin}, expected {offset}")
        if offset % _ITEM_BYTES[entry.code] and entry.end > offset:
            raise ValueError(f"{entry.name!r:.80} is misaligned")
        offset = entry.end
    if offset != data_bytes:
        raise ValueError(f"tensors of {offset} bytes in {data_bytes} bytes of data")


def _fields(entry: Entry) -> dict[str, Any]:
    return {
        "dtype": entry.code,
        "shape": entry.shape,
        "data_offsets": (entry.begin, entry.end),
    }


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name that comes twice")
    return fields


def _all_text(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(type(text) is str for text in metadata.values())
