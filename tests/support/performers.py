"""Performs routines one effect at a time, as a test schedules them: no threads, sockets or sleeps.

A ``Performer`` is one client: a rank. Its store and clock may be shared with other ranks. What an
agent answers is in ``answers``; any other effect may be given a result in ``on``. ``drive`` runs
the routines of several clients in whatever order a test chooses, ``explore`` in all orders.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ecckpt.client import effects, state_effects
from ecckpt.client.effects import Effect, Lane, Routine
from ecckpt.client.events import Event, Message
from ecckpt.errors import AgentUnreachable
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.verbs import WATCH, Verb


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0


class Store:
    """The ranks' store: counters and values."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        self.counters[key] = self.counters.get(key, 0) + amount
        return self.counters[key]

    def subtract(self, key: str, amount: int, unless: int) -> bool:
        count = self.counters.get(key, 0)
        if count != unless:
            self.counters[key] = count - amount
        return count != unless

    def agree(self, key: str, text: str) -> str:
        return self.values.setdefault(key, text.encode()).decode()

    def drop(self, key: str) -> None:
        self.counters.pop(key, None)
        self.values.pop(key, None)

    def names(self) -> set[str]:
        return self.counters.keys() | self.values.keys()


STORE_EFFECTS = (
    effects.StoreAdd,
    effects.StoreSubtract,
    effects.StoreAgree,
    effects.StorePut,
    effects.StoreGet,
    effects.StoreDrop,
    effects.StoreWait,
)


class Running:
    """A routine that has stopped at ``effect``, or has ended."""

    def __init__(self, performer: Performer, routine: Routine[Any]) -> None:
        self.performer, self.routine = performer, routine
        self.effect: Effect[Any] | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.since_s = 0.0
        self._go_on(lambda: next(routine))

    @property
    def due_s(self) -> float:
        """When the effect ends even if what it waits for does not come; infinity: never."""
        effect = self.effect
        if _is_watch(effect):
            return self.since_s + effect.message.wait_s
        limit_s = getattr(effect, "timeout_s", getattr(effect, "patience_s", math.inf))
        if isinstance(effect, state_effects.ProveHome):
            limit_s = math.inf  # its patience is for one request, not for the proof
        return self.since_s + limit_s

    def is_ready(self) -> bool:
        return self.performer.can_perform(self.effect) or self.performer.now_s >= self.due_s

    def step(self) -> None:
        """Perform the effect and run to the next one."""
        assert self.effect is not None
        try:
            late = not self.performer.can_perform(self.effect)
            result = self.performer.perform(self.effect, late=late)
        except BaseException as error:
            self.throw(error)
        else:
            self._go_on(lambda: self.routine.send(result))

    def throw(self, error: BaseException) -> None:
        """Raise an error in place of the effect."""
        self._go_on(lambda: self.routine.throw(error))

    def result(self) -> Any:
        assert self.ended, f"waits for {self.effect}"
        if self.error is not None:
            raise self.error
        return self.value

    def _go_on(self, act: Callable[[], Effect[Any]]) -> None:
        try:
            self.effect = act()
            self.since_s = self.performer.now_s
        except StopIteration as end:
            self.effect, self.value, self.ended = None, end.value, True
        except BaseException as error:
            self.effect, self.error, self.ended = None, error, True
        if self.ended:
            self.performer.ended(self)


