"""Many tensors looked at together.

Of 20,000 tensors each look costs milliseconds: they lie all over the memory, and each is a step of
Python. So neighbours are looked at together, a few at a time, by functions that walk lists in C
while the tensors are still in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from ecckpt.state.tensors.dtypes import STORED
from ecckpt.state.tensors.tensors import PLAIN_TYPES

TOGETHER = 512
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_STRIDED = frozenset({torch.strided})
_dtype_of, _shape_of, _layout_of = map(attrgetter, ("dtype", "shape", "layout"))
_on_cpu, _nested = attrgetter("is_cpu"), attrgetter("is_nested")


class Columns(NamedTuple):
    """What there is to know of tensors of the usual kind."""

    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    addresses: list[int]  # 0 for those without elements
    raw: list[bool]  # whether the bytes from there on are those of the elements in C order


def columns_of(tensors: Sequence[torch.Tensor]) -> Columns | None:
    """The columns of tensors that all are of the usual kind; None if any is not.

    That is: plain memory of the CPU that ``part_of`` would neither refuse nor change.
    """
    dtypes = list(map(_dtype_of, tensors))
    usual = (
        PLAIN_TYPES.issuperset(map(type, tensors))
        and STORED.issuperset(dtypes)
        and _STRIDED.issuperset(map(_layout_of, tensors))
        and all(map(_on_cpu, tensors))
        and not any(map(_nested, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and (_COMPLEX.isdisjoint(dtypes) or not any(map(torch.Tensor.is_conj, tensors)))
    )
    if not usual:
        return None
    return Columns(
        dtypes,
        list(map(_shape_of, tensors)),
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.is_contiguous, tensors)),
    )
