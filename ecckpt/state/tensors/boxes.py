"""Cuts: which elements of a global tensor a rank holds, and intersections of two cuts. Pure.

``sharding.py`` makes cuts of DTensors; ``state/reshard`` and ``integrations/dcp`` intersect them to
find which bytes of which shard a rank needs.

torch splits a tensor along each dimension separately, so a cut is a list of spans per dimension:
one span for a plain ``Shard`` (the cut is a box), several spans for a strided shard, whose rows
interleave with those of other ranks.
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

# (start in the global tensor, length), in elements, in the order of the rank's local tensor.
Spans = tuple[tuple[int, int], ...]

_PLACEMENT = re.compile(r"R|S\((\d{1,3})(?:, (\d{1,4}))?\)")


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements of a rank: the Cartesian product of the spans of each dimension."""

    spans: tuple[Spans, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's local tensor."""
        return tuple(sum(length for _, length in spans) for spans in self.spans)

    def narrow(self, dim: int, start: int, length: int) -> Cut:
        """Return the cut of ``local.narrow(dim, start, length)``.

        Raises ``ValueError`` if the local tensor has no such rows.
        """
        if not (0 <= dim < len(self.spans) and 0 <= start <= start + length <= self.shape[dim]):
            raise ValueError(
                f"no rows {start} to {start + length} in dimension {dim} of shape {self.shape}"
            )
        spans = list(self.spans)
        spans[dim] = _sliced(spans[dim], start, start + length) or ((0, 0),)
        return Cut(tuple(spans))


class Common(NamedTuple):
    """A box in both of two cuts: where it begins in either local tensor, and its shape."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    shape: tuple[int, ...]


def whole(shape: Sequence[int]) -> Cut:
    """Return the cut that has all elements."""
    return Cut(tuple(((0, size),) for size in shape))


@lru_cache(maxsize=1 << 14)  # a model has many tensors, but few distinct shapes
def cut_of(
    shape: tuple[int, ...],
    placements: tuple[str, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Cut:
    """Return the elements that one rank of a mesh holds of a DTensor.

    Args:
        shape: of the global tensor.
        placements: one per mesh dimension, applied from left to right, spelled as ``sharding.py``
            does: ``R``, ``S(dim)`` or ``S(dim, split)``.
        mesh_shape: ranks per mesh dimension.
        coordinate: the rank's coordinate in the mesh.

    Raises:
        ValueError: the arguments do not fit together, or a placement is unknown.
    """
    if not len(placements) == len(mesh_shape) == len(coordinate):
        raise ValueError(f"{len(placements)} placements on a mesh of shape {tuple(mesh_shape)}")
    spans: list[Spans] = [((0, size),) for size in shape]
    for placement, ranks, rank in zip(placements, mesh_shape, coordinate, strict=True):
        match = _PLACEMENT.fullmatch(placement)
        if match is None or not 0 <= rank < ranks or match[2] == "0":
            raise ValueError(f"placement {placement[:40]!r} at rank {rank} of {ranks}")
        if match[1] is None:
            continue
        dim = int(match[1])
        if dim >= len(spans):
            raise ValueError(f"{placement} of a tensor with {len(spans)} dimensions")
        # A strided shard splits the dimension into `split` pieces first and takes its chunk of each
        # (torch's _StridedShard: tensor parallelism under FSDP).
        split = int(match[2] or 1)
        pieces = [_chunk(spans[dim], number, split) for number in range(split)]
        spans[dim] = tuple(span for piece in pieces for span in _chunk(piece, rank, ranks))
    return Cut(tuple(dim_spans or ((0, 0),) for dim_spans in spans))


def in_common(source: Cut, target: Cut) -> list[Common]:
    """Return the boxes that together are the intersection of two cuts."""
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
    """Return where the bytes of a box lie in a tensor in C order.

    Args:
        shape: of the tensor.
        start: where the box begins, in elements per dimension.
        box: shape of the box.
        item_bytes: length of an element.

    Returns:
        The offsets in bytes of the contiguous runs (int64, shape (runs,), the smallest possible
        number of them, in ascending order), and the length in bytes of each run.
    """
    run_bytes, stride = item_bytes, item_bytes
    dim = len(shape)
    while dim and run_bytes == stride:  # the box spans all inner dimensions: the run goes on
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
    """Return chunk ``number`` of ``count``, as ``torch.chunk`` splits; the last may be empty."""
    size = sum(length for _, length in spans)
    part = -(-size // count)
    return _sliced(spans, part * number, part * (number + 1))


def _sliced(spans: Spans, begin: int, end: int) -> Spans:
    taken = []
    for start, length in spans:
        low, high = max(begin, 0), min(end, length)
        if low < high:
            taken.append((start + low, high - low))
        begin, end = begin - length, end - length
    return tuple(taken)


def _matches(source: Spans, target: Spans) -> list[tuple[int, int, int]]:
    """Intersect spans: (start in the source's local tensor, start in the target's, length)."""
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
