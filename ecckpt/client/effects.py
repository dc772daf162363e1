"""The closed set of effects: everything that the client's protocols ask of the world.

Saving, committing, restoring and archiving are generators (``Routine``). A routine yields an effect
and is sent the effect's result, or is thrown the error that came instead; ``yield from`` composes
routines, so that a protocol reads top to bottom as one function. Routines do no I/O, start no
threads and read no clock.

Two performers carry the effects out: client/threads.py with sockets, torch's store and threads,
sim/trainer.py with simulated time. Both guarantee that the code of one client's routines between
two effects is atomic: routines of one client may share plain attributes without a lock.

An effect raises ``EcckptError`` or ``OSError``, unless its docstring says more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ecckpt.protocol.messages.trace import Span
from ecckpt.protocol.verbs import A, M, Verb

if TYPE_CHECKING:
    from ecckpt.client.events import Event
    from ecckpt.client.handles import SaveHandle
    from ecckpt.errors import EcckptError
    from ecckpt.format.ids import ShardId

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
OWN = ""  # the node of a CallAgent: this rank's own agent, over its Unix socket


class Effect(Generic[R]):
    """Something that a performer does; ``R`` is the type of its result."""

    __slots__ = ()


Routine = Generator[Effect[Any], Any, R]


def perform(effect: Effect[R]) -> Routine[R]:
    """Yield one effect and return its result with the right type: ``x = yield from perform(e)``."""
    result: R = yield effect
    return result


# -- agents ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallAgent(Effect[A], Generic[M, A]):
    """Send one request to an agent and wait for its answer.

    Attributes:
        node: whose agent; ``OWN`` for this rank's own.
        patience_s: how long the answer may take beyond what the verb itself is known to take.

    Raises the agent's own error, ``RequestRefused``, or ``AgentUnreachable``.
    """

    verb: Verb[M, A]
    message: M
    node: str
    patience_s: float


@dataclass(frozen=True, slots=True)
class CallAgents(Effect[dict[str, "A | EcckptError | OSError"]], Generic[M, A]):
    """Send one request to many agents at once: the only way to ask all agents.

    The result maps each node to its answer or to its error, in the order of ``nodes``.
    """

    verb: Verb[M, A]
    message: M
    nodes: Sequence[str]
    patience_s: float


@dataclass(frozen=True, slots=True)
class PingAgent(Effect[None]):
    """Ask this rank's own agent for a sign of life; raises ``AgentUnreachable`` without one."""

    patience_s: float


@dataclass(frozen=True, slots=True)
class ReviveAgent(Effect[None]):
    """Start this node's agent again if none answers, as the node it was."""


# -- the ranks' store: raises SaveFailed where it cannot be reached -------------------------------


@dataclass(frozen=True, slots=True)
class StoreAdd(Effect[int]):
    """Add to a counter that starts at 0, atomically; the result is its new value."""

    key: str
    amount: int


@dataclass(frozen=True, slots=True)
class StoreSubtract(Effect[bool]):
    """Subtract from a counter unless it equals ``unless``, atomically; False if it does."""

    key: str
    amount: int
    unless: int


@dataclass(frozen=True, slots=True)
class StoreAgree(Effect[str]):
    """Set a text unless one is set; the result is the text that the first caller set."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class StorePut(Effect[None]):
    """Set a value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class StoreGet(Effect["bytes | None"]):
    """The value of a key; None if it is not set."""

    key: str


@dataclass(frozen=True, slots=True)
class StoreDrop(Effect[None]):
    """Remove a key."""

    key: str


@dataclass(frozen=True, slots=True)
class StoreWait(Effect[None]):
    """Wait until a key is set, at most ``timeout_s``; does not say which of the two happened."""

    key: str
    timeout_s: float


Decide = Callable[[list[bytes]], "Routine[Sequence[bytes]]"]


@dataclass(frozen=True, slots=True)
class RankExchange(Effect[bytes]):
    """All ranks give a payload, rank 0 turns them into one answer per rank, each rank gets its own.

    Every rank performs it with the same ``tag``, once. An ``EcckptError`` that ``decide`` raises on
    rank 0 is raised on all ranks. Raises ``RankTimeout`` after ``timeout_s``.
    """

    tag: str
    payload: bytes
    decide: Decide
    timeout_s: float


