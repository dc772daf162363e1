"""Mistakes of the caller that would otherwise come out as errors about something else."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from ecckpt.errors import InvalidConfig

_STEP_LIMIT = 10**18  # format/ids.py spells a step with at most 18 digits


def step_of(step: Any, state: Any = None) -> int:
    """Return a step as a number of its own: a tensor that is counted up later does not change it.

    ``state`` is the argument after it, if there is one. Raises ``TypeError`` for what is no whole
    number, and ``InvalidConfig`` for one that is negative or above 10^18 - 1.
    """
    if isinstance(step, Mapping) and not isinstance(state, Mapping):
        raise TypeError("the step is a dict: the arguments are save(step, state)")
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(
            f"step={step!r:.40} is a {type(step).__name__}, not a whole number"
        ) from None
    if isinstance(step, bool):
        raise TypeError(f"step={step} is a bool, not a whole number")
    if not 0 <= number < _STEP_LIMIT:
        raise InvalidConfig(f"step={number} is not between 0 and 10^18 - 1")
    return number
