"""``Fit``: collects the problems and the steps of a restore while ``load.py`` compares two states.

Collecting changes nothing. ``restore`` runs the steps if there is no problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from operator import attrgetter
from typing import Any

import torch

from ecckpt.errors import StateMismatch, UnsupportedState
from ecckpt.state.load.assigning import Assigner
from ecckpt.state.load.filling import Fills
from ecckpt.state.load.matching import Filled, Pair, matching
from ecckpt.state.paths import Path, describe
from ecckpt.state.tensors.columns import TOGETHER
from ecckpt.state.tensors.sharding import Shardings
from ecckpt.state.tensors.tensors import collapse, part_of, same_bytes
from ecckpt.state.tree.nodes import StoredTensor, stored_name

_name_of = attrgetter("name")


class Phase(IntEnum):
    """The order of the steps after tensors were filled.

    Random number generators come last, because any ``load_state_dict`` may draw from them.
    """

    TREE = 0  # values, modules with extra state
    OPTIMIZER = 1
    OBJECT = 2  # other objects with load_state_dict
    RNG = 3


class Fit:
    """The problems and steps of one restore.

    Attributes:
        likes: by saved name, the live tensor that it fills or is made like.
        shardings: the cache of live DTensors' shardings.
        assigner: assigns tensors instead of copying them; None: everything is copied.
    """

    def __init__(self, assigner: Assigner | None = None) -> None:
        self.assigner = assigner
        self.likes: dict[str, torch.Tensor] = {}
        self.shardings = Shardings()
        self._problems: list[str] = []
        self._waiting: list[Pair] = []
        self._filled = Filled(self.shardings)
        self._fills = Fills(assigner)
        self._steps: list[tuple[Phase, Callable[[], object]]] = []

    @property
    def problems(self) -> list[str]:
        """All problems so far, in the order of the walk."""
        self._fit_waiting()
        return self._problems

    def problem(self, path: Path, text: str) -> None:
        """Add a problem of the value at ``path``."""
        self.problems.append(f"{describe(path)}: {text}")

    def add_step(self, phase: Phase, step: Callable[[], object]) -> None:
        """Add a step; ``restore`` runs steps by phase, and within a phase in this order."""
        self._steps.append((phase, step))

    def require(self) -> None:
        """Raise ``StateMismatch`` if there is any problem."""
        if self.problems:
            raise StateMismatch(self.problems)

    def restore(self) -> None:
        """Fill the tensors, then run the steps; raises ``StateMismatch`` before any change."""
        self.require()
        self._fills.fill_all()
        for _, step in sorted(self._steps, key=lambda step: step[0]):
            step()

    def keys(self, live: Collection[Any], stored: Collection[Any], path: Path) -> bool:
        """Return whether both have the same keys; a key in only one of them is a problem."""
        if live == stored:  # two views of keys compare as sets
            return True
        missing = [key for key in live if key not in stored]
        unexpected = [key for key in stored if key not in live]
        for key in missing:
            self.problem((*path, key), "missing in the saved state")
        for key in unexpected:
            self.problem((*path, key), "saved, but not in this state")
        return not (missing or unexpected)

    def count(self, live: int, stored: int, what: str, path: Path) -> bool:
        """Return whether both numbers of ``what`` are equal; otherwise it is a problem."""
        if live != stored:
            self.problem(path, f"{stored} {what} saved, {live} here")
        return live == stored

    def tensor(self, live: torch.Tensor, stored: Any, path: Path) -> None:
        """Fit a live tensor to a saved node; ``restore`` will fill it in place."""
        if not isinstance(stored, StoredTensor):
            self.problem(path, f"a tensor here, {stored_name(stored)} saved")
            return
        self.likes[stored.name] = live
        self._waiting.append((live, stored, path))

    def tensors(
        self, live: Mapping[Any, torch.Tensor], stored: Mapping[Any, Any], path: Path
    ) -> None:
        """Call ``tensor`` for all items of a dict; ``stored`` has each key."""
        nodes = [stored[key] for key in live]
        if {StoredTensor}.issuperset(map(type, nodes)):
            self.likes.update(zip(map(_name_of, nodes), live.values(), strict=True))
            paths = [(*path, key) for key in live]
            self._waiting += zip(live.values(), nodes, paths, strict=True)
            return
        for key, tensor in live.items():
            self.tensor(tensor, stored[key], (*path, key))

    def same_form(
        self, live: torch.Tensor, local: torch.Tensor, stored: StoredTensor, path: Path
    ) -> bool:
        """Return whether shape, dtype and sharding agree; a difference is a problem.

        ``local`` is this rank's part of ``live``: ``live`` itself unless that is a DTensor.
        """
        before = len(self.problems)
        sharding = self.shardings.sharding_of(live) if local is not live else None  # type: ignore[arg-type]
        if sharding != stored.sharding:
            self.problem(
                path,
                f"saved as {stored.sharding or 'a whole tensor'}, "
                f"here {sharding or 'a whole tensor'}",
            )
        elif local.shape != stored.shape:
            self.problem(path, f"saved with shape {list(stored.shape)}, here {list(local.shape)}")
        if local.dtype != stored.dtype:
            self.problem(path, f"saved as {stored.dtype}, here {local.dtype}")
        return len(self.problems) == before

    # -- tensors that are filled in place ---------------------------------------------------------

    def _fit_waiting(self) -> None:
        """Fit the tensors noted so far, in batches: most are plain and match in C."""
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), TOGETHER):
            pairs = waiting[start : start + TOGETHER]
            addresses = matching(pairs)
            if addresses is not None and self._filled.add_untied(addresses, pairs):
                lives, stored, _ = zip(*pairs, strict=True)
                self._fills.add_plain(lives, addresses, stored)
                continue
            for pair in pairs:
                self._fit_one(pair)

    def _fit_one(self, pair: Pair) -> None:
        live, stored, path = pair
        try:
            part = part_of(live, path, self.shardings)
        except UnsupportedState as error:
            self.problems.append(str(error))
            return
        if not self.same_form(live, part.local, stored, path):
            return
        if not _fillable(part.local, stored):
            self.problem(path, "expanded here, but saved with elements that differ")
            return
        first = self._filled.first_of(part, pair)
        _, known, known_path = first
        if first is not pair and not same_bytes(known.data, stored.data):
            self.problem(
                path, f"the same memory as {describe(known_path)} here, saved with other values"
            )
        self._fills.add_fill(part.local, stored)


def _fillable(local: torch.Tensor, stored: StoredTensor) -> bool:
    """Return whether ``stored`` can be written to ``local``.

    An expanded tensor has one element of memory for many indices: the saved ones must be equal.
    """
    if local.is_contiguous():
        return True
    target, source = collapse(local, stored.data)
    return target is local or same_bytes(source.expand_as(stored.data), stored.data)
