"""ecckpt: erasure-coded checkpoints in the memory of the nodes that train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ecckpt import errors
from ecckpt.errors import EcckptError

if TYPE_CHECKING:
    from ecckpt.checkpointer import Checkpointer, Restored, SaveHandle
    from ecckpt.opening import Opened, open  # noqa: A004
    from ecckpt.state import RngState, register

__all__ = [
    "Checkpointer",
    "EcckptError",
    "Opened",
    "Restored",
    "RngState",
    "SaveHandle",
    "errors",
    "open",
    "register",
]

# Loaded on first use: they import torch, which the agent must never do.
_LAZY = {
    "Checkpointer": "ecckpt.checkpointer",
    "Opened": "ecckpt.opening",
    "Restored": "ecckpt.checkpointer",
    "SaveHandle": "ecckpt.checkpointer",
    "RngState": "ecckpt.state",
    "open": "ecckpt.opening",
    "register": "ecckpt.state",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ecckpt' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
