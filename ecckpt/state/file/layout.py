"""The safetensors container of a shard: where everything goes, and its header, written. No torch.

8 bytes of header length (little endian), a JSON header padded with spaces, the tensors one after
another without holes, and the values blob as the last of them. The data begins at a multiple of 64
and the widest elements come first, so every tensor is aligned to its element.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ecckpt.state.paths import VALUES_NAME

HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
ALIGN_BYTES = 64
_INT64_MAX = 2**63 - 1
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file; ``begin`` and ``end`` count from the start of the data."""

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def size_of(code: str, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor; ``ValueError`` if there is none of this dtype and shape."""
    if code not in ITEM_BYTES:
        raise ValueError(f"has {code!r:.40} as its dtype")
    if any(size < 0 for size in shape):
        raise ValueError("has sizes that are none")
    size_bytes = math.prod(shape) * ITEM_BYTES[code]
    # torch multiplies the sizes that are not 0 even where one is.
    if max(size_bytes, math.prod(max(size, 1) for size in shape)) > _INT64_MAX:
        raise ValueError("has a shape that is too large")
    return size_bytes


class Places(NamedTuple):
    """Where tensors lie, sorted; how long each is by its shape, and how long its elements are."""

    names: Sequence[str]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]
    items: NDArray[np.int64]

    def check(self, data_bytes: int) -> None:
        """Raise ``ValueError`` unless they fill so many bytes: no holes, each element aligned."""
        names, begins, ends, sizes, items = self
        bounds = np.concatenate((np.zeros(1, np.int64), ends))
        for wrong, problem in (
            (begins != bounds[:-1], "not where the one before it ends"),
            (ends - begins != sizes, "not as many as its shape wants"),
            ((begins % items != 0) & (sizes > 0), "misaligned"),
        ):
            if wrong.any():
                at = int(wrong.argmax())
                raise ValueError(
                    f"{names[at]!r:.80} at bytes {begins[at]} to {ends[at]}: {problem}"
                )
        if bounds[-1] != data_bytes:
            raise ValueError(f"tensors of {bounds[-1]} bytes in {data_bytes} bytes of data")


def arrange(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], parts: Collection[str] = ()
) -> list[TensorEntry]:
    """Entries for (name, dtype code, shape, alignment), in the order given.

    Their places go by alignment, the widest first, and then by name, as in safetensors. Only that
    those among ``parts`` (of global tensors) come before the others: whoever reads shards of
    another world size wants the small whole ones of many shards, and finds them side by side.
    """
    entries: dict[int, TensorEntry] = {}
    offset = 0

    def place(index: int) -> tuple[int, bool, str]:
        name, _, _, align_bytes = tensors[index]
        return -align_bytes, name not in parts, name

    order = sorted(range(len(tensors)), key=place)
    for index in order:
        name, code, shape, _ = tensors[index]
        end = offset + math.prod(shape) * ITEM_BYTES[code]
        entries[index] = TensorEntry(name, code, shape, offset, end)
        offset = end
    return [entries[index] for index in range(len(tensors))]


def render_entries(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> str:
    """The JSON of a header but for the values blob: what stays the same from save to save."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        fields[entry.name] = _fields(entry)
    return _json(fields)[:-1]


def render_header(entries: str, *, data_bytes: int, values_bytes: int) -> bytes:
    """The first bytes of a shard, up to its data: ``entries`` with the values blob added."""
    blob = TensorEntry(VALUES_NAME, "U8", (values_bytes,), data_bytes, data_bytes + values_bytes)
    text = f"{entries},{_json(VALUES_NAME)}:{_json(_fields(blob))}}}".encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def _fields(entry: TensorEntry) -> dict[str, Any]:
    return {
        "dtype": entry.code,
        "shape": entry.shape,
        "data_offsets": (entry.begin, entry.end),
    }


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
