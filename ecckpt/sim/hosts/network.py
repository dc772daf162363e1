"""Messages between actors of hosts: late, lost, out of order, twice, or not at all for a while."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ecckpt.errors import AgentUnreachable, EcckptError
from ecckpt.sim.faults import NONE
from ecckpt.sim.world import Actor, Process, Wait, World

_LEAST_S = 0.0001
_MEAN_S = 0.001
_LOCAL_S = 0.00005

Answer = Callable[[Any], None]
Handler = Callable[[Answer], None]


class SimulatedNetwork:
    """The links of a cluster. ``faults`` apply to what is sent from now on."""

    def __init__(self, world: World) -> None:
        self.faults = NONE
        self.injected = 0
        self._world = world
        self._cut: list[tuple[frozenset[str], bool]] = []

    # -- partitions -------------------------------------------------------------------------------

    def cut(self, nodes: frozenset[str], *, one_way: bool) -> None:
        """Nothing passes between these nodes and the others; one way: nothing comes from them."""
        self._cut.append((nodes, one_way))

    def heal(self, nodes: frozenset[str]) -> None:
        """Those nodes are reached again."""
        self._cut = [each for each in self._cut if each[0] is not nodes]

    def mend(self) -> None:
        """All nodes are reached again."""
        self._cut.clear()

    def passes(self, source: str, target: str) -> bool:
        """Whether a partition lets messages through."""
        for nodes, one_way in self._cut:
            if (source in nodes) != (target in nodes) and (not one_way or source in nodes):
                return False
        return True

    # -- messages ---------------------------------------------------------------------------------

    def delay_s(self, source: str, target: str) -> float | None:
        """How long a message takes; None if it is lost."""
        if source == target:
            return _LOCAL_S
        faults, world = self.faults, self._world
        if self._cut and not self.passes(source, target):
            return None
        if world.chance(faults.drop):
            self.injected += 1
            return None
        if world.chance(faults.late):
            self.injected += 1
            return world.rng.uniform(_MEAN_S, faults.late_s)
        return _LEAST_S + world.rng.expovariate(1 / (_MEAN_S + faults.jitter_s))

    def send(self, source: str, target: str, arrive: Callable[..., None], *arguments: Any) -> float:
        """Send one message, or two of it; returns how long it takes, infinity if it is lost."""
        delay_s = self.delay_s(source, target)
        if delay_s is None:
            return math.inf
        self._world.after(delay_s, arrive, *arguments)
        if source != target and self._world.chance(self.faults.duplicate):
            self.injected += 1
            self._world.after(delay_s + self._world.rng.uniform(0, 1), arrive, *arguments)
        return delay_s

    def call(
        self,
        source: str,
        target: str,
        find: Callable[[], Actor | None],
        handle: Handler,
        *,
        timeout_s: float,
    ) -> Wait:
        """A request and its answer; throws ``AgentUnreachable`` if there is none in time.

        ``find`` is who listens at the target when the request arrives, None if nobody does.
        """
        route = (source, target)
        return lambda process: _Call(
            self, process, route, find, handle, timeout_s=timeout_s
        ).begin()


class _Call:
    """One request on its way, until it is answered or given up."""

    __slots__ = ("_deadline_s", "_find", "_handle", "_network", "_process", "_route", "_world")

    def __init__(
        self,
        network: SimulatedNetwork,
        process: Process,
        route: tuple[str, str],
        find: Callable[[], Actor | None],
        handle: Handler,
        *,
        timeout_s: float,
    ) -> None:
        self._network = network
        self._world = process.actor.world
        self._process: Process | None = process
        self._route = route
        self._find = find
        self._handle = handle
        self._deadline_s = self._world.now_s + timeout_s

    def begin(self) -> None:
        source, target = self._route
        self._expect(self._network.send(source, target, self._arrive))

    def _arrive(self) -> None:
        actor = self._find()
        if actor is None:
            self._end(AgentUnreachable(self._route[1], "connection refused"))
            return
        if actor.stalled:
            self._time_out()
        actor.reach(self._handled, actor)

    def _handled(self, actor: Actor) -> None:
        actor.calls[self] = None
        self._handle(lambda value: self._answer(actor, value))

    def _answer(self, actor: Actor, value: Any) -> None:
        actor.calls.pop(self, None)
        if self._process is None:
            return
        source, target = self._route
        self._expect(self._network.send(target, source, self._end, value))

    def reset(self) -> None:
        """Who should have answered has died."""
        self._end(AgentUnreachable(self._route[1], "connection reset"))

    def _expect(self, delay_s: float) -> None:
        if self._world.now_s + delay_s > self._deadline_s:
            self._time_out()

    def _time_out(self) -> None:
        left_s = max(0.0, self._deadline_s - self._world.now_s)
        error = AgentUnreachable(self._route[1], "no answer in time")
        self._world.after(left_s, self._end, error)

    def _end(self, value: Any) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.resume(value)


def answering(look: Callable[[Any], Any]) -> Callable[[Any, Answer], None]:
    """A handler that answers at once with what it sees, or with the error that it meets."""

    def handle(actor: Any, answer: Answer) -> None:
        try:
            answer(look(actor))
        except EcckptError as error:
            answer(error)

    return handle
