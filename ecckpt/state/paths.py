"""Where something is in a state: paths of keys, and the tensor names made of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

Path = tuple[Any, ...]

# A name never holds "%" but as "%25" or in the full spelling, so this one cannot be taken.
VALUES_NAME = "ecckpt%values"
_RESERVED = frozenset({"__metadata__"})
_SURROGATE = re.compile("[\ud800-\udfff]")


def describe(path: Path) -> str:
    """``path`` as messages show it: its keys, joined by dots."""
    return ".".join(map(_plain, path)) or "state"


def tensor_names(paths: Sequence[Path]) -> list[str]:
    """One name per path, all different: what the tensors of a shard are called.

    A name is the keys joined by dots, so a module's names come out as everybody knows them. Where
    two paths would get the same name (``{"a.b": x}`` beside ``{"a": {"b": y}}``, or ``1`` beside
    ``"1"``), each of them is spelled in full instead: every key with its type, dots escaped.
    Raises ``ValueError`` for keys that no spelling tells apart (two NaNs).
    """
    plain = [".".join(map(_plain, path)) for path in paths]
    counts = Counter(plain)
    names = [
        name if counts[name] == 1 and name not in _RESERVED else ".".join(map(_full, path))
        for name, path in zip(plain, paths, strict=True)
    ]
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"two tensors would both be called {twice!r}")
    return names


def _plain(key: Any) -> str:
    text = key if isinstance(key, str) else repr(key)
    text = text.replace("%", "%25")
    # JSON readers refuse half a surrogate pair, which a file name from os.listdir may hold.
    return text if text.isascii() else _SURROGATE.sub(lambda half: f"%u{ord(half[0]):04X}", text)


def _full(key: Any) -> str:
    return f"%{type(key).__name__[0]}{_plain(key).replace('.', '%2E')}"
