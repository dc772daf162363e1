"""The layout of a shard, and the writer of its safetensors header. It does not import torch.

``snapshot/plan.py`` arranges tensors with it, ``header.py`` checks what it reads against it, and
``integrations/safetensors`` writes its files with it. A shard is:

    8 bytes     length of the header, little endian
    header      JSON, padded with spaces: the data begins at a multiple of 64 bytes
    tensors     one after another without gaps, those with the widest elements first
    values      one more "tensor" of bytes: the values blob (``state/tree``)

The order by element width aligns each tensor to its elements without padding between them.
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

HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors library
ALIGN_BYTES = 64
_INT64_MAX = 2**63 - 1
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor in a safetensors header.

    ``code`` is the dtype as safetensors spells it. ``begin`` and ``end`` are bytes from the start
    of the data, which follows the header.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def size_of(code: str, shape: tuple[int, ...]) -> int:
    """Return the length in bytes of a tensor.

    Raises ``ValueError`` if the dtype is unknown or torch could not make a tensor of this shape.
    The message is a predicate; callers put the tensor's name before it.
    """
    if code not in ITEM_BYTES:
        raise ValueError(f"has the unknown dtype {code!r:.40}")
    if any(size < 0 for size in shape):
        raise ValueError("has a negative size")
    size_bytes = math.prod(shape) * ITEM_BYTES[code]
    # torch multiplies the sizes other than 0 into an int64, even if another size is 0.
    if max(size_bytes, math.prod(max(size, 1) for size in shape)) > _INT64_MAX:
        raise ValueError("has a shape that is too large")
    return size_bytes


class Places(NamedTuple):
    """The byte ranges of all tensors of a file as columns, in ascending order.

    ``sizes`` are the lengths in bytes that dtype and shape imply, ``items`` those of one element.
    """

    names: Sequence[str]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]
    items: NDArray[np.int64]

    def check(self, data_bytes: int) -> None:
        """Check that the tensors fill ``data_bytes`` without gaps, each aligned to its elements.

        Raises ``ValueError``, which names the first tensor that does not.
        """
        names, begins, ends, sizes, items = self
        bounds = np.concatenate((np.zeros(1, np.int64), ends))
        for wrong, problem in (
            (begins != bounds[:-1], "it does not begin where the one before it ends"),
            (ends - begins != sizes, "its length differs from that of its shape"),
            ((begins % items != 0) & (sizes > 0), "misaligned"),
        ):
            if wrong.any():
                at = int(wrong.argmax())
                raise ValueError(
                    f"{names[at]!r:.80} at bytes {begins[at]} to {ends[at]}: {problem}"
                )
        if bounds[-1] != data_bytes:
            raise ValueError(f"the tensors have {bounds[-1]} bytes, the data {data_bytes} bytes")


def arrange(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], parts: Collection[str] = ()
) -> list[TensorEntry]:
    """Give each tensor its byte range in the file.

    The byte ranges follow the alignment, widest first, and then the name, as the safetensors
    library arranges them. Among tensors of one alignment, those named in ``parts`` come first.

    Args:
        tensors: (name, dtype code, shape, alignment in bytes) of each tensor.
        parts: names of tensors that are parts of global tensors. A restore on another number of
            ranks reads the other, small tensors of many shards; they should be neighbours.

    Returns:
        An entry for each tensor, in the order of the argument.
    """
    entries: dict[int, TensorEntry] = {}
    offset = 0

    def position(index: int) -> tuple[int, bool, str]:
        name, _, _, align_bytes = tensors[index]
        return -align_bytes, name not in parts, name

    order = sorted(range(len(tensors)), key=position)
    for index in order:
        name, code, shape, _ = tensors[index]
        end = offset + math.prod(shape) * ITEM_BYTES[code]
        entries[index] = TensorEntry(name=name, code=code, shape=shape, begin=offset, end=end)
        offset = end
    return [entries[index] for index in range(len(tensors))]


def render_entries(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> str:
    """Render a header up to the values blob: an open JSON object without its closing brace.

    This part is the same for all saves of a state, so a plan renders it once.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        fields[entry.name] = _fields(entry)
    return _json(fields)[:-1]


def render_header(entries: str, *, data_bytes: int, values_bytes: int) -> bytes:
    """Return the bytes of a shard before its data: length, JSON and padding.

    Args:
        entries: the result of ``render_entries``.
        data_bytes: length of all tensors without the values blob.
        values_bytes: length of the values blob, which differs from save to save.
    """
    blob = TensorEntry(
        name=VALUES_NAME,
        code="U8",
        shape=(values_bytes,),
        begin=data_bytes,
        end=data_bytes + values_bytes,
    )
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
