"""Restores a shard into a live state, in place, all or nothing.

``client/restore`` calls ``check`` on all ranks and lets each rank load only if all have succeeded:

    check: compare trees, collect problems and steps (Fit)  ->  StateMismatch, nothing changed
    load:  fill tensors, then run the steps by phase (``fit.Phase``)
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
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
    """Check whether ``shard`` fits ``state``, without changing either.

    Args:
        state: the live state; owned by the caller.
        shard: the parsed shard. Its buffer stays unchanged until the returned function has run.
        assign: let tensors use the memory of the shard's buffer where possible, instead of copying.
            The caller then gives up the buffer, which must be writable and private to this process.

    Returns:
        A function that restores, to be called at most once, while neither ``state`` nor ``shard``
        has changed. It returns the number of bytes that were assigned instead of copied.

    Raises:
        StateMismatch: lists each path that does not fit.
    """
    views = shard.tensors
    assigner = Assigner(views.buffer) if assign and isinstance(views, Views) else None
    with collector_paused(), _outside_inference():
        fit = _fit(state, shard, assigner=assigner)
        fit.require()

    def restore() -> int:
        with _outside_inference():
            fit.restore()
        return 0 if assigner is None else assigner.assigned_bytes

    return restore


@contextlib.contextmanager
def _outside_inference() -> Iterator[None]:
    """Leave the caller's inference mode: tensors that are made in it can never be trained."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def load(state: dict[Any, Any], shard: Shard) -> None:
    """Restore ``shard`` into ``state``, in place.

    Tensors are filled, containers of values and arrays get new contents, objects get their state by
    ``load_state_dict``. Everything that can be checked is checked before the first change. The
    restored state does not refer to the shard's buffer.

    Raises:
        StateMismatch: the shard does not fit; nothing was changed.
        Exception: from an object's own ``load_state_dict``; the state is then partly restored.
    """
    check(state, shard)()


def survey(state: dict[Any, Any], shard: Shard) -> dict[str, torch.Tensor]:
    """Return, by saved name, the live tensor that a saved one fills or is made like.

    It uses the forms of tensors only: the bytes of the shard's tensors may still be missing.
    Tensors without a counterpart are left out.
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
        _Walk(fit, shard, with_data=with_data).node(state, tree, (), lambda _: None)
    except UnsupportedState as error:
        fit.problems.append(str(error))
    return fit


class _Walk:
    """Walks a live and a saved tree together, and adds problems and steps to a ``Fit``.

    ``put(value)`` replaces the live node in its container.
    """

    def __init__(self, fit: Fit, shard: Shard, *, with_data: bool) -> None:
        self._fit = fit
        self._seed, self._seeded = shard.seed, shard.seeded
        self._with_data = with_data

    def node(self, live: Any, stored: Any, path: Path, put: Put) -> None:
        fit = self._fit
        if isinstance(live, torch.Tensor):
            fit.tensor(live, stored, path)
        elif is_stateful(live):
            state = stored.state if isinstance(stored, StoredObject) else stored
            self._object(live, state, path)
        elif holds(live, is_live):
            saved = stored.state if isinstance(stored, StoredObject) else stored
            if type(live) in CONTAINERS and isinstance(saved, _shape_of(live)):
                self._container(live, saved, path, put)
            else:
                fit.problem(path, f"{stored_name(stored)} saved, {kind_name(live)} here")
        else:
            self._value(live, stored, path, put)

    def _value(self, live: Any, stored: Any, path: Path, put: Put) -> None:
        """Fit a plain value or a container of values: it takes the form that was saved.

        A program that has just started has ``None``, a number or an empty list where there are
        tensors later. Keys that a dict has here and that were not saved are problems.
        """
        if holds(stored, _is_object):
            if isinstance(live, dict) and isinstance(stored, dict):
                self._container(live, stored, path, put)
            else:
                self._fit.problem(path, f"{stored_name(stored)} saved, {kind_name(live)} here")
            return
        self._missing(live, stored, path)
        if not holds(stored, is_stored):
            self._fit.add_step(Phase.TREE, lambda: put(refilled(live, stored)))
            return
        rebuild = rebuilding(self._fit, stored, lambda tensor, at: None, path)
        self._fit.add_step(Phase.TREE, lambda: put(refilled(live, rebuild())))

    def _missing(self, live: Any, stored: Any, path: Path) -> None:
        if type(live) not in (dict, OrderedDict) or not isinstance(stored, dict):
            return
        for key, value in live.items():
            if key in stored:
                self._missing(value, stored[key], (*path, key))
            else:
                self._fit.problem((*path, key), "missing in the saved state")

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
            # A tuple cannot be changed: `put` of its items changes the list, which replaces it.
            self._fit.add_step(Phase.TREE, lambda: put(_tuple_of(items, live)))

    def _object(self, live: Stateful, stored: Any, path: Path) -> None:
        if isinstance(live, nn.Module):
            fit_module(live, stored, path, self._fit)
        elif isinstance(live, Optimizer) and is_optimizer_state(stored):
            fit_optimizer(live, stored, path, self._fit)
        elif isinstance(live, Optimizer) and type(live).state_dict is Optimizer.state_dict:
            self._fit.problem(path, "an optimizer here, but the saved state is not one's")
        else:
            self._stateful(live, stored, path)

    def _stateful(self, live: Stateful, stored: Any, path: Path) -> None:
        """Fit an object that is neither a module nor an optimizer.

        Its ``state_dict()`` is called only if DTensors were saved, because a live DTensor is the
        only source of their mesh. It has side effects on data loaders.
        """
        if isinstance(live, RngState) and self._seed:
            seed = self._seed + describe(path).encode(errors="surrogatepass")
            parts, kept = self._seeded.get(path), rebuilding(self._fit, stored, _nothing, path)
            if parts is None:
                self._fit.add_step(Phase.RNG, lambda: live.reseed(seed))
            else:
                self._fit.add_step(Phase.RNG, lambda: live.go_on(kept(), seed, parts))
            return
        sharded = holds(stored, _is_sharded)
        template = live.state_dict() if sharded else None

        def find(_: StoredTensor, at: Path) -> torch.Tensor | None:
            return _find(template, at[len(path) :])

        rebuild = rebuilding(self._fit, stored, find, path)
        check_state_dict = getattr(live, "check_state_dict", None)
        if callable(check_state_dict) and self._with_data:
            # Copies: views of the shard may be misaligned, and torch crashes on the misaligned
            # state of a generator.
            copies = replace_tensors(stored, lambda tensor, _: tensor.data.clone())
            for problem in check_state_dict(copies):
                self._fit.problem(path, problem)
        phase = Phase.RNG if isinstance(live, RngState) else Phase.OBJECT
        self._fit.add_step(phase, lambda: live.load_state_dict(rebuild()))


def _nothing(_: StoredTensor, __: Path) -> None:
    """Find no live tensor: generators get theirs new."""


def _is_object(node: Any) -> bool:
    return isinstance(node, StoredObject)


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
