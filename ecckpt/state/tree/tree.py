"""A state as a tree, taken apart into tensors and values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeGuard

import msgpack
import torch

from ecckpt.errors import UnsupportedState
from ecckpt.state.paths import Path, describe
from ecckpt.state.tree.encoding import Encoder
from ecckpt.state.tree.nodes import CONTAINERS
from ecckpt.state.tree.values import DEPTH_MAX, OBJECT, TENSOR, extension, kind_name, pack, refuse


class Stateful(Protocol):
    """What modules, optimizers, schedulers and loaders have in common.

    An object may also have ``check_state_dict(state) -> list[str]``: the reasons why
    ``load_state_dict(state)`` would fail. It must change nothing. It gets its own copy of
    ``state``, with the local parts in the place of DTensors.
    """

    def state_dict(self) -> Any:
        """The state, as tensors and values."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take on a state that ``state_dict`` returned."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A state taken apart: tensors with their paths, and the packed tree that refers to them."""

    paths: tuple[Path, ...]
    tensors: tuple[torch.Tensor, ...]
    tree: bytes


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether ``value`` is an object that gives and takes its state."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def check_root(state: Any) -> None:
    """Raise ``UnsupportedState`` unless ``state`` is a dict."""
    if type(state) not in (dict, OrderedDict):
        raise UnsupportedState(
            "state", kind_name(state), hint='pass a dict, for example {"model": model}'
        )


def flatten(state: dict[Any, Any]) -> Flat:
    """Take ``state`` apart; values are copied, tensors are not.

    Calls ``state_dict()`` of the objects in it. Raises ``UnsupportedState``.
    """
    check_root(state)
    leaves = _Leaves()
    try:
        tree = pack(Encoder(leaves.add, leaves.add_all).encode(state, ()))
    except (ValueError, OverflowError) as error:  # msgpack's 32-bit lengths
        raise UnsupportedState(
            "state", f"values this large ({error})", hint="keep large data in tensors"
        ) from error
    return Flat(tuple(leaves.paths), tuple(leaves.tensors), tree)


@cache  # states have the same number of tensors at every save, perhaps tens of thousands
def _reference(index: int) -> msgpack.ExtType:
    return msgpack.ExtType(TENSOR, index.to_bytes(4, "big"))


class _Leaves:
    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.tensors: list[torch.Tensor] = []
        self._in_object = False

    def add(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            self.paths.append(path)
            self.tensors.append(value)
            return _reference(len(self.paths) - 1)
        # An object inside the state_dict() of another has nothing to be loaded into later.
        if self._in_object or not is_stateful(value):
            refuse(value, path)
        self._in_object = True
        encoded = Encoder(self.add, self.add_all).encode(value.state_dict(), path)
        self._in_object = False
        return extension(OBJECT, [kind_name(value), encoded])

    def add_all(self, tensors: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
        first = len(self.paths)
        self.paths += [(*path, key) for key in tensors]
        self.tensors += tensors.values()
        return dict(zip(tensors, map(_reference, range(first, len(self.paths))), strict=True))


def holds(node: Any, wanted: Callable[[Any], bool], path: Path = ()) -> bool:
    """Whether anything in ``node`` is ``wanted``; raises ``UnsupportedState`` if it has no end."""
    if type(node) not in CONTAINERS:
        return wanted(node)
    if len(path) > DEPTH_MAX:
        raise UnsupportedState(describe(path[:4]), "a container this deep", hint="flatten it")
    children = node.items() if isinstance(node, dict) else enumerate(node)
    return any(holds(child, wanted, (*path, key)) for key, child in children)


def is_live(node: Any) -> bool:
    """Whether a node of a user's tree is filled in place: a tensor or an object."""
    return isinstance(node, torch.Tensor) or is_stateful(node)