class Performer:
    """One client.

    ``answers`` maps a verb to an answer, an error, a list of these (the last one stays), or a
    function of the ``CallAgent``. ``gates``: effects of this verb or class wait until this is true.
    ``fail`` may return an error to be raised in place of any effect.
    """

    def __init__(self, store: Store | None = None, clock: Clock | None = None) -> None:
        self.store, self.clock = store or Store(), clock or Clock()
        self.late_s = 0.0  # how far this client's clock is ahead of the others'
        self.answers: dict[Verb[Any, Any], Any] = {}
        self.on: dict[type[Effect[Any]], Any] = {}
        self.gates: dict[object, Callable[[Any], bool]] = {}
        self.fail: Callable[[Effect[Any]], BaseException | None] = lambda effect: None
        self.done: list[Effect[Any]] = []
        self.events: list[Event] = []
        self.running: list[Running] = []
        self._lanes: dict[Lane, deque[Routine[None]]] = {lane: deque() for lane in Lane}
        self._busy: dict[Lane, Running] = {}
        self.lane_errors: list[BaseException] = []
        store = self.store
        # The other effects do nothing, and have no result.
        self._acts: dict[type[Effect[Any]], Callable[[Any], Any]] = {
            effects.CallAgent: self._answer_of,
            effects.CallAgents: self._answers_of,
            effects.Until: lambda effect: True,
            effects.Join: lambda effect: effect.task.result(),
            effects.Now: lambda effect: self.now_s,
            effects.Mark: lambda effect: (self.now_s, self.now_s),
            effects.Queue: lambda effect: self._queue(effect.lane, effect.routine),
            effects.Start: lambda effect: self.begin(effect.routine),
            effects.Compute: lambda effect: effect.function(),
            state_effects.SlotExists: lambda effect: True,
            effects.TakeSpans: lambda effect: (),
            effects.Report: lambda effect: self.events.append(effect.event),
            effects.FinishHandle: lambda effect: effect.handle.finish(effect.error, self.now_s),
            state_effects.LoadState: lambda effect: effect.load(),
            effects.StoreAdd: lambda effect: store.add(effect.key, effect.amount),
            effects.StoreSubtract: lambda effect: store.subtract(
                effect.key, effect.amount, effect.unless
            ),
            effects.StoreAgree: lambda effect: store.agree(effect.key, effect.text),
            effects.StorePut: lambda effect: store.values.update({effect.key: effect.value}),
            effects.StoreGet: lambda effect: store.values.get(effect.key),
            effects.StoreDrop: lambda effect: store.drop(effect.key),
        }

    @property
    def now_s(self) -> float:
        return self.clock.now_s + self.late_s

    # -- what a test does ---------------------------------------------------------------------

    def begin(self, routine: Routine[Any]) -> Running:
        running = Running(self, routine)
        if not running.ended:
            self.running.append(running)
        return running

    def run(self, routine: Routine[Any]) -> Any:
        """To its end, together with whatever runs in the background."""
        running = self.begin(routine)
        drive([self], lambda: running.ended)
        return running.result()

    def settle(self) -> None:
        """Run everything until it has ended, or waits for what never comes."""
        drive(
            [self],
            lambda: not any(each.due_s < math.inf or each.is_ready() for each in self.running),
        )

    def calls(self, *verbs: Verb[Any, Any]) -> list[effects.CallAgent[Any, Any]]:
        """What agents were asked for."""
        return [
            each for each in self.done if isinstance(each, effects.CallAgent) and each.verb in verbs
        ]

    def log(self) -> list[str]:
        """Lines of the log."""
        return [event.text for event in self.events if isinstance(event, Message)]

    # -- performing ---------------------------------------------------------------------------

    def can_perform(self, effect: Effect[Any] | None) -> bool:
        key = effect.verb if isinstance(effect, effects.CallAgent) else type(effect)
        if key in self.gates:
            return self.gates[key](effect)
        match effect:
            case effects.Until(condition, _):
                return condition()
            case effects.StoreWait(key, _):
                return key in self.store.values
            case effects.Join(task, _):
                return task.ended
        return True

    def perform(self, effect: Effect[Any], *, late: bool) -> Any:
        """``late``: what it waits for has not come by its time-out."""
        self.done.append(effect)
        error = self.fail(effect)
        if error is not None:
            raise error
        kind = type(effect)
        if kind in self.on:
            return _answer(self.on[kind], effect)
        if late and not _is_watch(effect):
            return _late(effect)
        act = self._acts.get(kind)
        return act(effect) if act else None

    def ended(self, running: Running) -> None:
        if running in self.running:
            self.running.remove(running)
        for lane, busy in list(self._busy.items()):
            if busy is running:
                self._end_of(lane, running)

    def _answer_of(self, effect: effects.CallAgent[Any, Any]) -> Any:
        return _answer(self.answers.get(effect.verb, Done()), effect)

    def _answers_of(self, effect: effects.CallAgents[Any, Any]) -> dict[str, Any]:
        verb, message, patience_s = effect.verb, effect.message, effect.patience_s
        return {
            node: self._attempt(effects.CallAgent(verb, message, node, patience_s))
            for node in effect.nodes
        }

    def _attempt(self, effect: effects.CallAgent[Any, Any]) -> Any:
        try:
            return self._answer_of(effect)
        except Exception as error:
            return error

    def _queue(self, lane: Lane, routine: Routine[None]) -> None:
        self._lanes[lane].append(routine)
        self._next_of(lane)

    def _next_of(self, lane: Lane) -> None:
        if lane not in self._busy and self._lanes[lane]:
            running = self.begin(self._lanes[lane].popleft())
            if running.ended:
                self._end_of(lane, running)
            else:
                self._busy[lane] = running

    def _end_of(self, lane: Lane, running: Running) -> None:
        self._busy.pop(lane, None)
        if running.error is not None:
            self.lane_errors.append(running.error)
        self._next_of(lane)


