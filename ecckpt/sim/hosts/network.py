"""Simulated messages between hosts: late, lost, reordered, duplicated or stopped by partitions.

Hosts, agents and ranks send requests with ``SimulatedNetwork.call``. The injector sets ``faults``
and makes partitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ecckpt.errors import AgentUnreachable, EcckptError
from ecckpt.sim.faults import NONE
from ecckpt.sim.world import Actor, Process, Wait, World

_LEAST_S = 0.0001
_MEAN_S = 0.001
_LOCAL_S = 0.00005  # on one host: never lost or late

Answer = Callable[[Any], None]
Handler = Callable[[Answer], None]


class SimulatedNetwork:
    """The links of a cluster.

    ``faults`` apply to the messages that are sent from now on; ``injected`` counts the faults.
    A node whose bulk data is blocked sends and gets no fragments, only small messages.
    """

    def __init__(self, world: World) -> None:
        self.faults = NONE
        self.injected = 0
        self._bulk: tuple[str, float] = ("", 0.0)  # the latest blocked node, and until when
        self._world = world
        self._partitions: list[tuple[frozenset[str], bool]] = []  # nodes, and whether one way

    # -- partitions -------------------------------------------------------------------------------

    def cut(self, nodes: frozenset[str], *, one_way: bool) -> None:
        """Partition these nodes from all others, in both directions.

        With ``one_way`` only messages from these nodes are lost.
        """
        self._partitions.append((nodes, one_way))

    def heal(self, nodes: frozenset[str]) -> None:
        """End one partition; ``nodes`` is the very object that ``cut`` was given."""
        # By identity: two partitions may have equal nodes, and each is healed on its own.
        self._partitions = [cut for cut in self._partitions if cut[0] is not nodes]

    def heal_all(self) -> None:
        """End all partitions."""
        self._partitions.clear()

    def passes(self, source: str, target: str) -> bool:
        """Whether no partition stops messages from ``source`` to ``target``."""
        for nodes, one_way in self._partitions:
            if (source in nodes) != (target in nodes) and (not one_way or source in nodes):
                return False
        return True

    def passes_bulk(self, source: str, target: str) -> bool:
        """Whether fragments get through between two nodes."""
        return source == target or self.bulk_blocked() not in (source, target)

    def block_bulk(self, node: str, until_s: float) -> None:
        """Block the bulk data of a node."""
        self._bulk = node, until_s

    def bulk_blocked(self, within_s: float = 0.0) -> str:
        """The node whose bulk data is blocked, or was within the last seconds; "" for none."""
        node, until_s = self._bulk
        return node if until_s > self._world.now_s - within_s else ""

    # -- messages ---------------------------------------------------------------------------------

    def delay_s(self, source: str, target: str) -> float | None:
        """Draw how long a message takes; None if it is lost."""
        if source == target:
            return _LOCAL_S
        faults, world = self.faults, self._world
        if self._partitions and not self.passes(source, target):
            return None
        if world.chance(faults.drop):
            self.injected += 1
            return None
        if world.chance(faults.late):
            self.injected += 1
            return world.rng.uniform(_MEAN_S, faults.late_s)
        return _LEAST_S + world.rng.expovariate(1 / (_MEAN_S + faults.jitter_s))

    def send(self, source: str, target: str, arrive: Callable[..., None], *arguments: Any) -> float:
        """Send one message, perhaps twice; return its delay, infinity if it is lost.

        ``arrive`` is called at every arrival.
        """
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
        find_actor: Callable[[], Actor | None],
        handle: Handler,
        *,
        timeout_s: float,
    ) -> Wait:
        """Send a request and wait for its answer.

        ``find_actor`` returns the actor that listens at the target when the request arrives, None
        if the connection is refused. ``handle`` then answers within that actor. Throws
        ``AgentUnreachable`` if no answer arrives within ``timeout_s``.
        """
        route = (source, target)
        return lambda process: _Call(
            self, process, route, find_actor, handle, timeout_s=timeout_s
        ).begin()


class _Call:
    """One request, until the first of: an answer, a refused or reset connection, its deadline.

    begin -> _arrive -> _handled (within the actor) -> _answer -> _end
    """

    __slots__ = (
        "_deadline_s",
        "_find_actor",
        "_handle",
        "_network",
        "_process",
        "_route",
        "_world",
    )

    def __init__(
        self,
        network: SimulatedNetwork,
        process: Process,
        route: tuple[str, str],
        find_actor: Callable[[], Actor | None],
        handle: Handler,
        *,
        timeout_s: float,
    ) -> None:
        self._network = network
        self._world = process.actor.world
        self._process: Process | None = process
        self._route = route
        self._find_actor = find_actor
        self._handle = handle
        self._deadline_s = self._world.now_s + timeout_s

    def begin(self) -> None:
        source, target = self._route
        self._check_deadline(self._network.send(source, target, self._arrive))

    def _arrive(self) -> None:
        actor = self._find_actor()
        if actor is None:
            self._end(AgentUnreachable(self._route[1], "connection refused"))
            return
        if actor.stalled:
            # The connection is open, so the caller waits until its deadline, not for ever.
            self._end_at_deadline()
        actor.reach(self._handled, actor)

    def _handled(self, actor: Actor) -> None:
        actor.calls[self] = None
        self._handle(lambda value: self._answer(actor, value))

    def _answer(self, actor: Actor, value: Any) -> None:
        actor.calls.pop(self, None)
        if self._process is None:
            return  # the caller has given up
        source, target = self._route
        self._check_deadline(self._network.send(target, source, self._end, value))

    def reset(self) -> None:
        """The actor that had to answer has died."""
        self._end(AgentUnreachable(self._route[1], "connection reset"))

    def _check_deadline(self, delay_s: float) -> None:
        """End the call at its deadline if a message with this delay would arrive later.

        A lost message has an infinite delay.
        """
        if self._world.now_s + delay_s > self._deadline_s:
            self._end_at_deadline()

    def _end_at_deadline(self) -> None:
        left_s = max(0.0, self._deadline_s - self._world.now_s)
        error = AgentUnreachable(self._route[1], "no answer in time")
        self._world.after(left_s, self._end, error)

    def _end(self, value: Any) -> None:
        # Only the first result counts: a duplicate or a late answer finds no process.
        process, self._process = self._process, None
        if process is not None:
            process.resume(value)


def answering(read: Callable[[Any], Any]) -> Callable[[Any, Answer], None]:
    """A handler that answers at once with what ``read`` returns, or with the error it raises."""

    def handle(actor: Any, answer: Answer) -> None:
        try:
            answer(read(actor))
        except EcckptError as error:
            answer(error)

    return handle
