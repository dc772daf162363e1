"""Restoring: a shard into a live state, in place, all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ecckpt.errors import UnsupportedState
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.state.file.shard import Shard
from ecckpt.state.file.views import Views
from ecckpt.state.load.assigning import Assigner
from ecckpt.state.load.fit import Fit, Phase
from ecckpt.state.load.modules import fit_module
from ecckpt.state.load.optimizers import fit_optimizer, is_optimizer_state
from ecckpt.state.load.rebuilding import rebuilding
from ecckpt.state.load.refill import refilled
from ecckpt.state.paths import Path, describe
from ecckpt.state.rng import RngState
from ecckpt.state.tensors.tensors import PLAIN_TYPES
from ecckpt.state.tree.nodes import (
    CONTAINERS,
    StoredObject,
    StoredTensor,
    is_stored,
    replace_tensors,
    stored_name,
)
from ecckpt.state.tree.resolving import resolve
from ecckpt.state.tree.tree import Stateful, check_root, holds, is_live, is_stateful
from ecckpt.state.tree.values import kind_name

Put = Callable[[Any], object]


def check(state: dict[Any, Any], shard: Shard, *, assign: bool = False) -> Callable[[], int]:
    """See whether ``shard`` fits ``state``; returns what restores it, to be called once.

    Changes nothing, and neither may change before that call. Raises ``StateMismatch``, listing
    every path that does not fit.

    To ``assign``, the caller gives the shard's buffer away, which is writable: tensors that can be
    lie in there from then on instead of being copied. What restores returns how many bytes do.
    """
    views = shard.tensors
    assigner = Assigner(views.buffer) if assign and isinstance(views, Views) else None
    with collector_paused():
        fit = _fit(state, shard, assigner=assigner)
    fit.require()

    def run() -> int:
        fit.run()
        return 0 if assigner is None else assigner.assigned_bytes

    return run


def load(state: dict[Any, Any], shard: Shard) -> None:
    """Restore ``shard`` into ``state``, in place.

    Tensors are filled, containers of values and arrays get new contents, objects are given their
    state; whatever could refuse is checked before the first change (``StateMismatch``). Nothing
    restored refers to the shard's buffer. An object whose own ``load_state_dict`` raises leaves the
    state half restored, and its error is passed on.
    """
    check(state, shard)()


def survey(state: dict[Any, Any], shard: Shard) -> dict[str, torch.Tensor]:
    """Which live tensor each saved one would go into, or be made like, as far as they match.

    Of the tensors only their form counts: their data need not be there.
    """
    return _fit(state, shard, with_data=False).likes


def _fit(
    state: dict[Any, Any],
    shard: Shard,
    *,
    with_data: bool = True,
    assigner: Assigner | None = None,
) -> Fit:
    check_root(state)
    fit = Fit(assigner)
    try:
        tree = resolve(shard.tree(), fit.problem)
        _Walk(fit, shard.seed, with_data=with_data).node(state, tree, (), lambda _: None)
    except UnsupportedState as error:
        fit.problems.append(str(error))
    return fit


class _Walk:
    """Goes down a live and a saved tree together; ``put`` replaces a value in its container."""

    def __init__(self, fit: Fit, seed: bytes, *, with_data: bool) -> None:
        self._fit = fit
        self._seed = seed
        self._with_data = with_data

    def node(self, live: Any, stored: Any, path: Path, put: Put) -> None:
        fit = self._fit
        if isinstance(live, torch.Tensor):
            fit.tensor(live, stored, path)
        elif is_stateful(live):
            state = stored.state if isinstance(stored, StoredObject) else stored
            self._object(live, state, path)
        elif holds(live, is_live) or holds(stored, is_stored):
            saved = stored.state if isinstance(stored, StoredObject) else stored
            if type(live) in CONTAINERS and isinstance(saved, _shape_of(live)):
                self._container(live, saved, path, put)
            else:
                fit.problem(path, f"{stored_name(stored)} saved, {kind_name(live)} here")
        else:
            fit.later(Phase.TREE, lambda: put(refilled(live, stored)))

    def _container(self, live: Any, stored: Any, path: Path, put: Put) -> None:
        if isinstance(live, dict):
            same_keys = self._fit.keys(live.keys(), stored.keys(), path)
            if same_keys and PLAIN_TYPES.issuperset(map(type, live.values())):
                self._fit.tensors(live, stored, path)
                return
            for key in live:
                if key in stored:
                    self.node(live[key], stored[key], (*path, key), _setter(live, key))
            return
        if not self._fit.count(len(live), len(stored), "items", path):
            return
        items = list(live) if isinstance(live, tuple) else live
        for index, item in enumerate(items):
            self.node(item, stored[index], (*path, index), _setter(items, index))
        if isinstance(live, tuple):
            self._fit.later(Phase.TREE, lambda: put(_tuple_of(items, live)))

    def _object(self, live: Stateful, stored: Any, path: Path) -> None:
        if isinstance(live, nn.Module):
            fit_module(live, stored, path, self._fit)
        elif isinstance(live, Optimizer) and is_optimizer_state(stored):
            fit_optimizer(live, stored, path, self._fit)
        elif isinstance(live, Optimizer) and type(live).state_dict is Optimizer.state_dict:
            self._fit.problem(path, "an optimizer here, but no optimizer's state saved")
        else:
            self._stateful(live, stored, path)

    def _stateful(self, live: Stateful, stored: Any, path: Path) -> None:
        """Any other object: its ``state_dict()`` is not called, for a loader it has side effects.

        Only where DTensors were saved: nothing else tells their mesh.
        """
        if isinstance(live, RngState) and self._seed:
            seed = self._seed + describe(path).encode(errors="surrogatepass")
            self._fit.later(Phase.RNG, lambda: live.reseed(seed))
            return
        sharded = holds(stored, _is_sharded)
        template = live.state_dict() if sharded else None

        def find(_: StoredTensor, at: Path) -> torch.Tensor | None:
            return _find(template, at[len(path) :])

        rebuild = rebuilding(self._fit, stored, find, path)
        check_state_dict = getattr(live, "check_state_dict", None)
        if callable(check_state_dict) and self._with_data:
            # Copies, because views may be misaligned: torch crashes on a generator's state that is.
            copies = replace_tensors(stored, lambda tensor, _: tensor.data.clone())
            for problem in check_state_dict(copies):
                self._fit.problem(path, problem)
        phase = Phase.RNG if isinstance(live, RngState) else Phase.OBJECT
        self._fit.later(phase, lambda: live.load_state_dict(rebuild()))


def _is_sharded(node: Any) -> bool:
    return isinstance(node, StoredTensor) and node.sharding is not None


def _shape_of(live: Any) -> type:
    return dict if isinstance(live, dict) else type(live)


def _setter(container: Any, key: Any) -> Put:
    def put(value: Any) -> None:
        container[key] = value

    return put


def _tuple_of(items: list[Any], live: tuple[Any, ...]) -> tuple[Any, ...]:
    same = all(new is old for new, old in zip(items, live, strict=True))
    return live if same else tuple(items)


def _find(template: Any, path: Path) -> torch.Tensor | None:
    for key in path:
        try:
            template = template[key]
        except (LookupError, TypeError):
            return None
    return template if isinstance(template, torch.Tensor) else None
