"""One tensor: whether it can be stored, what ties it to others, how it is filled."""

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
    """What a rank has of a tensor: memory of its own, and where that sits in a global tensor."""

    local: torch.Tensor
    sharding: Sharding | None


def part_of(value: torch.Tensor, path: Path, shardings: Shardings) -> Part:
    """The part of ``value`` that this rank stores; shares its memory.

    Raises ``UnsupportedState`` for what has no plain memory, or none that safetensors can hold.
    """
    if type(value) in PLAIN_TYPES:
        local, sharding = value, None
    elif is_dtensor(value):
        if has_partial(value):  # type: ignore[arg-type]
            _refuse(path, "a DTensor with Partial placement", "redistribute it to Shard first")
        local, sharding = local_tensor(value), shardings.of(value)  # type: ignore[arg-type]
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
    """The share of ``part`` that this rank stores, where other ranks have replicas of it."""
    local, sharding = part
    held = sharding.share(tuple(local.shape)) if sharding else None
    if sharding is None or held is None:
        return part
    dim, start, length = held
    offset = sharding.offset and tuple(
        at + (start if each == dim else 0) for each, at in enumerate(sharding.offset)
    )
    return Part(local.narrow(dim, start, length), replace(sharding, held=held, offset=offset))


def memory_key(part: Part) -> Any:
    """Equal for two parts that are the same elements of the same memory; None: comparable to none.

    Only while both are alive. Empty tensors share no memory, whatever their address.
    """
    local = part.local
    if not local.numel() or not local.data_ptr():
        return None
    place = (local.device, local.data_ptr(), local.dtype)
    return (*place, local.shape, local.stride(), local.is_conj(), local.is_neg(), part.sharding)


def is_raw(local: torch.Tensor) -> bool:
    """Whether the bytes in memory, from the address on, are those of the elements in C order."""
    return local.is_cpu and local.is_contiguous() and not (local.is_neg() or local.is_conj())


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, of the same shape and dtype, on any device."""
    # Tensors that were made in inference mode can be written to in there only.
    with torch.no_grad(), torch.inference_mode(target.is_inference()):
        written, read = collapse(target, source)
        written.copy_(read)


def collapse(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both without the dimensions along which ``target`` repeats one element (``expand``)."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return target, source


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits (NaNs included)."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Not reshape(-1): of a single element it keeps any stride, and that cannot be viewed as bytes.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_TO_PLAIN = "store the plain tensors that it is made of"


def _unusual(local: torch.Tensor) -> tuple[str, str]:
    if local.is_nested:
        return "a nested tensor", "store its values and offsets"
    if local.is_meta:
        return "a meta tensor, which has no values", "materialize it first (to_empty)"
    return f"a {local.layout} tensor", "store its indices and values, or to_dense()"


def _refuse(path: Path, kind: str, hint: str) -> NoReturn:
    raise UnsupportedState(describe(path), kind, hint=f"{hint}, or leave it out of the state")
