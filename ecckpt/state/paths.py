"""Paths: the keys that lead from a state to one of its values, and tensor names made of paths.

All of ``state`` uses it: error messages name values by ``describe``, a shard's header names tensors
by ``tensor_names``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

Path = tuple[Any, ...]

# The name of the values blob in a shard. No tensor can have it: "%" occurs in tensor names only as
# "%25", "%2E" or "%u...", or before a one-letter type in the full spelling.
VALUES_NAME = "ecckpt%values"
_RESERVED = frozenset({"__metadata__"})
_SURROGATE = re.compile("[\ud800-\udfff]")


def describe(path: Path) -> str:
    """Return ``path`` as messages show it: its keys joined by dots, or "state" if it is empty."""
    return ".".join(map(_plain, path)) or "state"


def tensor_names(paths: Sequence[Path]) -> list[str]:
    """Return a different name for each path; a shard's header uses them as tensor names.

    A name is the keys of the path joined by dots, so the tensors of a module get the names of its
    ``state_dict()``. If two paths would get the same name (``{"a.b": x}`` beside
    ``{"a": {"b": y}}``, or ``1`` beside ``"1"``), both get the full spelling: each key with the
    first letter of its type, and dots escaped.

    Raises:
        ValueError: two paths have the same full spelling (two NaNs as keys, for instance).
    """
    plain = [".".join(map(_plain, path)) for path in paths]
    counts = Counter(plain)
    names = [
        name if counts[name] == 1 and name not in _RESERVED else ".".join(map(_full, path))
        for name, path in zip(plain, paths, strict=True)
    ]
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"two tensors would get the same name {twice!r}")
    return names


def _plain(key: Any) -> str:
    text = key if isinstance(key, str) else repr(key)
    text = text.replace("%", "%25")
    # A lone surrogate (a file name from os.listdir may hold one) is not valid UTF-8 and would make
    # the JSON header unreadable.
    return text if text.isascii() else _SURROGATE.sub(lambda half: f"%u{ord(half[0]):04X}", text)


def _full(key: Any) -> str:
    return f"%{type(key).__name__[0]}{_plain(key).replace('.', '%2E')}"
