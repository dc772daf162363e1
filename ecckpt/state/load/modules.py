"""Fits a ``nn.Module``: its parameters and buffers are filled in place; ``load.py`` uses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ecckpt.state.load.fit import Fit, Phase
from ecckpt.state.load.rebuilding import rebuilding
from ecckpt.state.paths import Path
from ecckpt.state.tensors.sharding import is_dtensor, local_tensor
from ecckpt.state.tensors.tensors import PLAIN_TYPES, Part, memory_key
from ecckpt.state.tree.nodes import StoredTensor, stored_name

_EXTRA_STATE = "_extra_state"  # torch's own suffix, for what get_extra_state() returns


def fit_module(module: nn.Module, stored: Any, path: Path, fit: Fit) -> None:
    """Fit ``module``: it must have the saved keys, and tensors of the saved forms.

    Tensors are filled in place, so that parameters stay the objects in the optimizer.
    ``load_state_dict`` restores only modules whose ``state_dict()`` has more than their own memory:
    extra state, or copies made by a hook.
    """
    if not isinstance(stored, dict):
        fit.problem(path, f"a module here, {stored_name(stored)} saved")
        return
    live = module.state_dict()
    same_keys = fit.keys(live.keys(), stored.keys(), path)
    in_place = _is_own_memory(live, module)
    if in_place and same_keys:
        fit.tensors(live if fit.assigner is None else _owners(live, module), stored, path)
        return
    # Not in place, `live` has copies of the module's tensors: a separate Fit compares them, and
    # only its problems are used. Filling the copies would restore nothing.
    tensors = fit if in_place else Fit()
    for key, value in live.items():
        if key in stored and isinstance(value, torch.Tensor) and not key.endswith(_EXTRA_STATE):
            tensors.tensor(value, stored[key], (*path, key))
    if in_place or not same_keys:
        return
    fit.problems.extend(tensors.problems)

    def find(_: StoredTensor, at: Path) -> torch.Tensor | None:
        value = live[at[len(path)]]
        return value if isinstance(value, torch.Tensor) else None

    rebuild = rebuilding(fit, stored, find, path)

    def load() -> None:
        rebuilt = rebuild()
        # Modules read the version of a saved state from `_metadata` (_load_from_state_dict).
        rebuilt._metadata = getattr(live, "_metadata", {})
        module.load_state_dict(rebuilt)

    fit.add_step(Phase.TREE, load)


def _owners(live: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Replace detached tensors of a ``state_dict()`` by the module's own ones.

    An assigner exchanges the memory of a tensor object, which has to be the module's.
    """
    owners: dict[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {
        key: owners[key] if key in owners and _is_same(value, owners[key]) else value
        for key, value in live.items()
    }


def _is_same(value: Any, owner: torch.Tensor) -> bool:
    both = (value, owner)
    if not all(type(one) in PLAIN_TYPES and one.layout is torch.strided for one in both):
        return False
    key, other = (memory_key(Part(one, None)) for one in both)
    return key is not None and key == other


def _is_own_memory(live: dict[str, Any], module: nn.Module) -> bool:
    """Return whether ``live``, its state_dict(), has nothing but memory of the module."""
    owned = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return all(
        isinstance(value, torch.Tensor)
        and not key.endswith(_EXTRA_STATE)
        and (not value.numel() or _storage(value) in owned)
        for key, value in live.items()
    )


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0  # it has no single storage; `part_of` refuses it later, with its path
    local = local_tensor(tensor) if is_dtensor(tensor) else tensor  # type: ignore[arg-type]
    return local.untyped_storage().data_ptr()
