"""ecckpt: erasure-coded checkpoints in the memory of the nodes that train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ecckpt import errors
from ecckpt.errors import EcckptError

if TYPE_CHECKING:
    from ecckpt.client.checkpointer import Checkpointer, Restored, SaveHandle
    from ecckpt.client.read.open import Opened, open  # noqa: A004
    from ecckpt.state.rng import RngState
    from ecckpt.state.tree.registry import register

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
    "Checkpointer": "ecckpt.client.checkpointer",
    "Opened": "ecckpt.client.read.open",
    "Restored": "ecckpt.client.restore.restorer",
    "SaveHandle": "ecckpt.client.handles",
    "RngState": "ecckpt.state.rng",
    "open": "ecckpt.client.read.open",
    "register": "ecckpt.state.tree.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ecckpt' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
