"""The saved state of an optimizer in the order of the parameters' names here; ``optimizers.py``.

torch maps state to parameters by position. Optimizers that were given named parameters save the
names: a program that lists its parameters in another order would get the moments and the weight
decay of others.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ecckpt.state.load.fit import Fit
from ecckpt.state.paths import Path

_Names = list[tuple[str, ...]]  # of the parameters, by group


def in_order_of_names(
    optimizer: Optimizer, stored: dict[str, Any], path: Path, fit: Fit
) -> dict[str, Any]:
    """Return ``stored`` with groups, and parameters in them, in the order that they have here.

    As it is if names are missing on either side. Names that differ are problems.
    """
    saved, here = _names(stored["param_groups"]), _names(optimizer.param_groups)
    if saved is None or here is None or saved == here:
        return stored
    by_names = {frozenset(names): at for at, names in enumerate(saved)}
    if by_names.keys() != {frozenset(names) for names in here} or len(by_names) < len(saved):
        fit.problem((*path, "param_groups"), _difference(saved, here))
        return stored
    groups = []
    for names in here:
        at = by_names[frozenset(names)]
        numbers = dict(zip(saved[at], stored["param_groups"][at]["params"], strict=True))
        groups.append(
            {
                **stored["param_groups"][at],
                "params": [numbers[name] for name in names],
                "param_names": list(names),
            }
        )
    return {**stored, "param_groups": groups}


def _names(groups: list[dict[str, Any]]) -> _Names | None:
    """The names, each once; None without names for all parameters."""
    found = []
    for group in groups:
        names = group.get("param_names")
        if not isinstance(names, list) or len(names) != len(group["params"]):
            return None
        found.append(tuple(map(str, names)))
    flat = [name for names in found for name in names]
    return found if len(set(flat)) == len(flat) else None


def _difference(saved: _Names, here: _Names) -> str:
    one = {name for names in saved for name in names}
    other = {name for names in here for name in names}
    if one == other:
        return "the same parameters are in other groups than they were saved in"
    gone, new = (", ".join(sorted(names)[:5]) for names in (one - other, other - one))
    return f"parameters {gone or 'none'} saved, {new or 'none'} here"
