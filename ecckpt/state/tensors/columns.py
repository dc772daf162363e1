"""Attributes of many tensors at once; ``snapshot/parts.py`` and ``load`` use it.

Reading one attribute of 20,000 tensors takes milliseconds: the objects are scattered over memory,
and each access is a step of the interpreter. So all attributes of a batch are read while its tensor
objects are in the CPU's cache, by functions that loop in C (``map``, ``issuperset``).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from ecckpt.state.tensors.dtypes import STORED
from ecckpt.state.tensors.tensors import PLAIN_TYPES

TOGETHER = 512  # tensors per batch: their Python and C++ objects fit into the CPU's cache
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_STRIDED = frozenset({torch.strided})
_dtype_of, _shape_of, _layout_of = map(attrgetter, ("dtype", "shape", "layout"))
_on_cpu, _nested = attrgetter("is_cpu"), attrgetter("is_nested")


class TensorColumns(NamedTuple):
    """Attributes of plain CPU tensors, one list per attribute."""

    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    addresses: list[int]  # 0 for an empty tensor
    raw: list[bool]  # whether the memory from there on holds the elements in C order


def columns_of(tensors: Sequence[torch.Tensor]) -> TensorColumns | None:
    """Return the columns of tensors if all are plain CPU tensors; None if any is not.

    Plain: a tensor or parameter whose memory ``part_of`` would return unchanged. The caller handles
    a batch with other tensors one by one, with ``part_of``.
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
    return TensorColumns(
        dtypes,
        list(map(_shape_of, tensors)),
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.is_contiguous, tensors)),
    )
