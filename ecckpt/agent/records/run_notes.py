"""What an agent writes down of a run, beside its files."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ecckpt.format.ids import Generation
from ecckpt.policy.rollbacks import RollBack
from ecckpt.protocol.messages.repair import Guard

# A time of birth before every other. Not 0: a start may be older than the host of an agent is up.
NOT_KNOWN_S = -math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNotes:
    """What of a run must survive the agent's process, beyond the files themselves."""

    fence: int = 0
    committed: Generation | None = None
    restored: Generation | None = None
    roll_backs: tuple[RollBack, ...] = ()
    stored: tuple[Generation, ...] = ()
    guard: Guard | None = None
    restored_by: int = 0
    session: str = ""
    born_s: float = NOT_KNOWN_S

    @property
    def lasting(self) -> RunNotes:
        """The part that still means something when all memory is lost: what goes to disk."""
        return replace(self, committed=None, guard=None, born_s=NOT_KNOWN_S)
