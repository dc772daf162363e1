"""``resolve``: makes instances of registered classes from the values that a shard has of them.

``load`` calls it before it compares a shard with a state. This is where ``decode`` functions of the
user run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ecckpt.state.paths import Path
from ecckpt.state.tree.nodes import (
    CONTAINERS,
    StoredObject,
    StoredTensor,
    StoredValue,
    dict_like,
    items_like,
)
from ecckpt.state.tree.registry import codec_named
from ecckpt.state.tree.values import PLAIN

Problem = Callable[[Path, str], object]

_RESOLVED = PLAIN | {StoredTensor}  # types that need no look inside


def resolve(node: Any, problem: Problem, path: Path = ()) -> Any:
    """Return ``node`` with an instance in place of each ``StoredValue``, also in keys and sets.

    A container without any is not copied. For a value whose instance cannot be made,
    ``problem(path, text)`` is called, and the ``StoredValue`` stays.
    """
    kind = type(node)
    if kind in _RESOLVED:
        return node
    if kind is StoredValue:
        return _instance(node, problem, path)
    if kind is StoredObject:
        return StoredObject(node.kind, resolve(node.state, problem, path))
    if kind not in CONTAINERS and kind not in (set, frozenset):
        return node
    try:
        return _contents(node, problem, path)
    except TypeError as error:
        # decode() returned an object that is not hashable.
        problem(path, f"a decoded instance cannot be a key or a member of a set: {error}")
        return node


def _contents(node: Any, problem: Problem, path: Path) -> Any:
    # A fast path in C: most containers have nothing to resolve, and some have 20,000 tensors.
    if _RESOLVED.issuperset(map(type, node)) and (
        not isinstance(node, dict) or _RESOLVED.issuperset(map(type, node.values()))
    ):
        return node
    if isinstance(node, dict):
        pairs = [
            (resolve(key, problem, path), resolve(value, problem, (*path, key)))
            for key, value in node.items()
        ]
        return dict_like(node, pairs)
    if type(node) in (set, frozenset):
        return type(node)([resolve(member, problem, (*path, "{}")) for member in node])
    items = [resolve(item, problem, (*path, index)) for index, item in enumerate(node)]
    return items_like(node, items)


def _instance(node: StoredValue, problem: Problem, path: Path) -> Any:
    codec = codec_named(node.kind)
    if codec is None:
        problem(path, f"saved as the class {node.kind!r:.80}, which is not registered here")
        return node
    broken = False

    def note(at: Path, text: str) -> None:
        nonlocal broken
        broken = True
        problem(at, text)

    payload = resolve(node.payload, note, path)
    if broken:
        return node
    try:
        return codec.decode(payload)
    except Exception as error:  # user code may raise anything
        problem(path, f"decode() of {node.kind} failed: {error!r:.200}")
        return node
