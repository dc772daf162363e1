"""Values of an optimizer's state that torch's ``load_state_dict`` must not cast.

It casts every tensor of a parameter's state to the dtype of the parameter, at any depth, and makes
anything else that can be iterated anew out of its items: float32 moments of a bfloat16 parameter
lose their precision, a counter above 2^24 its low bits, and a text becomes the name of a generator.
So such values are passed in an ``Uncast``, which torch hands on unseen, and are put in their places
afterwards. Hooks of the optimizer may move them to other parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ecckpt.state.tree.nodes import CONTAINERS, dict_like, items_like

# torch hands these on as they are.
_KEPT = (bool, int, float, complex, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class Uncast:
    """A value in the place where it belongs, opaque to torch."""

    value: Any


def keep_from_casts(entry: dict[Any, Any], param: torch.Tensor) -> None:
    """Wrap the values in the state of a parameter that torch would change."""
    for key, value in entry.items():
        if isinstance(value, torch.Tensor):
            # torch leaves the dtype of `step` alone, and may move it to the device.
            cast = key != "step" and param.is_floating_point() and value.dtype != param.dtype
        else:
            cast = not isinstance(value, _KEPT)
        if cast:
            entry[key] = Uncast(value)


def put_uncast(optimizer: Optimizer) -> None:
    """Unwrap the values, their tensors on the devices of the parameters that they belong to."""
    for param, entry in optimizer.state.items():
        if isinstance(param, torch.Tensor) and isinstance(entry, dict):
            for key, value in entry.items():
                if isinstance(value, Uncast):
                    entry[key] = _on_device(value.value, param.device)


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) not in CONTAINERS:
        return value
    if isinstance(value, dict):
        return dict_like(value, ((key, _on_device(item, device)) for key, item in value.items()))
    items = [_on_device(item, device) for item in value]
    return items_like(value, items)
