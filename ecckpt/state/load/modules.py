"""Fits a ``nn.Module``: its parameters and buffers are filled in place; ``load.py`` uses it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ecckpt.state.load.fit import Fit, Phase
from ecckpt.state.load.rebuilding import rebuilding
from ecckpt.state.paths import Path
from ecckpt.state.tensors.sharding import is_dtensor, local_tensor
from ecckpt.state.tensors.tensors import PLAIN_TYPES, Part, memory_key
from ecckpt.state.tree.nodes import StoredTensor, stored_name

_EXTRA_STATE = "_extra_state"  # torch's own suffix, for what get_extra_state() returns
# Methods that only fill tensors; batch norms also read what versions of torch before 0.4 saved.
_PLAIN_LOADS = {nn.Module._load_from_state_dict, _NormBase._load_from_state_dict}
# Hooks of these modules bring a module into the form in which it is saved, and change nothing else:
# FSDP gathers its shards back, old forms of weight norms are renamed.
_PLAIN_HOOKS = ("torch.distributed.", "torch.nn.utils.")


def fit_module(module: nn.Module, stored: Any, path: Path, fit: Fit) -> None:
    """Fit ``module``: it must have the saved keys, and tensors of the saved forms.

    Tensors are filled in place, so that parameters stay the objects in the optimizer.
    ``load_state_dict`` restores only modules that act on a load (their hooks and methods must run,
    and decide what fits), and those whose ``state_dict()`` has more than their own memory: extra
    state, or copies made by a hook.
    """
    if not isinstance(stored, dict):
        fit.problem(path, f"a module here, {stored_name(stored)} saved")
        return
    live = module.state_dict()
    if acts_on_load(module):
        _fit_by_load(module, live, stored, path, fit)
        return
    same_keys = fit.keys(live.keys(), stored.keys(), path)
    in_place = _is_own_memory(live, module)
    if in_place and same_keys:
        fit.tensors(live if fit.assigner is None else _owners(live, module), stored, path)
        return
    # Not in place, `live` has copies of the module's tensors: a separate Fit compares them, and
    # only its problems are used. Filling the copies would restore nothing.
    tensors = fit if in_place else Fit()
    _fit_forms(tensors, live, stored, path)
    if not in_place and same_keys:
        fit.problems.extend(tensors.problems)
        fit.add_step(Phase.TREE, _loading(module, live, stored, path, fit))


def acts_on_load(module: nn.Module) -> bool:
    """Return whether loading a state into the module does more than fill its tensors."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    return any(
        type(each)._load_from_state_dict not in _PLAIN_LOADS
        or any(
            not _module_of(hook).startswith(_PLAIN_HOOKS)
            for hooks in (each._load_state_dict_pre_hooks, each._load_state_dict_post_hooks)
            for hook in hooks.values()
        )
        for each in module.modules()
    )


def _module_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "hook", hook), "__module__", ""))


def _fit_by_load(
    module: nn.Module, live: dict[str, Any], stored: dict[Any, Any], path: Path, fit: Fit
) -> None:
    """Fit a module that acts on a load.

    Other keys or forms than saved may be right, as the module renames or reshapes them. A copy of
    the module tells, before anything is changed.
    """
    load = _loading(module, live, stored, path, fit)
    forms = Fit()
    if live.keys() == stored.keys() and not any(map(_is_uninitialized, live.values())):
        _fit_forms(forms, live, stored, path)
        fits = not forms.problems
    else:
        fits = False
    if not fits:
        try:
            _loading(copy.deepcopy(module), live, stored, path, Fit())()
        except Exception as error:  # whatever the module's own code raises
            fit.problem(path, f"its load_state_dict refuses what was saved: {error}")
            return
    fit.add_step(Phase.TREE, load)


def _is_uninitialized(value: Any) -> bool:
    return isinstance(value, UninitializedParameter | UninitializedBuffer)


def _fit_forms(fit: Fit, live: dict[str, Any], stored: dict[Any, Any], path: Path) -> None:
    for key, value in live.items():
        if key in stored and isinstance(value, torch.Tensor) and not key.endswith(_EXTRA_STATE):
            fit.tensor(value, stored[key], (*path, key))


def _loading(
    module: nn.Module, live: dict[str, Any], stored: dict[Any, Any], path: Path, fit: Fit
) -> Callable[[], object]:
    """Return a function that calls the module's ``load_state_dict``; problems go to ``fit``."""

    def find(_: StoredTensor, at: Path) -> torch.Tensor | None:
        value = live.get(at[len(path)])
        return None if _is_uninitialized(value) or not isinstance(value, torch.Tensor) else value

    rebuild = rebuilding(fit, stored, find, path)

    def load() -> None:
        rebuilt = rebuild()
        # Modules read the version of a saved state from `_metadata` (_load_from_state_dict).
        metadata = getattr(live, "_metadata", None)
        if metadata is not None:
            rebuilt = OrderedDict(rebuilt)
            vars(rebuilt)["_metadata"] = metadata
        module.load_state_dict(rebuilt)

    return load


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
