"""The parser of a shard's header. It does not import torch, and does not trust its input.

``shard.py`` and ``catalog.py`` use it, and ``client/read/open.py`` on headers of other ranks. Any
program may have written the safetensors header, so everything is checked before it is used.

For 20,000 tensors each step in Python costs milliseconds. So the fields of all tensors are checked
as columns, with functions that loop in C, and checks that depend only on dtype and shape run once
for each distinct pair. Only for a header that is refused the code looks at single tensors, to name
the wrong one.
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

# The dtype of a tensor as safetensors spells it, and its shape.
Form = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShardHeader:
    """A parsed header, in columns, in the order of the tensors' bytes.

    Attributes:
        names: the name of each tensor; that of the values blob is last.
        forms: the distinct pairs of dtype and shape.
        form_of: shape (tensors,): the index of each tensor's pair in ``forms``.
        ends: shape (tensors,): where each tensor ends, in bytes from the start of the data. It
            begins where the one before it ends; the first begins at 0.
        metadata: the texts under ``__metadata__``.
        data_start: where the data begins, in bytes from the start of the shard.
    """

    names: tuple[str, ...]
    forms: tuple[Form, ...]
    form_of: NDArray[np.int64]
    ends: NDArray[np.int64]
    metadata: Mapping[str, str]
    data_start: int

    @property
    def begins(self) -> NDArray[np.int64]:
        """Where each tensor begins, in bytes from the start of the data; shape (tensors,)."""
        return np.concatenate((np.zeros(1, np.int64), self.ends))[:-1]

    @property
    def entries(self) -> list[TensorEntry]:
        """An entry for each tensor, without the values blob."""
        forms = [self.forms[index] for index in self.form_of.tolist()]
        columns = zip(self.names, forms, self.begins.tolist(), self.ends.tolist(), strict=True)
        return [
            TensorEntry(name=name, code=code, shape=shape, begin=begin, end=end)
            for name, (code, shape), begin, end in columns
        ][:-1]

    @property
    def values(self) -> TensorEntry:
        """The entry of the values blob. Raises ``CorruptFragment`` if it is not the last one."""
        self.require_values()
        code, shape = self.forms[self.form_of[-1]]
        return TensorEntry(
            name=VALUES_NAME,
            code=code,
            shape=shape,
            begin=int(self.begins[-1]),
            end=int(self.ends[-1]),
        )

    def require_values(self) -> None:
        """Raise ``CorruptFragment`` unless the last tensor is the values blob."""
        if not self.names or self.names[-1] != VALUES_NAME:
            raise CorruptFragment("the last tensor of a shard is not its values blob")


def header_bytes(prefix: memoryview, shard_bytes: int) -> int:
    """Return where a shard's data begins, from the shard's first 8 bytes.

    Args:
        prefix: at least 8 bytes from the start of the shard.
        shard_bytes: length of the whole shard.

    Raises:
        CorruptFragment: the header would be longer than the shard or than the limit, or would
            misalign the data.
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
    """Parse and check the header of a shard.

    The memory that it allocates is proportional to the header, whose length is checked first.

    Args:
        buffer: the shard; owned by the caller, only read. Given ``shard_bytes``, the header is
            enough.
        shard_bytes: length of the whole shard (default: that of ``buffer``).

    Raises:
        CorruptFragment: the bytes are not the header of such a shard.
    """
    shard_bytes = len(buffer) if shard_bytes is None else shard_bytes
    data_start = header_bytes(buffer, min(shard_bytes, len(buffer)))
    try:
        # JSON objects become tuples of pairs, because a dict would hide that a name occurs twice.
        pairs = json.loads(bytes(buffer[8:data_start]), object_pairs_hook=tuple)
        if type(pairs) is not tuple:
            raise ValueError("not a JSON object")
        fields = _no_duplicates(pairs)
        metadata = _texts(fields.pop("__metadata__", ()))
        return _header(fields, metadata, data_start, shard_bytes - data_start)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CorruptFragment(f"the header of a shard cannot be read: {error}") from error


class _HeaderColumns(NamedTuple):
    """The fields of all tensors of a header, one list per key; types checked, values not."""

    codes: list[Any]
    shapes: list[list[int]]
    offsets: list[list[int]]


def _columns(fields: Collection[Any]) -> _HeaderColumns | None:
    """Turn the descriptions of tensors into columns; None if one has another form or type."""
    if not ({tuple}.issuperset(map(type, fields)) and {3}.issuperset(map(len, fields))):
        return None
    # Keys and values alternate: six items per tensor. Known writers use the order of `_KEYS`; a
    # header with another order is sorted by key once and tried again.
    flat = list(chain.from_iterable(chain.from_iterable(fields)))
    if any(flat[2 * at :: 6].count(key) != len(fields) for at, key in enumerate(_KEYS)):
        try:
            ordered = [tuple(zip(_KEYS, _described(dict(pairs)), strict=True)) for pairs in fields]
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
    if (begins[1:] < ends[:-1]).any():  # the names are not in the order of the bytes
        order = np.lexsort((ends, begins))
        begins, ends, form_of = begins[order], ends[order], form_of[order]
        names = [names[index] for index in order.tolist()]
    items = np.array([ITEM_BYTES[code] for code, _ in numbers], np.int64)
    places = Places(names, begins, ends, np.array(sizes, np.int64)[form_of], items[form_of])
    places.check(data_bytes)
    return ShardHeader(
        names=tuple(names),
        forms=tuple(numbers),
        form_of=form_of,
        ends=ends.copy(),  # a column of a larger array, which would stay alive with it
        metadata=metadata,
        data_start=data_start,
    )


def _int64(numbers: Iterable[int], count: int) -> NDArray[np.int64]:
    return np.fromiter(numbers, np.int64, count)


def _no_duplicates(pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _texts(pairs: Any) -> dict[str, str]:
    if type(pairs) is not tuple or not {str}.issuperset(type(text) for _, text in pairs):
        raise ValueError("__metadata__ is not a map of texts")
    return _no_duplicates(pairs)
