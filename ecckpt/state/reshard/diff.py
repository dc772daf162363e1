"""Compares two saved shards outside global tensors: values, objects and whole tensors.

``reshape.py`` uses it: on another number of ranks, only what was equal on all ranks can be given to
the new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ecckpt.state.file.shard import Shard
from ecckpt.state.paths import Path, describe
from ecckpt.state.reshard.saved_shard import SavedShard
from ecckpt.state.rng import RngState
from ecckpt.state.tree.encoding import Encoder
from ecckpt.state.tree.nodes import CONTAINERS, StoredObject, StoredTensor, StoredValue
from ecckpt.state.tree.values import pack

# Attributes of a deque and a defaultdict that belong to their value.
_OPTIONS = ("maxlen", "default_factory")
_RNG_KIND = f"{RngState.__module__}.{RngState.__name__}"


def is_rng(node: Any) -> bool:
    """Return whether a node of a saved tree is the state of an ``RngState``."""
    return type(node) is StoredObject and node.kind == _RNG_KIND


def rng_nodes(node: Any, path: Path = ()) -> Iterator[tuple[Path, StoredObject]]:
    """Yield each ``RngState`` in a saved tree, with its path."""
    if is_rng(node):
        yield path, node
    elif type(node) in CONTAINERS:
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from rng_nodes(child, (*path, key))


def differences(one: SavedShard, one_values: Shard, other: SavedShard) -> list[str]:
    """Return the paths of values, objects and whole tensors that differ between two shards.

    Random number generators and parts of global tensors are not compared.

    Args:
        one: a shard.
        one_values: its values, which the caller has read already.
        other: the shard to compare with; its values are read.
    """
    comparison = TreeComparison()
    comparison.node(one_values.tree(), other.values().tree(), ())
    tensors = comparison.tensors
    return comparison.different + [tensors[name] for name in one.differing(other, tensors)]


def _comparable(value: Any) -> Any:
    """Return a key that is equal only for equal types and values: 1 differs from True."""
    if type(value) in (tuple, frozenset, set):
        return type(value), type(value)(map(_comparable, value))
    return type(value), value


class TreeComparison:
    """Walks two trees together.

    ``different`` are paths whose values differ; ``tensors`` maps names of tensors with equal forms,
    whose bytes are still to be compared, to their paths.
    """

    def __init__(self) -> None:
        self.different: list[str] = []
        self.tensors: dict[str, str] = {}

    def node(self, mine: Any, theirs: Any, path: Path) -> None:
        """Compare two nodes at that path, and all below them."""
        if type(mine) is not type(theirs):
            self.different.append(describe(path))
        elif type(mine) is StoredTensor:
            self._tensor(mine, theirs, path)
        elif type(mine) is StoredObject:
            if mine.kind != theirs.kind:
                self.different.append(describe(path))
            elif not is_rng(mine):
                self.node(mine.state, theirs.state, path)
        elif type(mine) in CONTAINERS:
            self._container(mine, theirs, path)
        elif type(mine) is StoredValue or type(mine) in (set, frozenset):
            if _comparable(mine) != _comparable(theirs):
                self.different.append(describe(path))
        elif pack(Encoder().encode(mine, path)) != pack(Encoder().encode(theirs, path)):
            self.different.append(describe(path))

    def _container(self, mine: Any, theirs: Any, path: Path) -> None:
        if len(mine) != len(theirs) or any(
            getattr(mine, option, None) != getattr(theirs, option, None) for option in _OPTIONS
        ):
            self.different.append(describe(path))
            return
        if not isinstance(mine, dict):
            for index, pair in enumerate(zip(mine, theirs, strict=True)):
                self.node(*pair, (*path, index))
            return
        keys = [list(map(_comparable, node)) for node in (mine, theirs)]
        in_order = type(mine) is OrderedDict
        if keys[0] != keys[1] if in_order else set(keys[0]) != set(keys[1]):
            self.different.append(describe(path))
            return
        for key, child in mine.items():
            self.node(child, theirs[key], (*path, key))

    def _tensor(self, mine: StoredTensor, theirs: StoredTensor, path: Path) -> None:
        forms = [(one.name, one.dtype, one.sharding or one.shape) for one in (mine, theirs)]
        if mine.sharding is not None and theirs.sharding is not None:
            return  # `reshape.py` checks that parts of a global tensor fit together
        if forms[0] != forms[1]:
            self.different.append(describe(path))
        else:
            self.tensors[mine.name] = describe(path)
