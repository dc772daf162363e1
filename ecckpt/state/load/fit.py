"""Whether a saved state fits a live one, and the steps that would restore it.

Fitting changes nothing: it collects every problem, and steps to run if there is none.
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
    """The order of the steps: what restores random numbers comes after all that may draw some."""

    TREE = 0
    OPTIMIZER = 1
    OBJECT = 2
    RNG = 3


class Fit:
    """The problems found and the steps prepared, while a live state is walked.

    ``likes`` are the live tensors that saved ones go into, or are made like, by the latter's name.
    ``assigner``: what has tensors that need not be copied, if anybody.
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
        """What does not fit, in the order in which the states were walked."""
        self._settle()
        return self._problems

    def problem(self, path: Path, text: str) -> None:
        """Note that what is at ``path`` does not fit."""
        self.problems.append(f"{describe(path)}: {text}")

    def later(self, phase: Phase, step: Callable[[], object]) -> None:
        """Note a step; steps run by phase, and within a phase in the order noted."""
        self._steps.append((phase, step))

    def require(self) -> None:
        """Raise ``StateMismatch`` if anything did not fit."""
        if self.problems:
            raise StateMismatch(self.problems)

    def run(self) -> None:
        """Restore."""
        self.require()
        self._fills.run()
        for _, step in sorted(self._steps, key=lambda step: step[0]):
            step()

    def keys(self, live: Collection[Any], stored: Collection[Any], path: Path) -> bool:
        """Whether both have the same keys; each one that only one of them has is a problem."""
        if live == stored:  # of two views of keys: as sets
            return True
        missing = [key for key in live if key not in stored]
        unexpected = [key for key in stored if key not in live]
        for key in missing:
            self.problem((*path, key), "missing in the saved state")
        for key in unexpected:
            self.problem((*path, key), "saved, but not in this state")
        return not (missing or unexpected)

    def count(self, live: int, stored: int, what: str, path: Path) -> bool:
        """Whether both have as many of ``what``; a problem otherwise."""
        if live != stored:
            self.problem(path, f"{stored} {what} saved, {live} here")
        return live == stored

    def tensor(self, live: torch.Tensor, stored: Any, path: Path) -> None:
        """Fit a live tensor; it will be filled in place."""
        if not isinstance(stored, StoredTensor):
            self.problem(path, f"a tensor here, {stored_name(stored)} saved")
            return
        self.likes[stored.name] = live
        self._waiting.append((live, stored, path))

    def tensors(
        self, live: Mapping[Any, torch.Tensor], stored: Mapping[Any, Any], path: Path
    ) -> None:
        """``tensor`` for all of a dict, of which ``stored`` has every key."""
        chosen = [stored[key] for key in live]
        if {StoredTensor}.issuperset(map(type, chosen)):
            self.likes.update(zip(map(_name_of, chosen), live.values(), strict=True))
            paths = [(*path, key) for key in live]
            self._waiting += zip(live.values(), chosen, paths, strict=True)
            return
        for key, tensor in live.items():
            self.tensor(tensor, stored[key], (*path, key))

    def same_form(
        self, live: torch.Tensor, local: torch.Tensor, stored: StoredTensor, path: Path
    ) -> bool:
        """Whether shape, dtype and sharding agree; ``local`` is the part of ``live`` held here."""
        before = len(self.problems)
        sharding = self.shardings.of(live) if local is not live else None  # type: ignore[arg-type]
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

    def _settle(self) -> None:
        """Look at the tensors that wait for it: together, since most are of the usual kind."""
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), TOGETHER):
            pairs = waiting[start : start + TOGETHER]
            addresses = matching(pairs)
            if addresses is not None and self._filled.add_new(addresses, pairs):
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
        first = self._filled.first(part, pair)
        _, known, known_path = first
        if first is not pair and not same_bytes(known.data, stored.data):
            self.problem(
                path, f"the same memory as {describe(known_path)} here, saved with other values"
            )
        self._fills.add(part.local, stored)


def _fillable(local: torch.Tensor, stored: StoredTensor) -> bool:
    """An expanded tensor has one element for many: they must all be the same."""
    if local.is_contiguous():
        return True
    target, source = collapse(local, stored.data)
    return target is local or same_bytes(source.expand_as(stored.data), stored.data)
