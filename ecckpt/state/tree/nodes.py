"""The nodes of a decoded tree that stand for tensors, objects and instances of user classes.

``decoding.py`` makes them; ``load`` and ``reshard`` replace them by live tensors and objects.
"""

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

# The types that may contain tensors and objects, in saved and in live trees.
CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, tuple, deque})


class TensorForm(NamedTuple):
    """Dtype, shape and length in bytes; tensors of one form share the object."""

    dtype: torch.dtype
    shape: torch.Size
    size_bytes: int


# Neither frozen nor keyword-only, although it has six fields and does not change: a restore makes
# tens of thousands of them. Frozen ones take four times as long to make, and `Views.stored` makes
# them with `map`, by position.
@dataclass(slots=True, eq=False)
class StoredTensor:
    """A tensor of a shard, at the place in the tree where the state had it. Do not change it.

    Attributes:
        name: the tensor's name in the shard.
        form: dtype, shape and length.
        sharding: its place in a global tensor; None if it is not a part of one.
        address: where its bytes lie in memory, in C order; 0 if only ``data`` can tell.
        tensors: the mapping that makes the view behind ``data``.
        order: the order of its dimensions in memory when it was saved (``memory_order``).
    """

    name: str
    form: TensorForm
    sharding: Sharding | None
    address: int
    tensors: Mapping[str, torch.Tensor]
    order: tuple[int, ...] | None = None

    @classmethod
    def of_tensor(
        cls, name: str, tensors: Mapping[str, torch.Tensor], sharding: Sharding | None = None
    ) -> Self:
        """Make the node of a tensor that exists already, ``tensors[name]``."""
        tensor = tensors[name]
        form = TensorForm(tensor.dtype, tensor.shape, tensor.nbytes)
        return cls(name, form, sharding, tensor.data_ptr() if is_raw(tensor) else 0, tensors)

    @property
    def memory(self) -> int:
        """Equal for names of one tied tensor, and for no other tensors of a shard; 0 if empty."""
        if not self.form.size_bytes:
            return 0
        return self.address or id(self.data)

    @property
    def data(self) -> torch.Tensor:
        """A view of its elements; valid as long as the buffer of the shard."""
        return self.tensors[self.name]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.form.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of what is stored; for a part of a global tensor, that of the part."""
        return self.form.shape


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's class name, and what its ``state_dict()`` returned."""

    kind: str
    state: Any


@dataclass(frozen=True, slots=True)
class StoredValue:
    """An instance of a registered class, not yet made (``resolving.py`` makes it).

    ``kind`` is the registered name, ``payload`` the plain values from ``encode``. Equality and hash
    go by ``packed``, the encoded bytes of both, because it may be a dict key before it is made.
    """

    kind: str = field(compare=False)
    payload: Any = field(compare=False)
    packed: bytes


def is_stored(node: Any) -> bool:
    """Return whether a node of a saved tree is a tensor or an object, not a value."""
    return type(node) in (StoredTensor, StoredObject)


def stored_name(node: Any) -> str:
    """Return how messages name a node of a saved tree."""
    if type(node) is StoredObject:
        return f"state of {node.kind}"
    return "a tensor" if type(node) is StoredTensor else kind_name(node)


def replace_tensors(node: Any, make: Callable[[StoredTensor, Path], Any], path: Path = ()) -> Any:
    """Copy a saved tree, with ``make(tensor, path)`` in place of each stored tensor.

    Containers are new, and belong to the caller; values are shared with ``node``.
    """
    if type(node) is StoredTensor:
        return make(node, path)
    if type(node) not in CONTAINERS:
        return node
    if isinstance(node, dict):
        pairs = ((key, replace_tensors(child, make, (*path, key))) for key, child in node.items())
        return dict_like(node, pairs)
    items = (replace_tensors(child, make, (*path, index)) for index, child in enumerate(node))
    return items_like(node, items)


def dict_like(node: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a dict of the same type as ``node``, with the given pairs."""
    if type(node) is Counter:  # its constructor would count the pairs
        counter: Counter[Any] = Counter()
        dict.update(counter, pairs)
        return counter
    if type(node) is defaultdict:
        return defaultdict(node.default_factory, pairs)
    return type(node)(pairs)


def items_like(node: Any, items: Iterable[Any]) -> Any:
    """Make a list, tuple or deque of the same type as ``node``, with the given items."""
    return deque(items, node.maxlen) if type(node) is deque else type(node)(items)
