"""The nodes of a saved tree that are no values: tensors, and the states of objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ecckpt.state.paths import Path
from ecckpt.state.sharding import Sharding, is_dtensor, rebuild_dtensor
from ecckpt.state.values import kind_name

CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a shard, in the place where the state had it; ``data`` is a view of the shard."""

    name: str
    data: torch.Tensor
    sharding: Sharding | None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What ``state_dict()`` of an object returned, and the name of the object's class."""

    kind: str
    state: Any


def is_stored(node: Any) -> bool:
    """Whether a node of a saved tree is more than a value."""
    return type(node) in (StoredTensor, StoredObject)


def stored_name(node: Any) -> str:
    """What a node of a saved tree is, as messages show it."""
    if type(node) is StoredObject:
        return f"state of {node.kind}"
    return "a tensor" if type(node) is StoredTensor else kind_name(node)


def replace_tensors(node: Any, make: Callable[[StoredTensor, Path], Any], path: Path = ()) -> Any:
    """``node`` in new containers, with ``make(tensor, path)`` for each stored tensor."""
    if type(node) is StoredTensor:
        return make(node, path)
    if type(node) not in CONTAINERS:
        return node
    if isinstance(node, dict):
        pairs = ((key, replace_tensors(each, make, (*path, key))) for key, each in node.items())
        return type(node)(pairs)
    items = (replace_tensors(each, make, (*path, index)) for index, each in enumerate(node))
    return type(node)(items)


def fresh_tensor(stored: StoredTensor, like: torch.Tensor | None) -> torch.Tensor:
    """A copy of ``stored`` that outlives the shard, where ``like`` is (None: in CPU memory).

    If it is a part of a global tensor, ``like`` must be a DTensor sharded in the same way.
    """
    device = "cpu" if like is None else like.device
    local = stored.data.to(device, copy=True)
    if stored.sharding is None:
        return local
    assert is_dtensor(like)
    return rebuild_dtensor(local, stored.sharding, like)  # type: ignore[arg-type]
