"""Which roll-backs restores have made, and which nodes know of them.

``Truth`` uses it to tell whether a restart was allowed to choose a generation.
"""

from __future__ import annotations

from collections.abc import Collection

from ecckpt.format.ids import Generation
from ecckpt.policy.rollbacks import RollBack, abandoned_by, in_force


class TruthRollBacks:
    """All roll-backs of a run, and what each node has written down of them."""

    def __init__(self) -> None:
        self._made: list[RollBack] = []
        self._in_memory: dict[str, tuple[RollBack, ...]] = {}
        self._on_disk: dict[str, tuple[RollBack, ...]] = {}

    def add(self, timeline: int, target: Generation) -> None:
        """A restore by name begins ``timeline`` at ``target``."""
        self._made.append(RollBack(timeline, target))

    def written_to_memory(self, node: str, roll_backs: tuple[RollBack, ...]) -> None:
        """An agent has written these to its tmpfs."""
        self._in_memory[node] = roll_backs

    def written_to_disk(self, node: str, roll_backs: tuple[RollBack, ...]) -> None:
        """An agent has written these to its disk."""
        self._on_disk[node] = roll_backs

    def host_lost(self, node: str, *, disk: bool) -> None:
        """A node has lost its memory, and with ``disk`` its disk; it knows what its disk has."""
        if disk:
            self._on_disk.pop(node, None)
        self._in_memory[node] = self._on_disk.get(node, ())

    def was_abandoned(self, generation: Generation) -> bool:
        """Whether any roll-back has ever abandoned the generation, even one no longer in force."""
        return any(roll_back.abandons(generation) for roll_back in self._made)

    def abandoned(self, generation: Generation, nodes: Collection[str]) -> RollBack | None:
        """The roll-back in force among those that these nodes know that abandons the generation.

        A restart that hears from these nodes must not choose the generation by itself.
        """
        known = {roll_back for node in nodes for roll_back in self._in_memory.get(node, ())}
        made = (roll_back for roll_back in self._made if roll_back in known)
        return abandoned_by(generation, in_force(made))
