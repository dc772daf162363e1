"""When saves have failed for so long that the training program has to hear of it. Pure.

A failed save costs no step of the training, so ``save`` only reports it. A run whose saves all fail
would train for hours without a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ecckpt.errors import EcckptError, SaveFailed

# A single save that fails after a long pause between saves is no reason to stop.
_LEAST_SAVES = 3


@dataclass(slots=True)
class Unsaved:
    """The saves since the newest commit; ``max_s`` is what they may fail for."""

    max_s: float
    saves: int = 0
    since_s: float = 0.0
    error: EcckptError | None = field(default=None, repr=False)

    def note_commit(self) -> None:
        """A save was committed."""
        self.saves, self.error = 0, None

    def note_failure(self, error: EcckptError, now_s: float) -> None:
        """A save has failed, or was skipped."""
        if not self.saves:
            self.since_s = now_s
        self.saves += 1
        self.error = error

    def require_hope(self, now_s: float) -> None:
        """Raise ``SaveFailed`` if all saves have failed for too long."""
        unsaved_s = now_s - self.since_s
        if self.saves >= _LEAST_SAVES and unsaved_s >= self.max_s:
            raise SaveFailed(
                f"no save was committed for {unsaved_s:.0f} s, {self.saves} in a row have failed; "
                f"the last one: {self.error}",
                hint=f"the run trains without new checkpoints; max_unsaved_s={self.max_s:g} is the "
                "bound",
            )
