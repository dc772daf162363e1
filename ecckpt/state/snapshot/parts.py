"""``Parts``: what a rank stores of each tensor of a state, in columns; ``plan.py`` uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Self

import torch

from ecckpt.errors import UnsupportedState
from ecckpt.state.paths import Path, describe
from ecckpt.state.snapshot.replicas import Replicas
from ecckpt.state.tensors.columns import TOGETHER, columns_of
from ecckpt.state.tensors.sharding import Sharding, Shardings
from ecckpt.state.tensors.tensors import Part, is_raw, memory_key, memory_order, part_of, share_of


class Parts:
    """The parts of tensors that this rank stores, one list per attribute.

    It keeps references to the tensors, which stay the program's.
    """

    def __init__(self) -> None:
        self.locals: list[torch.Tensor] = []  # the local tensors
        self.dtypes: list[torch.dtype] = []
        self.shapes: list[torch.Size] = []  # of the stored part
        self.addresses: list[int] = []  # of the stored part; valid if `raw`
        self.raw: list[bool] = []  # the memory at the address holds the stored bytes in C order
        self.shardings: dict[int, Sharding] = {}  # by index, for parts of global tensors
        # By index, for tensors declared equal on all ranks: the whole tensor, and its address, or 0
        # if it is not raw. `replicas.py` checks these.
        self.wholes: dict[int, tuple[torch.Tensor, int]] = {}

    @classmethod
    def of_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        paths: Sequence[Path],
        shardings: Shardings,
        replicas: Replicas | None = None,
        covered: Collection[int] = (),
    ) -> Self:
        """Determine the stored part of each tensor, as ``share_of(part_of(...))`` does.

        Args:
            tensors: the tensors of a state.
            paths: the path of each, for error messages.
            shardings: the cache of DTensor shardings.
            replicas: the declaration of tensors that are equal on all ranks, if there is one.
            covered: indices of the tensors that ``replicas`` names.

        Raises:
            UnsupportedState: a tensor that a shard cannot hold.
        """
        parts = cls()
        for start in range(0, len(tensors), TOGETHER):
            some = tensors[start : start + TOGETHER]
            if not parts._add_plain(some):
                for index, tensor in enumerate(some, start):
                    parts._add_one(tensor, index, paths[index], shardings)
            if replicas is not None and covered:
                for index in range(start, start + len(some)):
                    if index in covered and index not in parts.shardings:
                        parts._keep_share(index, replicas)
        return parts

    def _add_plain(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Add a batch if all tensors are plain CPU tensors; otherwise add none, return False."""
        columns = columns_of(tensors)
        if columns is None:
            return False
        self.locals += tensors
        self.dtypes += columns.dtypes
        self.shapes += columns.shapes
        self.addresses += columns.addresses
        self.raw += columns.raw
        return True

    def _add_one(self, tensor: torch.Tensor, index: int, path: Path, shardings: Shardings) -> None:
        local, sharding = share_of(part_of(tensor, path, shardings))
        if sharding is not None:
            self.shardings[index] = sharding
        self.locals.append(local)
        self.dtypes.append(local.dtype)
        self.shapes.append(local.shape)
        self.addresses.append(local.data_ptr())
        self.raw.append(is_raw(local))

    def _keep_share(self, index: int, replicas: Replicas) -> None:
        """Reduce a tensor that is equal on all ranks to the share that this rank stores."""
        whole, address = self.locals[index], self.addresses[index]
        share = replicas.share(self.shapes[index])
        if share is None:
            if replicas.ranks > 1 and whole.numel():  # a scalar: stored by each rank, and compared
                self.wholes[index] = whole, address if self.raw[index] else 0
            return
        self.shardings[index] = share.sharding
        self.wholes[index] = whole, address if self.raw[index] else 0
        if self.raw[index] and share.start is not None:
            self.shapes[index] = share.shape
            self.addresses[index] = address + share.start * self.dtypes[index].itemsize
            return
        assert share.sharding.held is not None
        local = self.locals[index] = whole.narrow(*share.sharding.held)
        self.shapes[index], self.addresses[index] = local.shape, local.data_ptr()
        self.raw[index] = is_raw(local)

    def layouts(self) -> dict[int, tuple[int, ...]]:
        """Return by index the order in memory of whole tensors that are not in C order."""
        orders = {
            index: memory_order(self.locals[index])
            for index, raw in enumerate(self.raw)
            if not raw and index not in self.shardings
        }
        return {index: order for index, order in orders.items() if order is not None}

    def require_memory(self, paths: Sequence[Path]) -> None:
        """Raise ``UnsupportedState`` for a tensor whose storage is shorter than the tensor."""
        for local, path in zip(self.locals, paths, strict=True):
            if not local.numel():
                continue
            last = sum(
                (size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True)
            )
            need_bytes = (local.storage_offset() + last + 1) * local.itemsize
            have_bytes = local.untyped_storage().nbytes()
            if have_bytes < need_bytes:
                raise UnsupportedState(
                    describe(path),
                    f"a tensor of {need_bytes} bytes over a storage of {have_bytes}",
                    hint="its storage was resized: save while its values are there",
                )

    def owners(self) -> list[int]:
        """Return for each index the first index that it is tied to, or itself.

        Tied tensors are the same elements of the same memory; the shard stores them once.
        """
        owners = list(range(len(self.locals)))
        if len(set(self.addresses)) == len(owners):
            return owners
        # Only tensors with equal addresses can be tied; the exact key is costly to compute.
        counts = Counter(self.addresses)
        known: dict[Any, int] = {}
        for index, address in enumerate(self.addresses):
            if counts[address] > 1:
                part = Part(self.locals[index], self.shardings.get(index))
                key = memory_key(part)
                owners[index] = index if key is None else known.setdefault(key, index)
        return owners
