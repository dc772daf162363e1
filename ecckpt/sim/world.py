"""Simulated time: one queue of events, one source of chance, and processes that wait for them.

A process is a generator. It yields waits (``sleep``, a call over the network, a wait for a value)
and is resumed with what came, or thrown the error that came instead. It belongs to an actor: while
that is stalled nothing reaches it, when it is dead nothing ever does.
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
    """The clock, in seconds; ``digest`` is a hash over all events so far."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.events = 0
        self.digest = seed & 0xFFFFFFFF
        self.rng = Random(seed)  # noqa: S311  (no secrets here)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Have something happen in a while; what is due at one time happens in this order."""
        self.events += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self.events, act, arguments))

    def run(self, until_s: float) -> None:
        """Let time pass until then."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now_s, order, act, arguments = heapq.heappop(queue)
            self.digest = zlib.crc32(_TIME.pack(self.now_s) + order.to_bytes(8), self.digest)
            act(*arguments)
        self.now_s = max(self.now_s, until_s)

    def note(self, text: str) -> None:
        """Let something else that was decided count in the digest."""
        self.digest = zlib.crc32(text.encode(), self.digest)

    def chance(self, probability: float) -> bool:
        """Draw whether something happens."""
        return probability > 0 and self.rng.random() < probability


class Actor:
    """A process of a host, in the operating system's sense: it can be stalled and killed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.calls: dict[Any, None] = {}  # that it has yet to answer
        self._stalls = 0
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def stalled(self) -> bool:
        """Whether it is stopped, and will go on."""
        return self._stalls > 0

    def reach(self, act: Callable[..., None], *arguments: Any) -> None:
        """Have something happen within it: now, when it goes on, or never."""
        if not self.alive:
            return
        if self._stalls:
            self._backlog.append((act, arguments))
        else:
            act(*arguments)

    def stall(self, stall_s: float) -> None:
        """Stop it for so long."""
        self._stalls += 1
        self.world.after(stall_s, self._go_on)

    def kill(self) -> None:
        """End it."""
        self.alive = False
        self._backlog.clear()
        for call in list(self.calls):
            self.world.after(0.0, call.reset)
        self.calls.clear()

    def spawn(self, steps: Steps, *, ended: Callable[[Any], None] | None = None) -> Process:
        """Run a generator within it; ``ended`` gets what it returns or the error it ends with."""
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
    """One generator on its way."""

    __slots__ = ("_ended", "_steps", "actor")

    def __init__(self, actor: Actor, steps: Steps, ended: Callable[[Any], None] | None) -> None:
        self.actor = actor
        self._steps = steps
        self._ended = ended

    def resume(self, value: Any) -> None:
        """Go on with what it waited for; an exception is thrown into it."""
        self.actor.reach(self._step, value)

    def _step(self, value: Any) -> None:
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
    """A process cannot go on, as far as the simulated program is concerned."""


def sleep(delay_s: float) -> Wait:
    """Wait so long."""
    return lambda process: process.actor.world.after(delay_s, process.resume, None)


def together(waits: list[Wait]) -> Wait:
    """Wait for all of these at once; yields the list of what came, errors among it."""

    def begin(process: Process) -> None:
        answers: list[Any] = [None] * len(waits)
        left = [len(waits)]

        def ended(at: int, value: Any) -> None:
            answers[at] = value
            left[0] -= 1
            if not left[0]:
                process.resume(answers)

        if not waits:
            process.resume([])
        for at, wait in enumerate(waits):
            process.actor.spawn(_one(wait), ended=lambda value, at=at: ended(at, value))  # type: ignore[misc]

    return begin


def _one(wait: Wait) -> Steps:
    try:
        return (yield wait)
    except Exception as error:
        return error
