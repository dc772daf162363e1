"""How a restart finds the number of its timeline: one above all that any node has seen. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from ecckpt.errors import Fenced

_TRIES = 8


def first_free(known: Iterable[int]) -> Generator[int, Sequence[int], int]:
    """Yields a timeline to ask every agent for; to be sent the newer fences of those that refuse.

    Returns the timeline once nobody refuses. ``known`` are fences that somebody has seen: with the
    newest of all among them, one question to each agent is enough, and it is answered by what the
    agent holds. Raises ``Fenced`` when others begin timelines faster than this restart.
    """
    timeline = max(known, default=0) + 1
    for _ in range(_TRIES):
        newer = yield timeline
        if not newer:
            return timeline
        timeline = max(newer) + 1
    raise Fenced(timeline=timeline - 1, current=timeline - 1)
