"""What a rank stores of many tensors, looked at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Self

import torch

from ecckpt.state.paths import Path
from ecckpt.state.snapshot.replicas import Replicas
from ecckpt.state.tensors.columns import TOGETHER, columns_of
from ecckpt.state.tensors.sharding import Sharding, Shardings
from ecckpt.state.tensors.tensors import Part, is_raw, memory_key, part_of, share_of


class Parts:
    """The parts of tensors in columns: what a plan goes by."""

    def __init__(self) -> None:
        self.locals: list[torch.Tensor] = []
        self.dtypes: list[torch.dtype] = []
        self.shapes: list[torch.Size] = []  # of what is stored
        self.addresses: list[int] = []
        self.raw: list[bool] = []  # whether the bytes in memory, from the address on, are to store
        self.shardings: dict[int, Sharding] = {}  # of those that are parts of others, by index
        # Of those that all ranks are said to have: all of it, and its address if that is raw.
        self.wholes: dict[int, tuple[torch.Tensor, int]] = {}

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        paths: Sequence[Path],
        shardings: Shardings,
        replicas: Replicas | None = None,
        covered: Collection[int] = (),
    ) -> Self:
        """The parts of ``tensors``, as ``share_of`` and ``part_of`` give and refuse them.

        ``covered`` are the indices of those that ``replicas`` says are the same on all ranks.
        """
        parts = cls()
        for start in range(0, len(tensors), TOGETHER):
            some = tensors[start : start + TOGETHER]
            if not parts._add_usual(some):
                for index, tensor in enumerate(some, start):
                    parts._add(tensor, index, paths[index], shardings)
            if replicas is not None and covered:
                for index in range(start, start + len(some)):
                    if index in covered and index not in parts.shardings:
                        parts._divide(index, replicas)
        return parts

    def _add_usual(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Add tensors that are all of the usual kind; False, and nothing added, if any is not."""
        columns = columns_of(tensors)
        if columns is None:
            return False
        self.locals += tensors
        self.dtypes += columns.dtypes
        self.shapes += columns.shapes
        self.addresses += columns.addresses
        self.raw += columns.raw
        return True

    def _add(self, tensor: torch.Tensor, index: int, path: Path, shardings: Shardings) -> None:
        local, sharding = share_of(part_of(tensor, path, shardings))
        if sharding is not None:
            self.shardings[index] = sharding
        self.locals.append(local)
        self.dtypes.append(local.dtype)
        self.shapes.append(local.shape)
        self.addresses.append(local.data_ptr())
        self.raw.append(is_raw(local))

    def _divide(self, index: int, replicas: Replicas) -> None:
        """Keep this rank's share of a tensor that all ranks have."""
        share = replicas.share(self.shapes[index])
        if share is None:
            return
        whole, address = self.locals[index], self.addresses[index]
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

    def owners(self) -> list[int]:
        """By index, the first of those that a tensor is tied to, or itself."""
        owners = list(range(len(self.locals)))
        if len(set(self.addresses)) == len(owners):
            return owners
        # Only what begins where another begins can be tied to it.
        counts = Counter(self.addresses)
        known: dict[Any, int] = {}
        for index, address in enumerate(self.addresses):
            if counts[address] > 1:
                part = Part(self.locals[index], self.shardings.get(index))
                key = memory_key(part)
                owners[index] = index if key is None else known.setdefault(key, index)
        return owners
