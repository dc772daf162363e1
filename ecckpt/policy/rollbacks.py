"""Roll-backs: restores of an older state that was asked for, and what they abandon. Pure.

A restart by itself abandons nothing: generations that it could not reach may be reachable tomorrow.
A restore of a given step or generation does abandon the newer ones: the user does not want them
back after the next crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ecckpt.format.ids import Generation

_REMEMBERED = 64


@dataclass(frozen=True, order=True, slots=True)
class RollBack:
    """The user asked for ``target``, and ``timeline`` continues it.

    Generations after ``target`` on older timelines are abandoned: they are kept and can be restored
    by name, but a restart does not choose them.
    """

    timeline: int
    target: Generation

    def abandons(self, generation: Generation) -> bool:
        """Whether the generation lies after the target and before ``timeline``."""
        return self.target < generation and generation.timeline < self.timeline


def in_force(roll_backs: Iterable[RollBack]) -> tuple[RollBack, ...]:
    """The roll-backs that still count, newest first, without repeats; at most 64.

    A roll-back that was made on a timeline which a newer roll-back abandons is void. Example: the
    user goes back from 5000 to 300, and later asks for 5000 by name; then 5000 is wanted again.
    """
    counting: list[RollBack] = []
    for each in sorted(set(roll_backs), reverse=True):
        if not counting or each.timeline <= counting[-1].target.timeline:
            counting.append(each)
    return tuple(counting[:_REMEMBERED])


def abandoned_by(generation: Generation, roll_backs: Sequence[RollBack]) -> RollBack | None:
    """The newest roll-back in force that abandons the generation."""
    return next((each for each in roll_backs if each.abandons(generation)), None)
