"""Pairs of live and saved tensors, compared in batches; and ties between live tensors.

``fit.py`` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from ecckpt.state.paths import Path
from ecckpt.state.tensors.columns import columns_of
from ecckpt.state.tensors.sharding import Shardings
from ecckpt.state.tensors.tensors import Part, memory_key, part_of
from ecckpt.state.tree.nodes import StoredTensor

_dtype_of, _shape_of = attrgetter("form.dtype"), attrgetter("form.shape")
_address_of, _sharding_of = attrgetter("address"), attrgetter("sharding")


# (live tensor, saved tensor, path in the state). A plain tuple, because `zip` makes thousands of
# them in C.
Pair = tuple[torch.Tensor, StoredTensor, Path]


def matching(pairs: Sequence[Pair]) -> list[int] | None:
    """Return the addresses of the live tensors if all pairs are plain copies of bytes.

    That is: plain CPU tensors in C order on both sides, with equal dtypes and shapes, not sharded.
    An address is 0 for an empty tensor. The result is None if any pair is different; the caller
    then examines the pairs one by one.
    """
    lives, stored, _ = zip(*pairs, strict=True)
    columns = columns_of(lives)
    fits = (
        columns is not None
        and all(columns.raw)
        and not any(map(torch.Tensor.is_inference, lives))
        and columns.dtypes == list(map(_dtype_of, stored))
        and columns.shapes == list(map(_shape_of, stored))
        and not any(map(_sharding_of, stored))
        and all(map(_address_of, stored))
    )
    return columns.addresses if columns is not None and fits else None


class Filled:
    """The memory of a live state that has a saved tensor assigned, to find tied live tensors."""

    def __init__(self, shardings: Shardings) -> None:
        self._shardings = shardings
        # By address. Several pairs of one address differ in shape, strides or dtype.
        self._pairs: dict[int, tuple[Pair, ...]] = {}

    def add_untied(self, addresses: Sequence[int], pairs: Sequence[Pair]) -> bool:
        """Add pairs if all their addresses are new and distinct; otherwise add none, return False.

        Pairs with equal addresses may be tied, and have to go through ``first_of``.
        """
        distinct = set(addresses) - {0}
        if len(distinct) + addresses.count(0) != len(addresses):
            return False
        if not self._pairs.keys().isdisjoint(distinct):
            return False
        self._pairs.update(zip(addresses, zip(pairs, strict=True), strict=True))
        self._pairs.pop(0, None)
        return True

    def first_of(self, part: Part, pair: Pair) -> Pair:
        """Return the first pair with the same elements of the same memory; add ``pair`` if none."""
        key = memory_key(part)
        if key is None:
            return pair
        address = part.local.data_ptr()
        others = self._pairs.get(address, ())
        for other in others:
            live, _, path = other
            if memory_key(part_of(live, path, self._shardings)) == key:
                return other
        self._pairs[address] = (*others, pair)
        return pair
