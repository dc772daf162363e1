"""Simulated time: one queue of events, one source of chance, and processes that wait for events.

A process is a generator. It yields a wait (``sleep``, a call over the network, a wait for a value)
and is resumed with the result, or thrown the error that came instead. It belongs to an actor: while
the actor is stalled its processes do not run, and once it is dead they never run again.
"""

from __future__ import annotations

import heapq
import struct
import zlib
from collections.abc import Callable, Generator
from random import Random
from typing import Any

Wait = Callable[["Process"], None]
Steps = Generator[Wait, Any, Any]

_TIME = struct.Struct("<d")


class World:
    """The clock, in seconds, and the queue of events.

    ``digest`` is a hash over all events so far. ``rng`` is the only source of chance.
    """

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.events = 0
        self.digest = seed & 0xFFFFFFFF
        self.rng = Random(seed)  # noqa: S311  (not for secrets)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call ``act`` after a delay.

        Events due at the same time happen in the order of these calls.
        """
        self.events += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self.events, act, arguments))

    def run(self, until_s: float) -> None:
        """Let simulated time pass until ``until_s``."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now_s, order, act, arguments = heapq.heappop(queue)
            self.digest = zlib.crc32(_TIME.pack(self.now_s) + order.to_bytes(8), self.digest)
            act(*arguments)
        self.now_s = max(self.now_s, until_s)

    def note(self, text: str) -> None:
        """Add a decision that is no event to the digest."""
        self.digest = zlib.crc32(text.encode(), self.digest)

    def chance(self, probability: float) -> bool:
        """Draw whether something of this probability happens."""
        return probability > 0 and self.rng.random() < probability


class Actor:
    """A process of a simulated operating system: it can be stalled and killed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.calls: dict[Any, None] = {}  # requests that it has received and not answered
        self._stalls = 0  # stalls may overlap
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def stalled(self) -> bool:
        """Whether it is stopped and will go on."""
        return self._stalls > 0

    def reach(self, act: Callable[..., None], *arguments: Any) -> None:
        """Call ``act`` within the actor: now, when its stall ends, or never if it is dead."""
        if not self.alive:
            return
        if self._stalls:
            self._backlog.append((act, arguments))
        else:
            act(*arguments)

    def stall(self, stall_s: float) -> None:
        """Stop it for this long."""
        self._stalls += 1
        self.world.after(stall_s, self._go_on)

    def kill(self) -> None:
        """End it: its processes never run again, and requests it has not answered fail."""
        self.alive = False
        self._backlog.clear()
        # The operating system resets the connections of a killed process.
        for call in list(self.calls):
            self.world.after(0.0, call.reset)
        self.calls.clear()

    def spawn(self, steps: Steps, *, ended: Callable[[Any], None] | None = None) -> Process:
        """Run a generator within it; ``ended`` is given its result or its ``Failure``."""
        process = Process(self, steps, ended)
        process.resume(None)
        return process

    def _go_on(self) -> None:
        self._stalls -= 1
        if self._stalls or not self.alive:
            return
        backlog, self._backlog = self._backlog, []
        for act, arguments in backlog:
            self.reach(act, *arguments)


class Process:
    """One running generator of an actor."""

    __slots__ = ("_ended", "_steps", "actor")

    def __init__(self, actor: Actor, steps: Steps, ended: Callable[[Any], None] | None) -> None:
        self.actor = actor
        self._steps = steps
        self._ended = ended

    def resume(self, value: Any) -> None:
        """Go on with the result of a wait; an exception is thrown into the generator."""
        self.actor.reach(self._advance, value)

    def _advance(self, value: Any) -> None:
        steps = self._steps
        try:
            wait = steps.throw(value) if isinstance(value, Exception) else steps.send(value)
        except StopIteration as stop:
            if self._ended:
                self._ended(stop.value)
        except Failure as failure:
            if self._ended:
                self._ended(failure)
        else:
            wait(self)


class Failure(Exception):
    """A process ends because the simulated program failed, not because a promise was broken."""


def sleep(delay_s: float) -> Wait:
    """Wait for this long."""
    return lambda process: process.actor.world.after(delay_s, process.resume, None)


def together(waits: list[Wait]) -> Wait:
    """Wait for all of these at once; the result is the list of results and errors, in order."""

    def begin(process: Process) -> None:
        answers: list[Any] = [None] * len(waits)
        pending = [len(waits)]

        def ended(index: int, value: Any) -> None:
            answers[index] = value
            pending[0] -= 1
            if not pending[0]:
                process.resume(answers)

        if not waits:
            process.resume([])
        for index, wait in enumerate(waits):
            process.actor.spawn(
                _result_of(wait),
                ended=lambda value, index=index: ended(index, value),  # type: ignore[misc]
            )

    return begin


def _result_of(wait: Wait) -> Steps:
    """The result of one wait, or its error as a value."""
    try:
        return (yield wait)
    except Exception as error:
        return error
