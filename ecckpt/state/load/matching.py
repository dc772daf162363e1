"""Live tensors and the saved ones that go into them, many looked at together."""

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


# A live tensor, the saved one that goes into it, and where in the state they are. A plain tuple:
# of those, `zip` makes thousands in no time.
Pair = tuple[torch.Tensor, StoredTensor, Path]


def matching(pairs: Sequence[Pair]) -> list[int] | None:
    """The addresses of the live tensors, if all pairs fit and are but bytes to copy; else None.

    Whoever gets None looks at the pairs one by one. An address is 0 where there are no elements.
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
    """What memory of a live state gets which saved tensor, to find what is tied."""

    def __init__(self, shardings: Shardings) -> None:
        self._shardings = shardings
        self._pairs: dict[int, tuple[Pair, ...]] = {}  # by address, of different parts of memory

    def add_new(self, addresses: Sequence[int], pairs: Sequence[Pair]) -> bool:
        """Add pairs of other addresses than all before; False, and nothing added, if any is not."""
        distinct = set(addresses) - {0}
        if len(distinct) + addresses.count(0) != len(addresses):
            return False
        if not self._pairs.keys().isdisjoint(distinct):
            return False
        self._pairs.update(zip(addresses, zip(pairs, strict=True), strict=True))
        self._pairs.pop(0, None)
        return True

    def first(self, part: Part, pair: Pair) -> Pair:
        """The first pair of the same elements of the same memory, maybe this one; adds it."""
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
