"""How a save is seen through: protected, counted, committed or given up. Pure.

Committing needs no collective: each rank adds one to the generation's counter when its shard is
protected, and whoever completes the count tells the agents. A rank that gives up makes the count
unreachable first, in the same atomic counter, so a generation is either committed or given up,
never both.

The rule is a generator: it yields what is to be done and is sent what came of it, or is thrown the
``EcckptError`` that came instead. ``saving.Watcher`` does it with a store, an agent and a thread;
the simulator with none of them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from ecckpt import wire
from ecckpt.errors import EcckptError, Fenced, SaveFailed
from ecckpt.generation import Generation, ShardId

POISON = 1 << 40


@dataclass(frozen=True, slots=True)
class Start:
    """Ask this node's agent to protect the shard."""


@dataclass(frozen=True, slots=True)
class Look:
    """Watch the shard at this node's agent until there is news beyond ``state``, or for a while.

    Answered by ``Progress``. ``SaveTimedOut`` when the save's deadline is over.
    """

    state: str


@dataclass(frozen=True, slots=True)
class Protected:
    """The shard reached its redundancy: tell whoever waits for it."""

    progress: wire.Progress


@dataclass(frozen=True, slots=True)
class Count:
    """Add to the generation's counter, in one step; answered by what it is then."""

    amount: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Say that the generation is committed: to this node's agent or, with ``everybody``, to all.

    To all, this node's first; one that cannot be told is passed over.
    """

    everybody: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Subtract ``POISON`` unless the count is complete, in one step.

    Answered by whether the generation can no longer be committed: False if it is.
    """


Step = Start | Look | Protected | Count | Tell | GiveUp
Steps = Generator[Step, Any, EcckptError | None]


def counter_of(generation: Generation) -> str:
    """The name of a generation's counter in the store."""
    return f"count/{generation}"


def see_through(shard: ShardId, ranks: int, *, counted: bool) -> Steps:
    """See a staged shard through; returns the error with which its save failed, or None.

    Without ``counted`` it only has to be protected.
    """
    try:
        yield from _commit(shard, ranks, counted=counted)
    except Fenced as error:
        # The run has been taken over: what a complete count meant is not for this rank to say.
        if counted:
            yield GiveUp()
        return error
    except EcckptError as error:
        # Never from a complete count: other ranks may yet read it, and must find it complete.
        if counted and not (yield GiveUp()):
            return None
        return error
    return None


def _commit(shard: ShardId, ranks: int, *, counted: bool) -> Generator[Step, Any, None]:
    yield Start()
    state = "encoding"
    while state != "protected":
        progress = yield Look(state)
        state = progress.state
        if state in ("failed", "unknown"):
            detail = "; ".join(progress.problems[:8]) or "the agent was restarted meanwhile"
            raise SaveFailed(f"{shard}: not protected: {detail}")
    yield Protected(progress)
    if not counted:
        return
    if (yield Count(1)) == ranks:
        yield Tell(everybody=True)
    while not (yield Look(state)).committed:
        count = yield Count(0)
        if count < 0:
            raise SaveFailed(f"{shard}: another rank could not protect its shard")
        if count >= ranks:
            # Whoever completed the count may have died before it told this node.
            yield Tell(everybody=False)