def _is_watch(effect: Any) -> bool:
    """An agent answers this one without news once it has waited long enough."""
    return isinstance(effect, effects.CallAgent) and effect.verb is WATCH


def _late(effect: Effect[Any]) -> Any:
    """What an effect results in that has waited in vain."""
    match effect:
        case effects.Until():
            return False
        case effects.Join():
            raise TimeoutError
        case effects.CallAgent() | effects.PingAgent():
            raise AgentUnreachable("here", "no answer")
    return None


def _answer(answer: Any, effect: Effect[Any]) -> Any:
    if isinstance(answer, list):
        answer = answer.pop(0) if len(answer) > 1 else answer[0]
    if callable(answer):
        answer = answer(effect)
    if isinstance(answer, BaseException):
        raise answer
    return answer


# -- several at once ------------------------------------------------------------------------------

Choose = Callable[[int], int]


def drive(
    performers: Sequence[Performer],
    done: Callable[[], bool],
    choose: Choose = lambda count: 0,
    *,
    among: tuple[type, ...] = (),
) -> None:
    """Perform one effect after another until ``done``; time passes when nothing else can happen.

    ``choose`` says which of the routines goes on, of those that are at an effect of ``among``;
    effects of other kinds change nothing that other routines see, and are performed at once.
    """
    while not done():
        ready = ready_of(performers)
        at_once = [each for each in ready if not isinstance(each.effect, among)] if among else []
        if at_once:
            at_once[0].step()
        elif ready:
            ready[choose(len(ready))].step()
        else:
            pass_time(performers)


def ready_of(performers: Sequence[Performer]) -> list[Running]:
    return [each for performer in performers for each in performer.running if each.is_ready()]


def pass_time(performers: Sequence[Performer]) -> None:
    """Until the next routine has waited long enough."""
    waiting = [each for performer in performers for each in performer.running]
    wait_s = min((each.due_s - each.performer.now_s for each in waiting), default=math.inf)
    assert wait_s < math.inf, f"all wait for ever: {[each.effect for each in waiting]}"
    clock = performers[0].clock
    # More than the rounding of a sum, or time would stand still.
    clock.now_s += max(wait_s, 1e-9 * clock.now_s)


def explore(scenario: Callable[[Choose], None], *, most: int = 100_000) -> int:
    """Run a scenario with all sequences of choices that it can make; how many there are."""
    path: list[int] = []
    for count in range(1, most + 1):
        taken: list[tuple[int, int]] = []

        def choose(of: int, taken: list[tuple[int, int]] = taken, path: list[int] = path) -> int:
            at = path[len(taken)] if len(taken) < len(path) else 0
            taken.append((at, of))
            return at

        scenario(choose)
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        if not taken:
            return count
        path = [at for at, _ in taken[:-1]] + [taken[-1][0] + 1]
    raise AssertionError(f"more than {most} sequences of choices")
