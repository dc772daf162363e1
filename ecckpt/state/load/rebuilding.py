"""``rebuilding``: copies a saved tree, with new tensors, as an argument of ``load_state_dict``.

``load.py``, ``modules.py`` and ``optimizers.py`` use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ecckpt.state.load.assigning import Assigner
from ecckpt.state.load.filling import Fills, fresh_tensor
from ecckpt.state.load.fit import Fit
from ecckpt.state.paths import Path
from ecckpt.state.tensors.sharding import is_dtensor
from ecckpt.state.tree.nodes import StoredTensor, replace_tensors

Find = Callable[[StoredTensor, Path], torch.Tensor | None]


def _as_saved(stored: StoredTensor, at: Path) -> tuple[int, ...] | None:
    del at
    return stored.order


def rebuilding(
    fit: Fit,
    node: Any,
    find: Find,
    path: Path,
    *,
    assigner: Assigner | None = None,
    order_of: Callable[[StoredTensor, Path], tuple[int, ...] | None] = _as_saved,
) -> Callable[[], Any]:
    """Fit a saved tree that will be passed to ``load_state_dict``.

    Args:
        fit: gets the problems.
        node: the saved tree.
        find: called as ``find(stored, path)``; returns the live tensor that has the device and the
            mesh for the new one, or None.
        path: of the object in the state.
        assigner: makes tensors over the memory of the shard where possible.
        order_of: returns the order of a new tensor's dimensions in memory (``memory_order``).

    Returns:
        A function that makes the tree, with new tensors at each call. What was one memory when it
        was saved is one tensor.
    """

    def check(stored: StoredTensor, at: Path) -> None:
        like = find(stored, at)
        if like is not None:
            fit.likes[stored.name] = like
        if stored.sharding is not None:
            _same_mesh(fit, like, stored, at)
        elif is_dtensor(like):
            here = fit.shardings.sharding_of(like)  # type: ignore[arg-type]
            fit.problem(at, f"saved as a whole tensor, here {here}")

    def rebuilt() -> Any:
        fills = Fills(assigner)
        made: dict[Any, torch.Tensor] = {}

        def make(stored: StoredTensor, at: Path) -> torch.Tensor:
            like, order = find(stored, at), order_of(stored, at)
            if not stored.memory:
                return fresh_tensor(stored, like, fills, order)
            key = stored.memory, None if like is None else (like.device, is_dtensor(like)), order
            if key not in made:
                made[key] = fresh_tensor(stored, like, fills, order)
            return made[key]

        tree = replace_tensors(node, make, path)
        fills.fill_all()
        return tree

    replace_tensors(node, check, path)
    return rebuilt


def _same_mesh(fit: Fit, like: torch.Tensor | None, stored: StoredTensor, path: Path) -> None:
    if like is None or not is_dtensor(like):
        fit.problem(path, f"saved as {stored.sharding}, but there is no DTensor here with its mesh")
        return
    here, saved = fit.shardings.sharding_of(like), stored.sharding  # type: ignore[arg-type]
    assert saved is not None
    if saved.held or (here.mesh_shape, here.coordinate, here.placements) != (
        saved.mesh_shape,
        saved.coordinate,
        saved.placements,
    ):
        fit.problem(path, f"saved as {saved}, here {here}")
