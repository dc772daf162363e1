"""Instances of registered classes, made from what a shard holds of them."""

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

_MADE = PLAIN | {StoredTensor}


def resolve(node: Any, problem: Problem, path: Path = ()) -> Any:
    """``node`` with every ``StoredValue`` in it, keys and members of sets too, made a value.

    A container that holds none is not copied. ``problem(path, text)`` is told of each that cannot
    be made; it stays what it is.
    """
    kind = type(node)
    if kind in _MADE:
        return node
    if kind is StoredValue:
        return _made(node, problem, path)
    if kind is StoredObject:
        return StoredObject(node.kind, resolve(node.state, problem, path))
    if kind not in CONTAINERS and kind not in (set, frozenset):
        return node
    try:
        return _contents(node, problem, path)
    except TypeError as error:
        problem(path, f"a key or member made of what was saved cannot be one: {error}")
        return node


def _contents(node: Any, problem: Problem, path: Path) -> Any:
    # Most containers hold nothing that is to be made, some of them tens of thousands of tensors.
    if _MADE.issuperset(map(type, node)) and (
        not isinstance(node, dict) or _MADE.issuperset(map(type, node.values()))
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


def _made(node: StoredValue, problem: Problem, path: Path) -> Any:
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
    except Exception as error:  # of the user's own code, in whatever way it fails
        problem(path, f"no {node.kind} can be made of what was saved: {error!r:.200}")
        return node
