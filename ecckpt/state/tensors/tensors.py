"""Operations on one tensor: the part of it that a rank stores, ties between tensors, filling it.

``snapshot``, ``load`` and ``integrations/dcp`` use it; ``columns.py`` is its fast path for many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch

from ecckpt.errors import UnsupportedState
from ecckpt.state.paths import Path, describe
from ecckpt.state.tensors.dtypes import STORED
from ecckpt.state.tensors.sharding import Sharding, Shardings, has_partial, is_dtensor, local_tensor

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


class Part(NamedTuple):
    """A rank's local tensor, and its place in a global tensor (None: it is not a part of one)."""

    local: torch.Tensor
    sharding: Sharding | None


def part_of(value: torch.Tensor, path: Path, shardings: Shardings) -> Part:
    """Return the part of ``value`` that this rank holds; it shares the memory of ``value``.

    Raises ``UnsupportedState``, with ``path`` in the message, for tensors without strided memory
    and for classes and dtypes that a shard cannot hold.
    """
    if type(value) in PLAIN_TYPES:
        local, sharding = value, None
    elif is_dtensor(value):
        if has_partial(value):  # type: ignore[arg-type]
            _refuse(path, "a DTensor with Partial placement", "redistribute it to Shard first")
        local, sharding = local_tensor(value), shardings.sharding_of(value)  # type: ignore[arg-type]
        if type(local) not in PLAIN_TYPES:
            _refuse(path, f"a DTensor over a {type(local).__name__}", _TO_PLAIN)
    else:
        _refuse(path, f"a tensor of the class {type(value).__name__}", _TO_PLAIN)
    if local.is_nested or local.layout is not torch.strided or local.is_meta:
        kind, way_out = _unusual(local)
        _refuse(path, kind, way_out)
    if local.dtype not in STORED:
        kind = "quantized tensor" if local.is_quantized else "tensor"
        _refuse(path, f"a {kind} of dtype {local.dtype}", _TO_PLAIN)
    return Part(local, sharding)


def share_of(part: Part) -> Part:
    """Return the share of ``part`` that this rank stores if other ranks have replicas of it.

    It shares the memory of ``part``. A part without replicas is returned as it is.
    """
    local, sharding = part
    held = sharding.share(tuple(local.shape)) if sharding else None
    if sharding is None or held is None:
        return part
    dim, start, length = held
    offset = sharding.offset and tuple(
        begin + (start if axis == dim else 0) for axis, begin in enumerate(sharding.offset)
    )
    return Part(local.narrow(dim, start, length), replace(sharding, held=held, offset=offset))


def memory_key(part: Part) -> Any:
    """Return a key that is equal for two parts if they are the same elements of the same memory.

    The comparison holds only while both tensors are alive. The key is None for a part that is tied
    to nothing: an empty tensor has no memory, whatever its address.
    """
    local = part.local
    if not local.numel() or not local.data_ptr():
        return None
    place = (local.device, local.data_ptr(), local.dtype)
    return (*place, local.shape, local.stride(), local.is_conj(), local.is_neg(), part.sharding)


def is_raw(local: torch.Tensor) -> bool:
    """Return whether the memory from ``data_ptr()`` on holds the elements in C order, on the CPU.

    Conjugated and negated views of torch are flags on unchanged memory, so they are not raw.
    """
    return local.is_cpu and local.is_contiguous() and not (local.is_neg() or local.is_conj())


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from the slowest to the fastest in memory, if that is not C order.

    None for C order, and for memory with gaps or overlaps.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def empty_in_order(
    shape: torch.Size, order: tuple[int, ...] | None, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Make a tensor without content whose memory has the given order (``memory_order``)."""
    if order is None:
        return torch.empty(shape, dtype=dtype, device=device)
    lengths = [shape[dim] for dim in order]
    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.empty(lengths, dtype=dtype, device=device).permute(places)


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, which has the same shape and dtype, on any device."""
    # torch allows writes to a tensor that was made in inference mode only in that mode. Leaving
    # that mode turns gradients on again, so `no_grad` comes second.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        written, read = collapse(target, source)
        written.copy_(read)


def collapse(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of both without the dimensions that ``target`` has from ``expand``.

    Along those all indices are one element in memory, and ``copy_`` refuses to write to it twice.
    """
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return target, source


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of the same shape and dtype hold the same bits, NaNs included."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Not reshape(-1): for a single element it keeps whatever stride the tensor has, and torch views
    # only tensors of stride 1 as bytes.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_TO_PLAIN = "store the plain tensors that it consists of"


def _unusual(local: torch.Tensor) -> tuple[str, str]:
    if local.is_nested:
        return "a nested tensor", "store its values and offsets"
    if local.is_meta:
        return "a meta tensor, which has no values", "materialize it first (to_empty)"
    return f"a {local.layout} tensor", "store its indices and values, or to_dense()"


def _refuse(path: Path, kind: str, hint: str) -> NoReturn:
    raise UnsupportedState(describe(path), kind, hint=f"{hint}, or leave it out of the state")
