"""The one way to stage and protect a shard, for ``Checkpointer.save`` and for tickets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ecckpt.client import deadlines
from ecckpt.client.effects import Now, Routine, call_own, perform, traced
from ecckpt.client.state_effects import CopyState, Snapshot
from ecckpt.errors import SaveFailed, SaveTimedOut
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.save import Progress, Protect, Slot, Stage, Watch
from ecckpt.protocol.verbs import PROTECT, STAGE, WATCH


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a save has to have ended, on the performer's clock."""

    shard: ShardId
    at_s: float

    def left_s(self, what: str) -> Routine[float]:
        """Seconds that are left; ``SaveTimedOut`` if none are, saying ``what`` it still is."""
        left_s = self.at_s - (yield from perform(Now()))
        if left_s <= 0:
            raise SaveTimedOut(f"{self.shard}: still {what} at its deadline")
        return left_s


def copy_into_slot(snapshot: Snapshot, header: Header, slot: Slot) -> Routine[None]:
    """Copy the planned state into its slot."""
    yield from traced("copy", header.shard, perform(CopyState(snapshot, slot, header)))


def start_protecting(stage: Stage, protect: Protect) -> Routine[None]:
    """Tell this node's agent that the slot is filled, and have the shard coded and spread."""
    yield from call_own(STAGE, stage, deadlines.CALL_S)
    yield from call_own(PROTECT, protect, deadlines.CALL_S)


def _no_check() -> Routine[None]:
    yield from ()


def await_protected(
    deadline: Deadline, check: Callable[[], Routine[None]] = _no_check
) -> Routine[Progress]:
    """Watch a shard until it has its redundancy; ``check`` runs before each further look.

    Raises ``SaveFailed`` if the agent reports that the shard cannot get it, or knows nothing of the
    shard any more, ``SaveTimedOut`` at the deadline, and what ``check`` raises.
    """
    state = "encoding"
    while True:
        left_s = yield from deadline.left_s(state)
        watch = Watch(deadline.shard, state, min(deadlines.WATCH_S, left_s))
        progress = yield from call_own(WATCH, watch, deadlines.CALL_S)
        state = progress.state
        if state == "protected":
            return progress
        if state in ("failed", "unknown"):
            detail = "; ".join(progress.problems[:8]) or "the agent was restarted meanwhile"
            raise SaveFailed(f"{deadline.shard}: not protected: {detail}")
        yield from check()
