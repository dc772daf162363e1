"""What people went back to by name, and which nodes have written it down."""

from __future__ import annotations

from collections.abc import Collection

from ecckpt.format.ids import Generation
from ecckpt.policy.rollbacks import RollBack, abandoned_by, in_force


class Choices:
    """All roll-backs of a run, whoever remembers them."""

    def __init__(self) -> None:
        self._made: list[RollBack] = []
        self._noted: dict[str, tuple[RollBack, ...]] = {}
        self._recorded: dict[str, tuple[RollBack, ...]] = {}

    def made(self, timeline: int, target: Generation) -> None:
        """A timeline goes on from there, on purpose."""
        self._made.append(RollBack(timeline, target))

    def noted(self, node: str, roll_backs: tuple[RollBack, ...]) -> None:
        """A node has written down these."""
        self._noted[node] = roll_backs

    def recorded(self, node: str, roll_backs: tuple[RollBack, ...]) -> None:
        """A node has written down these on disk."""
        self._recorded[node] = roll_backs

    def forgotten(self, node: str, *, disk: bool) -> None:
        """A node has lost what it wrote down, but for what is on disk if it has that still."""
        if disk:
            self._recorded.pop(node, None)
        self._noted[node] = self._recorded.get(node, ())

    def left(self, generation: Generation) -> bool:
        """Whether anybody ever went back before it."""
        return any(each.abandons(generation) for each in self._made)

    def abandoned(self, generation: Generation, nodes: Collection[str]) -> RollBack | None:
        """What abandons a generation as far as these nodes know: then a restart may not take it."""
        known = {each for node in nodes for each in self._noted.get(node, ())}
        return abandoned_by(generation, in_force(each for each in self._made if each in known))
