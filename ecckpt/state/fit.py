"""Whether a saved state fits a live one, and the steps that would restore it.

Fitting changes nothing: it collects every problem, and steps to run if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import IntEnum
from typing import Any

import torch

from ecckpt.errors import StateMismatch, UnsupportedState
from ecckpt.state.filling import Fills
from ecckpt.state.paths import Path, describe
from ecckpt.state.sharding import Shardings, is_dtensor
from ecckpt.state.stored import StoredTensor, fresh_tensor, replace_tensors, stored_name
from ecckpt.state.tensors import collapse, memory_key, part_of, same_bytes

Find = Callable[[StoredTensor, Path], torch.Tensor | None]


class Phase(IntEnum):
    """The order of the steps: what restores random numbers comes after all that may draw some."""

    TREE = 0
    OPTIMIZER = 1
    OBJECT = 2
    RNG = 3


class Fit:
    """The problems found and the steps prepared, while a live state is walked.

    ``likes`` are the live tensors that saved ones go into, or are made like, by the latter's name.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.likes: dict[str, torch.Tensor] = {}
        self.shardings = Shardings()
        self._fills = Fills()
        self._steps: list[tuple[Phase, Callable[[], object]]] = []
        self._filled: dict[Any, tuple[Path, StoredTensor]] = {}

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
        try:
            part = part_of(live, path, self.shardings)
        except UnsupportedState as error:
            self.problems.append(str(error))
            return
        if self.same_form(live, part.local, stored, path) and self._fillable(
            part.local, stored, path
        ):
            known_path, known = self._filled.setdefault(memory_key(part), (path, stored))
            if known.data is not stored.data and memory_key(part) is not None:
                self._tied(known_path, known, stored, path)
            self._fills.add(part.local, stored.data)

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
        elif local.shape != stored.data.shape:
            self.problem(
                path, f"saved with shape {list(stored.data.shape)}, here {list(local.shape)}"
            )
        if local.dtype != stored.data.dtype:
            self.problem(path, f"saved as {stored.data.dtype}, here {local.dtype}")
        return len(self.problems) == before

    def rebuild(self, node: Any, find: Find, path: Path) -> Callable[[], Any]:
        """Fit a saved tree that will be handed to ``load_state_dict``.

        ``find(stored, path)`` gives the live tensor that tells device and mesh, or None. The
        function returned makes the tree, each time with new tensors.
        """

        def check(stored: StoredTensor, at: Path) -> None:
            like = find(stored, at)
            if like is not None:
                self.likes[stored.name] = like
            if stored.sharding is not None:
                self._same_mesh(like, stored, at)
            elif is_dtensor(like):
                here = self.shardings.of(like)  # type: ignore[arg-type]
                self.problem(at, f"saved as a whole tensor, here {here}")

        def rebuilt() -> Any:
            fills = Fills()

            def make(stored: StoredTensor, at: Path) -> torch.Tensor:
                return fresh_tensor(stored, find(stored, at), fills)

            tree = replace_tensors(node, make, path)
            fills.run()
            return tree

        replace_tensors(node, check, path)
        return rebuilt

    def _same_mesh(self, like: torch.Tensor | None, stored: StoredTensor, path: Path) -> None:
        if like is None or not is_dtensor(like):
            self.problem(path, f"saved as {stored.sharding}, with no DTensor here to tell the mesh")
            return
        here, saved = self.shardings.of(like), stored.sharding  # type: ignore[arg-type]
        assert saved is not None
        if saved.held or (here.mesh_shape, here.coordinate, here.placements) != (
            saved.mesh_shape,
            saved.coordinate,
            saved.placements,
        ):
            self.problem(path, f"saved as {saved}, here {here}")

    def _fillable(self, local: torch.Tensor, stored: StoredTensor, path: Path) -> bool:
        """An expanded tensor has one element for many: they must all be the same."""
        target, source = collapse(local, stored.data)
        fits = target is local or same_bytes(source.expand_as(stored.data), stored.data)
        if not fits:
            self.problem(path, "expanded here, but saved with elements that differ")
        return fits

    def _tied(
        self, known_path: Path, known: StoredTensor, stored: StoredTensor, path: Path
    ) -> None:
        if not same_bytes(known.data, stored.data):
            self.problem(
                path, f"the same memory as {describe(known_path)} here, saved with other values"
            )
