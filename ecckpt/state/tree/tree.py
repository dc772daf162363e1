"""``flatten``: splits a state into its tensors and a packed tree that refers to them by index.

``snapshot/plan.py`` and ``integrations/dcp`` use it; ``load`` uses the predicates below.
"""

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
    """An object that can return and accept its state: module, optimizer, scheduler, loader.

    An object may also have ``check_state_dict(state) -> list[str]``, which returns the reasons why
    ``load_state_dict(state)`` would fail. It must not change the object. It gets a copy of the
    state of its own, with local parts in place of DTensors.
    """

    def state_dict(self) -> Any:
        """Return the state, made of tensors and values."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Set the object to a state that ``state_dict`` has returned."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state: tensors with their paths, and the tree that refers to them by index."""

    paths: tuple[Path, ...]
    tensors: tuple[torch.Tensor, ...]
    tree: bytes


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return whether ``value`` is an instance with ``state_dict`` and ``load_state_dict``."""
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
    """Split ``state`` into tensors and tree. Values are copied, tensors are not.

    It calls ``state_dict()`` of the objects in the state.

    Raises:
        UnsupportedState: something in it cannot be stored; the message has its path.
    """
    check_root(state)
    leaves = _Leaves()
    try:
        tree = pack(Encoder(leaves.encode_leaf, leaves.encode_tensors).encode(state, ()))
    except (ValueError, OverflowError) as error:  # msgpack has 32-bit lengths
        raise UnsupportedState(
            "state", f"values of this size ({error})", hint="keep large data in tensors"
        ) from error
    return Flat(tuple(leaves.paths), tuple(leaves.tensors), tree)


@cache  # a state has about as many tensors at each save, perhaps tens of thousands
def _reference(index: int) -> msgpack.ExtType:
    return msgpack.ExtType(TENSOR, index.to_bytes(4, "big"))


class _Leaves:
    """Collects the tensors of a state, and encodes them as references."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.tensors: list[torch.Tensor] = []
        self._in_object = False

    def encode_leaf(self, value: Any, path: Path) -> Any:
        """Encode a tensor or an object with a state; refuse anything else."""
        if isinstance(value, torch.Tensor):
            self.paths.append(path)
            self.tensors.append(value)
            return _reference(len(self.paths) - 1)
        # An object inside the state_dict() of another one: at a restore there would be no live
        # object to load it into.
        if self._in_object or not is_stateful(value):
            refuse(value, path)
        self._in_object = True
        encoded = Encoder(self.encode_leaf, self.encode_tensors).encode(value.state_dict(), path)
        self._in_object = False
        return extension(OBJECT, [kind_name(value), encoded])

    def encode_tensors(self, tensors: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
        """Encode a whole dict of tensors: faster than one by one."""
        first = len(self.paths)
        self.paths += [(*path, key) for key in tensors]
        self.tensors += tensors.values()
        return dict(zip(tensors, map(_reference, range(first, len(self.paths))), strict=True))


def holds(node: Any, wanted: Callable[[Any], bool], path: Path = ()) -> bool:
    """Return whether ``wanted`` is true for any leaf in ``node``.

    Raises ``UnsupportedState`` for a container that is nested too deep, or contains itself.
    """
    if type(node) not in CONTAINERS:
        return wanted(node)
    if len(path) > DEPTH_MAX:
        raise UnsupportedState(describe(path[:4]), "a container this deep", hint="flatten it")
    children = node.items() if isinstance(node, dict) else enumerate(node)
    return any(holds(child, wanted, (*path, key)) for key, child in children)


def is_live(node: Any) -> bool:
    """Return whether a node of a live state is restored in place: a tensor or an object."""
    return isinstance(node, torch.Tensor) or is_stateful(node)