# -- time and concurrency -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Now(Effect[float]):
    """Seconds on a clock that never goes back."""


@dataclass(frozen=True, slots=True)
class Until(Effect[bool]):
    """Wait until a condition over the client's own attributes holds; False after ``timeout_s``.

    The performer evaluates ``condition`` again whenever a routine of this client has run.
    """

    condition: Callable[[], bool]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Compute(Effect[R], Generic[R]):
    """Call a pure function whose time grows with the number of ranks.

    The threads of a client share one lock between effects, ``save()`` among them. A routine beside
    the training must not hold it for long, so it has such work done as an effect. The function may
    read only values that no other routine changes.
    """

    function: Callable[[], R]


class Lane(Enum):
    """Routines in one lane run one after another, in the order in which they were queued."""

    FOLLOW = "ecckpt-watch"  # sees saves through
    RESERVE = "ecckpt-reserve"  # reserves slots ahead
    ARCHIVE = "ecckpt-store"  # brings committed saves to the disks


@dataclass(frozen=True, slots=True)
class Queue(Effect[None]):
    """Run a routine in the background, in a lane, and go on at once."""

    lane: Lane
    routine: Routine[None]


class Task(Protocol[R_co]):
    """A routine that runs beside the one that started it; awaited by ``Join``."""


@dataclass(frozen=True, slots=True)
class Start(Effect["Task[R]"], Generic[R]):
    """Run a routine beside this one. Raises ``OSError`` where no thread can be started."""

    routine: Routine[R]


@dataclass(frozen=True, slots=True)
class Join(Effect[R], Generic[R]):
    """The result of a started routine, or the error that it raised.

    Raises ``TimeoutError`` (an ``OSError``) after ``timeout_s``.
    """

    task: Task[R]
    timeout_s: float


# -- what people and tools see --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report(Effect[None]):
    """Something happened that a log, a caller or a test may want to know (client/events.py)."""

    event: Event


@dataclass(frozen=True, slots=True)
class FinishHandle(Effect[None]):
    """Mark a handle as committed, or as failed with ``error``, and wake those who wait for it."""

    handle: SaveHandle
    error: EcckptError | None


# The time by the node's clock, and by one that never jumps (protocol/tracing.py).
Moment = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mark(Effect[Moment]):
    """The time, as traces need it."""


@dataclass(frozen=True, slots=True)
class TraceSpan(Effect[None]):
    """Note a phase of a shard that began at a mark and ends now."""

    name: str
    shard: ShardId
    began: Moment


@dataclass(frozen=True, slots=True)
class TakeSpans(Effect[tuple[Span, ...]]):
    """All spans noted so far, once."""


# -- shorthands -----------------------------------------------------------------------------------


def call_own(verb: Verb[M, A], message: M, patience_s: float) -> Routine[A]:
    """Ask this rank's own agent."""
    return (yield from perform(CallAgent(verb, message, OWN, patience_s)))


def call_all(
    verb: Verb[M, A], message: M, nodes: Sequence[str], patience_s: float
) -> Routine[dict[str, A | EcckptError | OSError]]:
    """Ask many agents at once."""
    return (yield from perform(CallAgents(verb, message, nodes, patience_s)))


def until(condition: Callable[[], bool], timeout_s: float) -> Routine[bool]:
    """Wait for a condition; False after ``timeout_s``."""
    return (yield from perform(Until(condition, timeout_s)))


def sleep(seconds: float) -> Routine[None]:
    """Let time pass."""
    yield from perform(Until(_never, seconds))


def _never() -> bool:
    return False


def traced(name: str, shard: ShardId, routine: Routine[R]) -> Routine[R]:
    """Run a routine and note how long it takes, also if it raises."""
    began = yield from perform(Mark())
    try:
        result = yield from routine
    except Exception:
        yield from perform(TraceSpan(name, shard, began))
        raise
    yield from perform(TraceSpan(name, shard, began))
    return result


def answers_of(answers: Mapping[str, Any], kind: type[R]) -> list[R]:
    """Those of ``CallAgents``' results that are of this class, in their order."""
    return [answer for answer in answers.values() if isinstance(answer, kind)]
