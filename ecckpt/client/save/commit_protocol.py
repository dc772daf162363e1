"""How a save is seen through: protected, counted, committed or given up, and left. Pure.

Committing needs no collective: each rank adds one to the generation's counter when its shard is
protected, and whoever completes the count wakes those who wait for it; each then tells its own
agent. A rank that gives up makes the count unreachable first, in the same atomic counter, so a
generation is either committed or given up, never both.

When its part has ended either way, a rank leaves the generation, which is counted as well: no rank
begins the next save before all have left this one. So they begin it together or not at all, and
whoever is asked to hold something of it has been told that this one is committed.

The rule is a generator: it yields what is to be done and is sent what came of it, or is thrown the
``EcckptError`` that came instead. ``saving.Watcher`` does it with a store, an agent and a thread;
the simulator with none of them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from ecckpt.errors import EcckptError, Fenced, SaveFailed
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.save import Progress

POISON = 1 << 40

Counter = Literal["count", "left"]  # of shards that are protected; of ranks that are through


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

    progress: Progress


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a counter of the generation, in one step; answered by what it is then."""

    counter: Counter
    amount: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake all ranks that wait for this counter, now and later; who cannot is passed over."""

    counter: Counter


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until ranks that wait for this counter are woken, or for a while.

    ``SaveTimedOut`` when the save's deadline is over.
    """

    counter: Counter


@dataclass(frozen=True, slots=True)
class Tell:
    """Say to this node's agent that the generation is committed."""


@dataclass(frozen=True, slots=True)
class Share:
    """Say it to this rank's share of the agents without ranks; one that is deaf is passed over."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for a moment. ``SaveTimedOut`` when the save's deadline is over."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Subtract ``POISON`` from ``count`` unless it is complete, in one step.

    Answered by whether the generation can no longer be committed: False if it is.
    """


@dataclass(frozen=True, slots=True)
class Ended:
    """The save is committed, or has failed with ``error``: tell whoever waits for it."""

    error: EcckptError | None


Step = Start | Look | Protected | Count | Wake | Await | Tell | Share | Pause | GiveUp | Ended
Steps = Generator[Step, Any, None]


def key_of(counter: Counter, generation: Generation) -> str:
    """The name of a generation's counter in the store."""
    return f"{counter}/{generation}"


def wake_key_of(counter: Counter, generation: Generation) -> str:
    """The name of what wakes those who wait for that counter."""
    return f"{counter}/{generation}/wake"


def see_through(shard: ShardId, ranks: int, *, counted: bool) -> Steps:
    """See a staged shard through. Without ``counted`` it only has to be protected."""
    told, error = True, None
    try:
        yield from _protect(shard, counted=counted)
        if counted:
            told = yield from _commit(shard, ranks)
    except EcckptError as failed:
        error = failed
        if counted:
            given_up = yield from _give_up()
            # Never from a complete count: other ranks may yet read it, and must find it complete.
            # But a run that was taken over is not for this rank to say anything about.
            if not given_up and not isinstance(failed, Fenced):
                told, error = False, None
    yield Ended(error)
    if not counted:
        return
    if error is None:
        yield from _tell_late(told=told)
        yield Share()
    yield from _leave(ranks)


def give_up(ranks: int) -> Steps:
    """See to it that a shard which will not come keeps no other rank waiting."""
    yield from _give_up()
    yield from _leave(ranks)


def _protect(shard: ShardId, *, counted: bool) -> Generator[Step, Any, None]:
    yield Start()
    state = "encoding"
    while state != "protected":
        progress = yield Look(state)
        state = progress.state
        if state in ("failed", "unknown"):
            detail = "; ".join(progress.problems[:8]) or "the agent was restarted meanwhile"
            raise SaveFailed(f"{shard}: not protected: {detail}")
        if counted and state != "protected":
            _check(shard, (yield Count("count", 0)))
    yield Protected(progress)


def _commit(shard: ShardId, ranks: int) -> Generator[Step, Any, bool]:
    """Count until all have; whether this node's agent has been told of it then."""
    _check(shard, (yield from _reach("count", ranks)))
    return (yield from _told())


def _check(shard: ShardId, count: int) -> None:
    if count < 0:
        raise SaveFailed(f"{shard}: another rank could not protect its shard")


def _reach(counter: Counter, ranks: int) -> Generator[Step, Any, int]:
    """Count oneself and wait for the others; less than 0 if one of them gave up."""
    count: int = yield Count(counter, 1)
    if count == ranks:
        yield Wake(counter)
    while 0 <= count < ranks:
        yield Await(counter)
        # The counter decides: whoever completed it may have died before waking anybody.
        count = yield Count(counter, 0)
    return count


def _give_up() -> Generator[Step, Any, bool]:
    given_up: bool = yield GiveUp()
    if given_up:
        yield Wake("count")
    return given_up


def _tell_late(*, told: bool) -> Generator[Step, Any, None]:
    """This node's agent is away: have it know before it is asked for the next save."""
    try:
        while not (told or (yield from _told())):
            yield Pause()
    except EcckptError:
        return  # it learns it from the next commit


def _told() -> Generator[Step, Any, bool]:
    try:
        yield Tell()
    except Fenced:
        raise
    except EcckptError:
        return False
    return True


def _leave(ranks: int) -> Generator[Step, Any, None]:
    try:
        yield from _reach("left", ranks)
    except EcckptError:
        return  # a rank has died, or the store: the next save finds that out
