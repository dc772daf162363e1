"""Fitting an optimizer: what it has not made yet is made from the saved state."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ecckpt.errors import UnsupportedState
from ecckpt.state.load.filling import Fills, fresh_tensor
from ecckpt.state.load.fit import Fit, Phase
from ecckpt.state.load.rebuilding import rebuilding
from ecckpt.state.paths import Path
from ecckpt.state.tensors.sharding import is_dtensor
from ecckpt.state.tensors.tensors import part_of
from ecckpt.state.tree.nodes import StoredTensor
from ecckpt.state.tree.tree import holds

# Saved parameter numbers, and the live parameters they stand for.
Params = dict[Any, torch.Tensor]


def is_optimizer_state(stored: Any) -> bool:
    """Whether ``stored`` has the form of torch's ``Optimizer.state_dict()``."""
    return (
        isinstance(stored, dict)
        and isinstance(stored.get("state"), dict)
        and isinstance(stored.get("param_groups"), list)
        and all(
            isinstance(group, dict)
            and isinstance(group.get("params"), list)
            and all(isinstance(number, int | str) for number in group["params"])
            for group in stored["param_groups"]
        )
    )


def fit_optimizer(optimizer: Optimizer, stored: dict[str, Any], path: Path, fit: Fit) -> None:
    """Fit ``optimizer``: as many groups and parameters, and state that goes with them.

    It is restored by ``load_state_dict``, whether it has taken steps or is new. DTensors get the
    mesh of their parameter; torch's cast of state to the dtype of the parameter is undone.
    """
    groups = stored["param_groups"]
    if not fit.count(len(optimizer.param_groups), len(groups), "parameter groups", path):
        return
    params: Params = {}
    for index, (live, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        at = (*path, "param_groups", index)
        fit.count(len(live["params"]), len(saved["params"]), "parameters", at)
        params.update(zip(saved["params"], live["params"], strict=False))
        # Flags that are off by default come and go with versions of torch; other options tell
        # one kind of optimizer from another.
        for option, default in optimizer.defaults.items():
            if option not in saved and default is not None and default is not False:
                fit.problem((*at, option), "an option of this optimizer that the saved one lacks")
    for number, entry in stored["state"].items():
        at = (*path, "state", number)
        if type(number) is int and number not in params:
            fit.problem(at, "saved for a parameter that this optimizer does not have")
        elif number in params and isinstance(entry, dict):
            _fit_entry(optimizer.state.get(params[number], {}), entry, at, fit)

    was_whole = not holds(stored["state"], _is_part)

    def find(tensor: StoredTensor, at: Path) -> torch.Tensor | None:
        # torch moves plain tensors to where it wants them; `step` may stay in CPU memory.
        param = params.get(at[len(path) + 1])
        # Of a training without DTensors: what has the shape of its parameter goes along with it.
        follows = was_whole and is_dtensor(param) and len(tensor.shape)
        same = follows and param is not None and param.shape == tensor.shape
        return param if tensor.sharding or same else None

    # torch keeps the tensors that it is given, unless it casts or moves them.
    rebuild = rebuilding(fit, stored, find, path, fit.assigner)

    def load() -> None:
        optimizer.load_state_dict(rebuild())
        _undo_casts(optimizer, stored["state"], params, Fills(fit.assigner))

    fit.later(Phase.OPTIMIZER, load)


def _is_part(node: Any) -> bool:
    return isinstance(node, StoredTensor) and node.sharding is not None


def _fit_entry(live: dict[str, Any], stored: dict[str, Any], path: Path, fit: Fit) -> None:
    for key, tensor in stored.items():
        value = live.get(key)
        if isinstance(tensor, StoredTensor) and isinstance(value, torch.Tensor):
            try:
                part = part_of(value, (*path, key), fit.shardings)
            except UnsupportedState as error:
                fit.problems.append(str(error))
            else:
                fit.same_form(value, part.local, tensor, (*path, key))


def _undo_casts(optimizer: Optimizer, stored: dict[Any, Any], params: Params, fills: Fills) -> None:
    """``load_state_dict`` casts state to its parameter's dtype: bfloat16 for float32 moments."""
    for number, entry in stored.items():
        live = optimizer.state.get(params[number]) if number in params else None
        if live is None or not isinstance(entry, dict):
            continue
        for key, tensor in entry.items():
            value = live.get(key)
            if not isinstance(tensor, StoredTensor) or not isinstance(value, torch.Tensor):
                continue
            if value.dtype != tensor.dtype:
                like = params[number] if is_dtensor(value) else value
                live[key] = fresh_tensor(tensor, like, fills)
    fills.run()
