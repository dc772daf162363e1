"""The header of a shard, read: a safetensors header that anybody may have written. No torch here.

Of 20,000 tensors each step of Python costs milliseconds. So they are checked in columns, by
functions that walk lists in C, and what only depends on dtype and shape once for all that share
them. Only a header that is refused is gone through one by one, to name what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ecckpt.errors import CorruptFragment
from ecckpt.state.file.layout import (
    ALIGN_BYTES,
    HEADER_BYTES_MAX,
    ITEM_BYTES,
    Places,
    TensorEntry,
    size_of,
)
from ecckpt.state.paths import VALUES_NAME

_KEYS = ("dtype", "shape", "data_offsets")
_described = itemgetter(*_KEYS)

# The code of a dtype, and a shape.
Form = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class ShardHeader:
    """A header, read: a column of names and one of places, in the order of the bytes.

    ``forms`` are the different dtypes and shapes, ``form_of`` gives each tensor's index among them.
    Tensor i has the bytes from ``ends[i - 1]`` (the first: 0) to ``ends[i]`` of the data.
    """

    names: tuple[str, ...]
    forms: tuple[Form, ...]
    form_of: NDArray[np.int64]
    ends: NDArray[np.int64]
    metadata: Mapping[str, str]
    data_start: int

    @property
    def begins(self) -> NDArray[np.int64]:
        """Where each tensor begins in the data."""
        return np.concatenate((np.zeros(1, np.int64), self.ends))[:-1]

    @property
    def entries(self) -> list[TensorEntry]:
        """An object for each tensor, of those before the values."""
        forms = [self.forms[index] for index in self.form_of.tolist()]
        places = zip(self.begins.tolist(), self.ends.tolist(), strict=True)
        each = zip(self.names, forms, places, strict=True)
        return [TensorEntry(name, code, shape, *place) for name, (code, shape), place in each][:-1]

    @property
    def values(self) -> TensorEntry:
        """The values, which are last; ``CorruptFragment`` if they are not."""
        self.require_values()
        code, shape = self.forms[self.form_of[-1]]
        return TensorEntry(VALUES_NAME, code, shape, int(self.begins[-1]), int(self.ends[-1]))

    def require_values(self) -> None:
        """Raise ``CorruptFragment`` unless the last tensor is the values."""
        if not self.names or self.names[-1] != VALUES_NAME:
            raise CorruptFragment("a shard without values at its end")


def header_bytes(prefix: memoryview, shard_bytes: int) -> int:
    """Length of a shard's header, from the shard's first 8 bytes; its data begins there.

    ``CorruptFragment`` if a shard of that many bytes cannot have such a header.
    """
    if len(prefix) < 8:
        raise CorruptFragment(f"a shard of {len(prefix)} bytes has no header")
    text_bytes = int.from_bytes(prefix[:8], "little")
    if text_bytes > min(HEADER_BYTES_MAX, shard_bytes - 8):
        raise CorruptFragment(f"a header of {text_bytes} bytes in {shard_bytes} bytes of shard")
    if (8 + text_bytes) % ALIGN_BYTES:
        raise CorruptFragment(f"a header of {text_bytes} bytes misaligns the data behind it")
    return 8 + text_bytes


def parse_header(buffer: memoryview, shard_bytes: int | None = None) -> ShardHeader:
    """The header of the shard that fills ``buffer``; ``CorruptFragment`` if it cannot be one.

    With ``shard_bytes``, the length of the shard, ``buffer`` need be no more than its header.
    Allocates no more than the header's own length asks for, which is checked first.
    """
    shard_bytes = len(buffer) if shard_bytes is None else shard_bytes
    data_start = header_bytes(buffer, min(shard_bytes, len(buffer)))
    try:
        # Objects come as tuples of pairs, so that a name that comes twice is not lost.
        pairs = json.loads(bytes(buffer[8:data_start]), object_pairs_hook=tuple)
        if type(pairs) is not tuple:
            raise ValueError("not a JSON object")
        fields = _no_duplicates(pairs)
        metadata = _texts(fields.pop("__metadata__", ()))
        return _header(fields, metadata, data_start, shard_bytes - data_start)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CorruptFragment(f"the header of a shard cannot be read: {error}") from error


class _HeaderColumns(NamedTuple):
    """What a header says of its tensors; shapes and offsets are lists of numbers."""

    codes: list[Any]
    shapes: list[list[int]]
    offsets: list[list[int]]


def _columns(fields: Collection[Any]) -> _HeaderColumns | None:
    """The columns of what describes tensors; None unless each of it does, as far as types go."""
    if not ({tuple}.issuperset(map(type, fields)) and {3}.issuperset(map(len, fields))):
        return None
    # Keys and values in turn, three of each. Everybody writes the keys in the same order.
    flat = list(chain.from_iterable(chain.from_iterable(fields)))
    if any(flat[2 * at :: 6].count(key) != len(fields) for at, key in enumerate(_KEYS)):
        try:
            ordered = [tuple(zip(_KEYS, _described(dict(each)), strict=True)) for each in fields]
        except KeyError:
            return None
        return _columns(ordered)
    columns = _HeaderColumns(flat[1::6], flat[3::6], flat[5::6])
    lists = columns.shapes + columns.offsets
    plain = (
        {list}.issuperset(map(type, lists))
        and {2}.issuperset(map(len, columns.offsets))
        and {int}.issuperset(map(type, chain.from_iterable(lists)))
    )
    return columns if plain else None


def _header(
    fields: Mapping[str, Any], metadata: dict[str, str], data_start: int, data_bytes: int
) -> ShardHeader:
    names = list(fields)
    columns = _columns(fields.values())
    if columns is None:
        name = next(name for name in names if _columns([fields[name]]) is None)
        raise ValueError(f"{name!r:.80} is not described as a tensor")
    form_of_each = list(zip(columns.codes, map(tuple, columns.shapes), strict=True))
    numbers: dict[Form, int] = dict.fromkeys(form_of_each, 0)
    sizes = []
    for number, form in enumerate(numbers):
        try:
            sizes.append(size_of(*form))
        except ValueError as error:
            raise ValueError(f"{names[form_of_each.index(form)]!r:.80} {error}") from error
        numbers[form] = number
    form_of = _int64(map(numbers.__getitem__, form_of_each), len(names))
    begins, ends = _int64(chain.from_iterable(columns.offsets), 2 * len(names)).reshape(-1, 2).T
    if (begins[1:] < ends[:-1]).any():  # or it is sorted
        order = np.lexsort((ends, begins))
        begins, ends, form_of = begins[order], ends[order], form_of[order]
        names = [names[index] for index in order.tolist()]
    items = np.array([ITEM_BYTES[code] for code, _ in numbers], np.int64)
    places = Places(names, begins, ends, np.array(sizes, np.int64)[form_of], items[form_of])
    places.check(data_bytes)
    return ShardHeader(tuple(names), tuple(numbers), form_of, ends.copy(), metadata, data_start)


def _int64(numbers: Iterable[int], count: int) -> NDArray[np.int64]:
    return np.fromiter(numbers, np.int64, count)


def _no_duplicates(pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name that comes twice")
    return fields


def _texts(pairs: Any) -> dict[str, str]:
    if type(pairs) is not tuple or not {str}.issuperset(type(text) for _, text in pairs):
        raise ValueError("__metadata__ is no map of texts")
    return _no_duplicates(pairs)
