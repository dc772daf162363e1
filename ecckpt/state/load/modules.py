"""Fitting a module: its own parameters and buffers are filled where they are."""

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
    """Fit ``module``: the same keys, and tensors of the same form.

    Tensors are filled in place, so parameters stay the objects that an optimizer knows. Only a
    module that saves more than its own memory (extra state, copies made by a hook) is restored by
    ``load_state_dict``.
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
    tensors = fit if in_place else Fit()  # filling copies would restore nothing
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
        # The versions by which modules tell old states from new ones.
        rebuilt._metadata = getattr(live, "_metadata", {})
        module.load_state_dict(rebuilt)

    fit.later(Phase.TREE, load)


def _owners(live: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """The module's own tensors instead of what only shares their memory."""
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
    if not all(type(each) in PLAIN_TYPES and each.layout is torch.strided for each in both):
        return False
    key, other = (memory_key(Part(each, None)) for each in both)
    return key is not None and key == other


def _is_own_memory(live: dict[str, Any], module: nn.Module) -> bool:
    owned = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return all(
        isinstance(value, torch.Tensor)
        and not key.endswith(_EXTRA_STATE)
        and (not value.numel() or _storage(value) in owned)
        for key, value in live.items()
    )


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0  # no single storage; refused when it is fitted
    local = local_tensor(tensor) if is_dtensor(tensor) else tensor  # type: ignore[arg-type]
    return local.untyped_storage().data_ptr()
