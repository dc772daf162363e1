"""``Assigner``: gives live tensors the memory of a shard, instead of copying the shard into them.

``load.py`` uses it for ``restore(assign=True)``. The tensor object stays and its memory is
exchanged, so that all references to the tensor see the restored values. A reference to the old
*memory* (another tensor, numpy, DLPack) would keep the old values. So a tensor whose memory has
another reference is copied into instead.
"""

from __future__ import annotations

import weakref
from functools import cache

import torch

from ecckpt.memory.buffers import address_of, byte_view
from ecckpt.state.tree.nodes import StoredTensor

# Smaller tensors are copied: it takes no longer, and one assigned tensor keeps the whole shard in
# memory.
_LEAST_BYTES = 256 << 10

# The memory of all live tensors made here, by address.
_assigned: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()


class Assigner:
    """Makes tensors over the memory of one shard.

    Args:
        memory: the whole shard, writable and private to this process. The tensors own it from now
            on; it is released with the last of them.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._begin = address_of(byte_view(memory, "memory of a shard", writable=True))
        self._taken: list[weakref.ref[memoryview]] = []

    @property
    def assigned_bytes(self) -> int:
        """Total length of the tensors made by this assigner that are still in use."""
        views = (reference() for reference in self._taken)
        return sum(len(view) for view in views if view is not None)

    def new_tensor(self, stored: StoredTensor) -> torch.Tensor | None:
        """Make a tensor over the memory of ``stored``; None if it has to be copied."""
        return self._tensor_over(stored) if self._is_assignable(stored) else None

    def move(self, live: torch.Tensor, stored: StoredTensor) -> bool:
        """Exchange the memory of ``live`` for that of ``stored``; return whether it was possible.

        Both have the same shape and dtype.
        """
        if not self._is_assignable(stored) or not _is_sole(live):
            return False
        live.data = self._tensor_over(stored)
        return True

    def _is_assignable(self, stored: StoredTensor) -> bool:
        """Return whether a live tensor may use the memory of ``stored``.

        Only one may: two live tensors restored from one stored tensor are separate copies.
        """
        begin, size_bytes = stored.address - self._begin, stored.form.size_bytes
        return (
            size_bytes >= _LEAST_BYTES
            and stored.sharding is None
            and 0 <= begin <= len(self._memory) - size_bytes
            and stored.address % stored.dtype.itemsize == 0
            and stored.address not in _assigned
        )

    def _tensor_over(self, stored: StoredTensor) -> torch.Tensor:
        begin, (dtype, shape, size_bytes) = stored.address - self._begin, stored.form
        view = _assigned[stored.address] = self._memory[begin : begin + size_bytes]
        self._taken.append(weakref.ref(view))
        # A tensor made in inference mode would refuse in-place updates outside of it.
        with torch.inference_mode(False):
            # `.data`, so that autograd does not see it as a view of the flat tensor.
            return torch.frombuffer(view, dtype=dtype).view(shape).data


def _is_sole(tensor: torch.Tensor) -> bool:
    """Return whether this tensor is the only reference to its memory, and torch allocated it."""
    if _references(tensor) != _references_of_new():
        return False
    storage = tensor.untyped_storage()
    return (
        # A storage that is not resizable wraps memory of another library, or memory assigned here.
        (storage.resizable() or storage.data_ptr() in _assigned)
        and not storage.is_shared()
        and not (_has_gpu() and tensor.is_pinned())
    )


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return torch's reference counts: of the C++ tensor, and of its storage."""
    storage = tensor.untyped_storage()
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses, torch._C._storage_Use_Count(storage._cdata)


def _has_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@cache
def _references_of_new() -> tuple[int, int]:
    """Return the counts of a tensor without other references: they differ by version of torch."""
    return _references(torch.empty(1))
