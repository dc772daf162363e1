"""Which generations somebody has left on purpose: roll-backs, and what they abandon. Pure.

A restart by itself abandons nothing: what it could not reach may be back tomorrow. A restore of a
given step or generation does: whoever asked for an older state does not want the newer one back
after the next crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ecckpt.format.ids import Generation

_REMEMBERED = 64


@dataclass(frozen=True, order=True, slots=True)
class RollBack:
    """Somebody asked for ``target``, and ``timeline`` began there.

    What older timelines made after ``target`` is abandoned: still there, still to be had by name,
    but nothing that a restart takes by itself.
    """

    timeline: int
    target: Generation

    def abandons(self, generation: Generation) -> bool:
        """Whether the generation lies between the target and the timeline that began there."""
        return self.target < generation and generation.timeline < self.timeline


def in_force(roll_backs: Iterable[RollBack]) -> tuple[RollBack, ...]:
    """Those that still count, newest first, without repeats; at most 64.

    A roll-back made on a timeline that a newer one abandoned is void: going back to 300 and then,
    by name, to the 5000 left before means that 5000 is wanted again.
    """
    counting: list[RollBack] = []
    for each in sorted(set(roll_backs), reverse=True):
        if not counting or each.timeline <= counting[-1].target.timeline:
            counting.append(each)
    return tuple(counting[:_REMEMBERED])


def abandoned_by(generation: Generation, roll_backs: Sequence[RollBack]) -> RollBack | None:
    """The newest roll-back in force that abandons the generation."""
    return next((each for each in roll_backs if each.abandons(generation)), None)
