"""Tensors that lie where a shard is, instead of getting a copy of it.

A tensor of the state stays the object that it is, and only its memory becomes another: so everybody
who has the tensor sees what was restored. Whoever has only the *memory*, by another tensor, numpy
or DLPack, would go on seeing the old one. Such tensors are left to be copied into.
"""

from __future__ import annotations

import weakref
from functools import cache

import torch

from ecckpt.memory.buffers import address_of, byte_view
from ecckpt.state.tree.nodes import StoredTensor

# Copying what is smaller takes no longer. And each tensor that is here keeps all of a shard there.
_LEAST_BYTES = 256 << 10

# The memory of all tensors made here that are still there, by its address.
_made: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()


class Assigner:
    """Makes tensors over ``memory``: a whole shard, which nobody else will change or look at.

    It is writable, and there until the last of the tensors is gone.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._begin = address_of(byte_view(memory, "memory of a shard", writable=True))
        self._taken: list[weakref.ref[memoryview]] = []

    @property
    def assigned_bytes(self) -> int:
        """Bytes of the tensors that are in use."""
        found = (taken() for taken in self._taken)
        return sum(len(view) for view in found if view is not None)

    def new(self, stored: StoredTensor) -> torch.Tensor | None:
        """A tensor that is ``stored``, where it lies; None if it has to be a copy."""
        return self._make(stored) if self._can_be(stored) else None

    def move(self, live: torch.Tensor, stored: StoredTensor) -> bool:
        """Have ``live`` lie where ``stored``, of the same form, does; whether that could be."""
        if not self._can_be(stored) or not _is_sole(live):
            return False
        live.data = self._make(stored)
        return True

    def _can_be(self, stored: StoredTensor) -> bool:
        """Of tied tensors only one: the others would change with it, unlike copies."""
        begin, size_bytes = stored.address - self._begin, stored.form.size_bytes
        return (
            size_bytes >= _LEAST_BYTES
            and stored.sharding is None
            and 0 <= begin <= len(self._memory) - size_bytes
            and stored.address % stored.dtype.itemsize == 0
            and stored.address not in _made
        )

    def _make(self, stored: StoredTensor) -> torch.Tensor:
        begin, (dtype, shape, size_bytes) = stored.address - self._begin, stored.form
        view = _made[stored.address] = self._memory[begin : begin + size_bytes]
        self._taken.append(weakref.ref(view))
        with torch.inference_mode(False):  # what is made in there would stay unlike others
            # By itself, not as a view of what was made first.
            return torch.frombuffer(view, dtype=dtype).view(shape).data


def _is_sole(tensor: torch.Tensor) -> bool:
    """Whether nothing but this tensor refers to its memory, which is of the usual kind."""
    if _references(tensor) != _references_of_new():
        return False
    storage = tensor.untyped_storage()
    return (
        # Else it is somebody else's memory, shown as a tensor.
        (storage.resizable() or storage.data_ptr() in _made)
        and not storage.is_shared()
        and not (_has_gpu() and tensor.is_pinned())
    )


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """To a tensor, by others than Python, and to its memory."""
    storage = tensor.untyped_storage()
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses, torch._C._storage_Use_Count(storage._cdata)


def _has_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@cache
def _references_of_new() -> tuple[int, int]:
    return _references(torch.empty(1))
