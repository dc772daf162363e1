"""Copies between a GPU's memory and the host's, queued beside what the caller's stream does.

host                        side stream of the device
----                        -------------------------
queue             ------->  waits for all that the caller's stream has been given so far
copy what is in
the host's memory           copies, one behind the other
wait              <-------  event

Nobody gets a slot, or a tensor, into which bytes are still coming: the caller may change its state
when a save returns, and a slot that is staged is coded. For states without tensors on a GPU nothing
in here touches ``torch.cuda``.
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

# Temporaries on a GPU that may be alive together, beside one that is larger by itself.
_TEMPORARY_BYTES = 256 << 20

Pair = tuple[torch.Tensor, torch.Tensor]  # target, source: of the same shape and dtype

# Mappings of slots by address, and whether CUDA knows them: each is registered once, or never.
_registered: dict[int, bool] = {}


def gpu_of(tensor: torch.Tensor) -> torch.device | None:
    """The GPU in whose memory a tensor is, if it is in one's."""
    return tensor.device if tensor.is_cuda else None


class SideCopies(contextlib.ExitStack):
    """Copies on the devices' side streams. However ``with`` is left, they have ended by then.

    What they failed by is raised then, as torch's ``RuntimeError``.
    """

    def to_host(self, pairs: Sequence[Pair], slot: memoryview) -> None:
        """Queue copies of tensors on GPUs to contiguous ones in the memory of ``slot``.

        If ``slot`` is a part of a mapped file, CUDA is told of it: once, for as long as it is.
        """
        for device, some in _by_gpu(pairs, [source for _, source in pairs]):
            with self._beside(device) as queue:
                _register(slot, device, some[0][1])
                for target, source in some:
                    plain = source
                    if not _is_plain(source):
                        # Otherwise torch may finish on the CPU, before the bytes have come.
                        queue.make_room(source.nbytes)
                        plain = torch.empty(source.shape, dtype=source.dtype, device=source.device)
                        plain.copy_(source)
                    target.copy_(plain, non_blocking=True)
                    queue.keep(target, plain)

    def to_gpus(self, pairs: Sequence[Pair]) -> None:
        """Queue copies of tensors in the host's memory to tensors on GPUs."""
        for device, some in _by_gpu(pairs, [target for target, _ in pairs]):
            with self._beside(device) as queue:
                for target, source in some:
                    plain, arrived = source.contiguous(), target
                    if not _is_plain(target):
                        queue.make_room(source.nbytes)
                        arrived = torch.empty(
                            source.shape, dtype=source.dtype, device=target.device
                        )
                    arrived.copy_(plain, non_blocking=True)
                    queue.keep(arrived, plain)
                    if arrived is not target:
                        target.copy_(arrived)

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[_Queue]:
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        queue = _Queue(stream)
        self.callback(queue.wait)
        with torch.no_grad(), torch.cuda.stream(stream):
            try:
                yield queue
            finally:
                queue.end()


class _Queue:
    """What one device was given to copy, and the tensors that must be there until it has."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._ended: torch.cuda.Event | None = None
        self._kept: list[torch.Tensor] = []
        self._temporary_bytes = 0

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keep what is copied from and to."""
        self._kept += tensors

    def make_room(self, temporary_bytes: int) -> None:
        """Before a temporary is made: where they are too much, wait until those before may go."""
        self._temporary_bytes += temporary_bytes
        if self._temporary_bytes > _TEMPORARY_BYTES:
            self._stream.synchronize()
            self._kept.clear()
            self._temporary_bytes = temporary_bytes

    def end(self) -> None:
        """Nothing more is queued."""
        # Blocking: CPUs have better things to do than to spin.
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        ended.record(self._stream)
        self._ended = ended

    def wait(self) -> None:
        """Wait until all of it is copied."""
        (self._ended or self._stream).synchronize()
        self._kept.clear()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def _by_gpu(
    pairs: Iterable[Pair], placed: Iterable[torch.Tensor]
) -> Iterable[tuple[torch.device, list[Pair]]]:
    """The pairs by the GPU that ``placed``, the tensor of each pair that is on one, is on."""
    found: dict[torch.device, list[Pair]] = defaultdict(list)
    for pair, tensor in zip(pairs, placed, strict=True):
        device = gpu_of(tensor)
        assert device is not None
        found[device].append(pair)
    return found.items()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


# -- registered memory ----------------------------------------------------------------------------


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(slot: memoryview, device: torch.device, near: torch.Tensor) -> None:
    """Have CUDA copy straight into a slot, where it can: otherwise it does so by its own memory."""
    mapping = mapping_of(slot)
    if mapping is None or mapping[0] in _registered:
        return
    address, size_bytes = mapping
    is_first = False not in _registered.values()
    # In this order: a registration that outlives its mapping would misdirect a later slot's bytes.
    _registered[address] = True
    before_unmapping(address, partial(_unregister, address, device, os.getpid()))
    code = int(_cudart().cudaHostRegister(address, size_bytes, 0))
    if code == 0:
        return
    _registered[address] = False
    # CUDA keeps the error for whoever asks next, which would be a kernel of the training's.
    with contextlib.suppress(RuntimeError):
        near.new_ones((), dtype=torch.float32)
    if is_first:
        _log.warning("slots are not registered with CUDA (error %d): saves take longer", code)


def _unregister(address: int, device: torch.device, process: int) -> bool:
    """Whether CUDA does not know the mapping any more. A fork has the mapping, but no CUDA."""
    if not _registered.pop(address, False) or os.getpid() != process:
        return True
    try:
        with torch.cuda.device(device):
            code = int(_cudart().cudaHostUnregister(address))
    except RuntimeError as error:
        _log.warning("CUDA does not let go of a slot, it stays mapped: %s", error)
        return False
    if code:
        _log.warning("CUDA does not let go of a slot, it stays mapped: error %d", code)
    return code == 0
