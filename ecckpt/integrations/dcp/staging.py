"""Tensors whose values are not what their memory says, made plain before DCP copies memory.

torch marks ``x.conj()`` and the negative view of an imaginary part by a bit. DCP's stager copies
the memory without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only


def resolved(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with plain copies of conjugate and negative views; all else is shared."""
    made: dict[str, Any] = tree_map_only(torch.Tensor, _resolved, state)
    return made


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        if not _is_marked(local):
            return tensor
        return DTensor.from_local(
            _resolved(local),
            tensor.device_mesh,
            tensor.placements,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not _is_marked(tensor):
        return tensor  # subclasses say themselves how they are copied
    return tensor.detach().resolve_conj().resolve_neg()


def _is_marked(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()
