"""Which elements of a global tensor a rank has, and what two such cuts have in common. Pure.

torch cuts a tensor along each dimension by itself, so a cut is a list of spans per dimension: one
span for a plain shard (the cut is a box), several where a strided shard interleaves them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Start in the global tensor, and length; in the order in which the rank has them.
Spans = tuple[tuple[int, int], ...]

_PLACEMENT = re.compile(r"R|S\((\d{1,3})(?:, (\d{1,4}))?\)")


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements of a rank: the product of the spans of each dimension."""

    spans: tuple[Spans, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's own tensor."""
        return tuple(sum(length for _, length in spans) for spans in self.spans)

    def narrow(self, dim: int, start: int, length: int) -> Cut:
        """What is left of it when the rank's own tensor is narrowed like this."""
        if not (0 <= dim < len(self.spans) and 0 <= start <= start + length <= self.shape[dim]):
            raise ValueError(f"dimension {dim} from {start}, {length} long, of {self.shape}")
        spans = list(self.spans)
        spans[dim] = _take(spans[dim], start, start + length) or ((0, 0),)
        return Cut(tuple(spans))


class Common(NamedTuple):
    """A box that two cuts share: where it begins in each one's own tensor, and its shape."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    shape: tuple[int, ...]


def whole(shape: Sequence[int]) -> Cut:
    """The cut that is the tensor itself."""
    return Cut(tuple(((0, size),) for size in shape))


@lru_cache(maxsize=1 << 14)  # a model has many tensors, but of few shapes
def cut_of(
    shape: tuple[int, ...],
    placements: tuple[str, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Cut:
    """What the rank at ``coordinate`` of the mesh has of a tensor placed like this.

    Placements are spelled as in `sharding.py`: ``R``, ``S(dim)``, ``S(dim, split)``, one per mesh
    dimension, taken from left to right. Raises ``ValueError`` where they do not fit together.
    """
    if not len(placements) == len(mesh_shape) == len(coordinate):
        raise ValueError(f"{len(placements)} placements on a mesh of shape {tuple(mesh_shape)}")
    spans: list[Spans] = [((0, size),) for size in shape]
    for placement, ranks, rank in zip(placements, mesh_shape, coordinate, strict=True):
        match = _PLACEMENT.fullmatch(placement)
        if match is None or not 0 <= rank < ranks or match[2] == "0":
            raise ValueError(f"{placement[:40]!r} at {rank} of {ranks}")
        if match[1] is None:
            continue
        dim = int(match[1])
        if dim >= len(spans):
            raise ValueError(f"{placement} of a tensor with {len(spans)} dimensions")
        # A strided shard is cut into `split` pieces first, and has its share of each.
        split = int(match[2] or 1)
        pieces = [_chunk(spans[dim], number, split) for number in range(split)]
        spans[dim] = tuple(span for piece in pieces for span in _chunk(piece, rank, ranks))
    return Cut(tuple(each or ((0, 0),) for each in spans))


def in_common(source: Cut, target: Cut) -> list[Common]:
    """The boxes that make up what both cuts have."""
    dims = [_matches(one, other) for one, other in zip(source.spans, target.spans, strict=True)]
    return [
        Common(
            tuple(match[0] for match in matches),
            tuple(match[1] for match in matches),
            tuple(match[2] for match in matches),
        )
        for matches in itertools.product(*dims)
    ]


def byte_runs(
    shape: Sequence[int], start: Sequence[int], box: Sequence[int], item_bytes: int
) -> tuple[NDArray[np.int64], int]:
    """Where the bytes of a box lie in a tensor of ``shape`` in C order.

    ``start`` is where the box (of shape ``box``) begins. Returns the offsets of the contiguous
    runs, as few as there are, and the length of each.
    """
    run_bytes, stride = item_bytes, item_bytes
    dim = len(shape)
    while dim and run_bytes == stride:  # everything below is taken whole: the run goes on
        dim -= 1
        run_bytes *= box[dim]
        stride *= shape[dim]
    if not math.prod(box):
        return np.zeros(0, np.int64), 0
    offsets = np.zeros(1, np.int64)
    stride = item_bytes
    for axis in reversed(range(len(shape))):
        steps = np.arange(1 if axis >= dim else box[axis], dtype=np.int64) + start[axis]
        offsets = (steps[:, None] * stride + offsets).ravel()
        stride *= shape[axis]
    return offsets, run_bytes


def _chunk(spans: Spans, number: int, count: int) -> Spans:
    """One of so many chunks, as ``torch.chunk`` cuts them but with empty ones at the end."""
    size = sum(length for _, length in spans)
    part = -(-size // count)
    return _take(spans, part * number, part * (number + 1))


def _take(spans: Spans, begin: int, end: int) -> Spans:
    taken = []
    for start, length in spans:
        low, high = max(begin, 0), min(end, length)
        if low < high:
            taken.append((start + low, high - low))
        begin, end = begin - length, end - length
    return tuple(taken)


def _matches(source: Spans, target: Spans) -> list[tuple[int, int, int]]:
    """Where spans meet: start in the source's own tensor, in the target's, and length."""
    matches = []
    source_at = 0
    for source_start, source_length in source:
        target_at = 0
        for target_start, target_length in target:
            low = max(source_start, target_start)
            high = min(source_start + source_length, target_start + target_length)
            if low < high:
                matches.append(
                    (source_at + low - source_start, target_at + low - target_start, high - low)
                )
            target_at += target_length
        source_at += source_length
    return matches
