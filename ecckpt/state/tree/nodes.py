"""The nodes of a saved tree that are more than data: tensors, objects, members of user classes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from ecckpt.state.paths import Path
from ecckpt.state.tensors.sharding import Sharding
from ecckpt.state.tensors.tensors import is_raw
from ecckpt.state.tree.values import kind_name

# What may hold tensors and objects, in saved and in live trees.
CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, tuple, deque})


class TensorForm(NamedTuple):
    """What many tensors have in common."""

    dtype: torch.dtype
    shape: torch.Size
    size_bytes: int


@dataclass(slots=True, eq=False)  # not frozen: that takes four times as long to make
class StoredTensor:
    """A tensor of a shard, in the place where the state had it. Nobody changes one.

    ``data`` is a view of the shard, one of ``tensors``, made when somebody asks for it; ``address``
    is where its bytes are, or 0 where that takes a look at ``data``.
    """

    name: str
    form: TensorForm
    sharding: Sharding | None
    address: int
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls, name: str, tensors: Mapping[str, torch.Tensor], sharding: Sharding | None = None
    ) -> Self:
        """One of ``tensors`` that are there already."""
        tensor = tensors[name]
        form = TensorForm(tensor.dtype, tensor.shape, tensor.nbytes)
        return cls(name, form, sharding, tensor.data_ptr() if is_raw(tensor) else 0, tensors)

    @property
    def data(self) -> torch.Tensor:
        """Its elements: a view, which only lasts as long as the shard."""
        return self.tensors[self.name]

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.form.dtype

    @property
    def shape(self) -> torch.Size:
        """Of what is stored: of a part of a global tensor, the part's."""
        return self.form.shape


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What ``state_dict()`` of an object returned, and the name of the object's class."""

    kind: str
    state: Any


@dataclass(frozen=True, slots=True)
class StoredValue:
    """An instance of a registered class: the name it was stored under, and plain values.

    Compared by ``packed``, both of them as they were read: it may be a key before it is made.
    """

    kind: str = field(compare=False)
    payload: Any = field(compare=False)
    packed: bytes


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
        return dict_like(node, pairs)
    items = (replace_tensors(each, make, (*path, index)) for index, each in enumerate(node))
    return items_like(node, items)


def dict_like(node: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A new dict of the kind of ``node`` that holds ``pairs``."""
    if type(node) is Counter:  # its constructor would count the pairs
        counter: Counter[Any] = Counter()
        dict.update(counter, pairs)
        return counter
    if type(node) is defaultdict:
        return defaultdict(node.default_factory, pairs)
    return type(node)(pairs)


def items_like(node: Any, items: Iterable[Any]) -> Any:
    """A new list, tuple or deque of the kind of ``node`` that holds ``items``."""
    return deque(items, node.maxlen) if type(node) is deque else type(node)(items)
