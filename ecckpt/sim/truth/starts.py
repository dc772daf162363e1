"""The order in which a run was started, and in which its starts began their timelines."""

from __future__ import annotations

from ecckpt.sim.truth.violation import Violation


class TruthStarts:
    """Checks that no start begins a timeline after a younger one has.

    A start is older than another if its session's name is less.
    """

    def __init__(self) -> None:
        self._youngest = ""

    def begun(self, session: str, *, heard_of: bool) -> None:
        """A session has begun a timeline; ``heard_of``: agents were told of all before it."""
        if session < self._youngest and heard_of:
            text = f"start {session} began a timeline after {self._youngest}"
            raise Violation("order of starts", text)
        self._youngest = max(self._youngest, session)
