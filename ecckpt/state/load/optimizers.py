"""Fits a torch optimizer; ``load.py`` uses it.

An optimizer creates its state (moments) in its first step, so at a restore there is usually no
tensor to fill: new ones are made from the saved state and handed to ``load_state_dict``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ecckpt.errors import UnsupportedState
from ecckpt.state.load.filling import Fills, fresh_tensor
from ecckpt.state.load.fit import Fit, Phase
from ecckpt.state.load.param_names import in_order_of_names
from ecckpt.state.load.rebuilding import rebuilding
from ecckpt.state.load.uncast import keep_from_casts, put_uncast
from ecckpt.state.paths import Path
from ecckpt.state.tensors.sharding import is_dtensor, local_tensor
from ecckpt.state.tensors.tensors import memory_order, part_of
from ecckpt.state.tree.nodes import StoredTensor
from ecckpt.state.tree.tree import holds

# The number of a parameter in the saved state -> the live parameter.
Params = dict[Any, torch.Tensor]


def is_optimizer_state(stored: Any) -> bool:
    """Return whether ``stored`` has the form of torch's ``Optimizer.state_dict()``."""
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
    """Fit ``optimizer``: it must have the saved numbers of groups and parameters.

    Where parameters have names, saved and here, state follows the names, else the order.
    ``load_state_dict`` restores it, whether it has taken steps or is new. DTensors in the state get
    the mesh of their parameter. torch would cast state to the dtype of its parameter, also inside
    of containers: such values are kept from it (``Uncast``).
    """
    if not fit.count(
        len(optimizer.param_groups), len(stored["param_groups"]), "parameter groups", path
    ):
        return
    stored = in_order_of_names(optimizer, stored, path, fit)
    params = _fit_parameters(optimizer, stored, path, fit)
    was_whole = not holds(stored["state"], _is_part)

    def find(tensor: StoredTensor, at: Path) -> torch.Tensor | None:
        # For a plain tensor: None, so that it is made on the CPU. load_state_dict moves it to the
        # device of its parameter, except `step`, which may stay on the CPU.
        param = params.get(at[len(path) + 1])
        # The run that saved had no DTensors, but this one has: a saved moment has the shape of its
        # whole parameter, and is sharded like it.
        follows = was_whole and is_dtensor(param) and len(tensor.shape)
        same = follows and param is not None and param.shape == tensor.shape
        return param if tensor.sharding or same else None

    def order_of(tensor: StoredTensor, at: Path) -> tuple[int, ...] | None:
        # Fused kernels walk the memory of a parameter and its moments side by side.
        param = params.get(at[len(path) + 1])
        if param is None:
            return tensor.order
        local = local_tensor(param) if is_dtensor(param) else param  # type: ignore[arg-type]
        return memory_order(local) if local.shape == tensor.shape else tensor.order

    # load_state_dict keeps the tensors that it gets, unless it casts or moves them; so they may be
    # assigned.
    rebuild = rebuilding(fit, stored, find, path, assigner=fit.assigner, order_of=order_of)

    def load() -> None:
        rebuilt = rebuild()
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            # Its own method may look at the values, so they come as they are.
            optimizer.load_state_dict(rebuilt)
            _undo_casts(optimizer, stored["state"], params, Fills(fit.assigner))
            return
        for number, entry in rebuilt["state"].items():
            if number in params and isinstance(entry, dict):
                keep_from_casts(entry, params[number])
        optimizer.load_state_dict(rebuilt)
        put_uncast(optimizer)

    fit.add_step(Phase.OPTIMIZER, load)


def _fit_parameters(optimizer: Optimizer, stored: dict[str, Any], path: Path, fit: Fit) -> Params:
    """Fit groups, options and the state that is there already; the parameters by saved number."""
    params: Params = {}
    for index, (live, saved) in enumerate(
        zip(optimizer.param_groups, stored["param_groups"], strict=True)
    ):
        at = (*path, "param_groups", index)
        fit.count(len(live["params"]), len(saved["params"]), "parameters", at)
        params.update(zip(saved["params"], live["params"], strict=False))
        # A missing option means another class of optimizer, except for flags that are off by
        # default: versions of torch add and remove them.
        for option, default in optimizer.defaults.items():
            if option not in saved and default is not None and default is not False:
                fit.problem((*at, option), "an option of this optimizer, missing in the saved one")
    for number, entry in stored["state"].items():
        at = (*path, "state", number)
        if type(number) is int and number not in params:
            fit.problem(at, "saved for a parameter that this optimizer does not have")
        # Other keys (not numbers) are state of the optimizer itself, which has no parameter.
        elif number in params and isinstance(entry, dict):
            _fit_entry(optimizer.state.get(params[number], {}), entry, at, fit)
    return params


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
    """Restore tensors that an optimizer's own ``load_state_dict`` has cast like torch's.

    Float32 moments of a bfloat16 parameter would lose their precision.
    """
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
    fills.fill_all()
