"""Copies between GPU memory and host memory, on a side stream of each GPU.

``snapshot/plan.py`` copies tensors into slots with it, ``load/filling.py`` copies them back.

    host                           side stream of the GPU
    ----                           ----------------------
    queue the copies      ------>  wait for all work that the caller's stream has been given so far
    copy CPU tensors               copy, one tensor after another
    wait for the event    <------  event

``SideCopies`` waits for the event before it returns, for two reasons. The program may change its
state as soon as ``save()`` returns, and the agent encodes a slot as soon as it is staged: neither
may happen while bytes are still being copied. For a state without GPU tensors this module does not
touch ``torch.cuda``, which would initialize CUDA in the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from ecckpt.memory.mapping import before_unmapping, mapping_of

_log = logging.getLogger(__name__)

# The limit for contiguous temporaries that are alive on a GPU at the same time. One temporary alone
# may be larger. Training often leaves little free GPU memory.
_TEMPORARY_BYTES = 256 << 20

Pair = tuple[torch.Tensor, torch.Tensor]  # (target, source), of the same shape and dtype

# Addresses of slot mappings that were offered to CUDA, and whether CUDA accepted them. A mapping
# that CUDA refused is not offered again.
_registered: dict[int, bool] = {}


def gpu_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the GPU that holds a tensor's memory; None for a CPU tensor."""
    return tensor.device if tensor.is_cuda else None


class SideCopies(contextlib.ExitStack):
    """Copies on the side streams of GPUs; a context manager.

    All copies have ended when the ``with`` block is left, also by an exception. A copy that failed
    raises torch's ``RuntimeError`` at that point. The caller keeps all tensors alive until then.
    """

    def to_host(self, pairs: Sequence[Pair], slot: memoryview) -> None:
        """Queue copies from tensors on GPUs to contiguous tensors in the memory of ``slot``.

        If ``slot`` lies in a mapped file, the whole mapping is registered with CUDA at its first
        use, and stays registered until it is unmapped.
        """
        for device, some in _by_gpu(pairs, [source for _, source in pairs]):
            with self._beside(device) as queue:
                _register(slot, device, some[0][1])
                for target, source in some:
                    plain = source
                    if not _is_plain(source):
                        # For other layouts, `copy_` to the host may copy to a temporary of its own
                        # and rearrange that on the CPU before the bytes have arrived.
                        queue.reserve_temporary(source.nbytes)
                        plain = torch.empty(source.shape, dtype=source.dtype, device=source.device)
                        plain.copy_(source)
                    target.copy_(plain, non_blocking=True)
                    queue.keep(target, plain)

    def to_gpus(self, pairs: Sequence[Pair]) -> None:
        """Queue copies from CPU tensors to tensors on GPUs."""
        for device, some in _by_gpu(pairs, [target for target, _ in pairs]):
            with self._beside(device) as queue:
                for target, source in some:
                    plain, arrived = source.contiguous(), target
                    if not _is_plain(target):
                        queue.reserve_temporary(source.nbytes)
                        arrived = torch.empty(
                            source.shape, dtype=source.dtype, device=target.device
                        )
                    arrived.copy_(plain, non_blocking=True)
                    queue.keep(arrived, plain)
                    if arrived is not target:
                        target.copy_(arrived)

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[_CopyQueue]:
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        queue = _CopyQueue(stream)
        self.callback(queue.wait)
        with torch.no_grad(), torch.cuda.stream(stream):
            try:
                yield queue
            finally:
                queue.end()


class _CopyQueue:
    """The copies queued on one GPU, and references to their tensors until they have ended."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._ended: torch.cuda.Event | None = None
        self._kept: list[torch.Tensor] = []
        self._temporary_bytes = 0

    def keep(self, *tensors: torch.Tensor) -> None:
        """Hold a reference to the tensors of a copy until it has ended."""
        self._kept += tensors

    def reserve_temporary(self, temporary_bytes: int) -> None:
        """Call before a temporary is allocated; waits for earlier copies if the limit is reached.

        After the wait the earlier temporaries are released.
        """
        self._temporary_bytes += temporary_bytes
        if self._temporary_bytes > _TEMPORARY_BYTES:
            self._stream.synchronize()
            self._kept.clear()
            self._temporary_bytes = temporary_bytes

    def end(self) -> None:
        """Record the event that ``wait`` waits for; no copy may be queued after it."""
        # A blocking event: by default the waiting thread spins, and takes a CPU from the training.
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        ended.record(self._stream)
        self._ended = ended

    def wait(self) -> None:
        """Wait until all queued copies have ended, and release their tensors."""
        (self._ended or self._stream).synchronize()
        self._kept.clear()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def _by_gpu(
    pairs: Iterable[Pair], placed: Iterable[torch.Tensor]
) -> Iterable[tuple[torch.device, list[Pair]]]:
    """Group pairs by GPU; ``placed`` has the tensor of each pair that is on a GPU."""
    pairs_of: dict[torch.device, list[Pair]] = defaultdict(list)
    for pair, tensor in zip(pairs, placed, strict=True):
        device = gpu_of(tensor)
        assert device is not None
        pairs_of[device].append(pair)
    return pairs_of.items()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


# -- registered memory ----------------------------------------------------------------------------


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(slot: memoryview, device: torch.device, near: torch.Tensor) -> None:
    """Register the mapping of a slot with CUDA (page-locked), if it has not been offered yet.

    CUDA then copies directly into the slot. Without that it copies through its own page-locked
    buffer, which is slower but correct. ``near`` is a tensor on ``device``.
    """
    mapping = mapping_of(slot)
    if mapping is None or mapping[0] in _registered:
        return
    address, size_bytes = mapping
    is_first = False not in _registered.values()
    # Arrange for the end of the registration before it begins. A registration that outlived its
    # mapping would send the bytes of a later mapping at this address to the old pages.
    _registered[address] = True
    before_unmapping(address, partial(_unregister, address, device, os.getpid()))
    code = int(_cudart().cudaHostRegister(address, size_bytes, 0))
    if code == 0:
        return
    _registered[address] = False
    # The CUDA runtime keeps the error and reports it at the next kernel launch, which would be one
    # of the training. A small kernel here takes the error away.
    with contextlib.suppress(RuntimeError):
        near.new_ones((), dtype=torch.float32)
    if is_first:  # later mappings are refused for the same reason
        _log.warning("slots are not registered with CUDA (error %d): saves take longer", code)


def _unregister(address: int, device: torch.device, process: int) -> bool:
    """End the registration of a mapping; return whether it may be unmapped.

    In a forked child the mapping exists but CUDA does not, so there is nothing to do.
    """
    if not _registered.pop(address, False) or os.getpid() != process:
        return True
    try:
        with torch.cuda.device(device):
            code = int(_cudart().cudaHostUnregister(address))
    except RuntimeError as error:
        _log.warning("CUDA cannot unregister a slot, which stays mapped: %s", error)
        return False
    if code:
        _log.warning("CUDA cannot unregister a slot, which stays mapped: error %d", code)
    return code == 0
