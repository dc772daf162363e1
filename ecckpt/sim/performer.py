"""Performs the client's effects in simulated time, with simulated messages and bytes.

The counterpart of client/threads.py, for ``Trainer``; effects on the state are in sim/state.py, the
counterpart of client/state_performer.py. What a rank does and when is decided in
client/. As with the real performer, the code of a routine between two effects is atomic.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from ecckpt.agent.core.fetch import slot_of
from ecckpt.client.effects import (
    OWN,
    CallAgent,
    CallAgents,
    Compute,
    Effect,
    FinishHandle,
    Join,
    Lane,
    Mark,
    Now,
    PingAgent,
    Queue,
    RankExchange,
    Report,
    ReviveAgent,
    Routine,
    Start,
    StoreAdd,
    StoreAgree,
    StoreDrop,
    StoreGet,
    StorePut,
    StoreSubtract,
    StoreWait,
    TakeSpans,
    TraceSpan,
    Until,
)
from ecckpt.client.state_effects import CheckState, IsRelaid, LoadState, PlanState, Snapshot
from ecckpt.errors import AgentUnreachable, EcckptError
from ecckpt.protocol.verbs import BEGIN, GUARD, INVENTORY, SLOT, WATCH, Verb
from ecckpt.sim.hosts.agent import SimulatedAgent
from ecckpt.sim.hosts.host import SimulatedHost
from ecckpt.sim.hosts.network import Answer, answering
from ecckpt.sim.observer import Observer
from ecckpt.sim.session import Session
from ecckpt.sim.state import SimulatedState
from ecckpt.sim.world import Actor, Process, Steps, Wait, sleep, together

R = TypeVar("R")

_START_AGENT_S = 0.3  # how long a new agent takes until it answers
_AGENT_UP_S = 30.0  # how long a rank waits for it, as client/cluster/local_agent.py does

Read = Callable[[SimulatedAgent, Any], object]

# Requests that an agent answers from what its core knows, without an event.
_READS: dict[Verb[Any, Any], Read] = {
    INVENTORY: lambda agent, run: agent.core.records.get(run).inventory(agent.node),
    SLOT: lambda agent, shard: slot_of(
        agent.core.home(shard).header, agent.core.home(shard).region
    ),
}


@dataclass(eq=False, slots=True)
class _Waiter:
    """A process that performs ``Until``: it waits for a condition."""

    condition: Callable[[], bool]
    process: Process


@dataclass(eq=False, slots=True)
class _SimulatedTask:
    """A routine that ``Start`` has started; ``value`` is its result or error once done."""

    done: bool = False
    value: Any = None
    waiting: list[Process] = field(default_factory=list)


class SimulatedPerformer:
    """Performs the routines of one rank, in processes of its actor."""

    def __init__(self, actor: Actor, session: Session, rank: int, host: SimulatedHost) -> None:
        self._actor, self._session, self._rank, self._host = actor, session, rank, host
        self._world = actor.world
        self._state = SimulatedState(session, rank, host)
        self._observer = Observer(session, host)
        self._waiters: list[_Waiter] = []
        self._lanes: dict[Lane, deque[Routine[None]]] = {lane: deque() for lane in Lane}
        self._running: set[Lane] = set()
        # Effects on the ranks' store, those that take no simulated time, and all others.
        self._in_store = _store_effects(session)
        self._at_once: dict[type[Effect[Any]], Callable[[Any], Any]] = self._state.at_once | {
            Compute: lambda effect: effect.function(),
            Now: lambda effect: self._world.now_s,
            Mark: lambda effect: (self._world.now_s, self._world.now_s),
            Queue: lambda effect: self._enqueue(effect.lane, effect.routine),
            Start: lambda effect: self._start(effect.routine),
            Report: lambda effect: self._observer.reported(effect.event),
            FinishHandle: lambda effect: effect.handle.finish(effect.error, self._world.now_s),
            TakeSpans: lambda effect: (),
            TraceSpan: lambda effect: None,
            CheckState: lambda effect: lambda: self._observer.loads(rank, effect.brought),
            LoadState: lambda effect: effect.load(),
            IsRelaid: lambda effect: False,
        }
        self._in_steps: dict[type[Effect[Any]], Callable[[Any], Steps]] = self._state.in_steps | {
            CallAgent: self._call,
            CallAgents: self._call_all,
            PingAgent: self._ping,
            ReviveAgent: self._revive,
            RankExchange: self._exchange,
            StoreWait: self._store_wait,
            Until: self._until,
            Join: self._join,
        }

    def run(self, routine: Routine[R]) -> Steps:
        """Perform a routine to its end; return its result or raise its error."""
        result: Any = None
        error: Exception | None = None
        while True:
            try:
                effect = routine.send(result) if error is None else routine.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                # The code between two effects may have changed what an ``Until`` waits for.
                self._wake_waiters()
            result = error = None
            try:
                result = yield from self._perform(effect)
            except (EcckptError, OSError) as caught:
                error = caught

    def _perform(self, effect: Effect[Any]) -> Steps:
        kind = type(effect)
        if kind in self._at_once:
            return self._at_once[kind](effect)
        if kind in self._in_store:
            act = self._in_store[kind]
            return (yield from self._session.store(self._host, lambda: act(effect)))
        return (yield from self._in_steps[kind](effect))

    def plan(self, step: int) -> Snapshot:
        """Plan the snapshot of a step, for a save by ticket."""
        return self._state.plan(PlanState(step, None))

    # -- agents -----------------------------------------------------------------------------------

    def _call(self, effect: CallAgent[Any, Any]) -> Steps:
        if effect.verb is GUARD and not self._session.rules.guarded:
            raise AgentUnreachable(self._host.node, "guard requests are dropped in this run")
        node = self._host.node if effect.node == OWN else effect.node
        return (yield self._request(effect.verb, effect.message, node, effect.patience_s))

    def _call_all(self, effect: CallAgents[Any, Any]) -> Steps:
        self._observer.asks(effect.verb is BEGIN)
        nodes = effect.nodes
        asked = [
            self._request(effect.verb, effect.message, node, effect.patience_s) for node in nodes
        ]
        return dict(zip(nodes, (yield together(asked)), strict=True))

    def _request(self, verb: Verb[Any, Any], message: Any, node: str, patience_s: float) -> Wait:
        timeout_s = patience_s + verb.extra_s(message)
        host, source = self._session.hosts[node], self._host.node
        read = _READS.get(verb)
        if read is not None:
            return host.call(source, answering(lambda agent: read(agent, message)), timeout_s)
        if verb is WATCH:

            def watch(agent: SimulatedAgent, answer: Answer) -> None:
                agent.watch(message, answer)

            return host.call(source, watch, timeout_s)
        return host.ask(source, message, timeout_s)

    def _ping(self, effect: PingAgent) -> Steps:
        handle = answering(lambda agent: agent.node)
        yield self._host.call(self._host.node, handle, effect.patience_s)

    def _revive(self, effect: ReviveAgent) -> Steps:
        """Start an agent if none runs, as ``find_or_start`` does, and wait for it.

        A stalled agent keeps its folder, so no new one is started.
        """
        del effect
        if self._host.agent is None:
            yield sleep(_START_AGENT_S)
            self._host.start()
        yield from self._ping(PingAgent(_AGENT_UP_S))

    # -- other ranks ------------------------------------------------------------------------------

    def _exchange(self, effect: RankExchange) -> Steps:
        def decide(payloads: list[bytes]) -> Steps:
            return (yield from self.run(effect.decide(payloads)))

        exchange = self._session.exchange(
            self._host,
            self._rank,
            effect.tag,
            effect.payload,
            decide,
            timeout_s=effect.timeout_s,
        )
        return (yield from exchange)

    def _store_wait(self, effect: StoreWait) -> Steps:
        yield self._session.wait_for(effect.key, effect.timeout_s)

    # -- time and concurrency ---------------------------------------------------------------------

    def _until(self, effect: Until) -> Steps:
        def begin(process: Process) -> None:
            waiter = _Waiter(effect.condition, process)
            self._waiters.append(waiter)
            if not math.isinf(effect.timeout_s):
                self._world.after(effect.timeout_s, self._time_out, waiter)

        return effect.condition() or (yield begin)

    def _time_out(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            waiter.process.resume(False)

    def _wake_waiters(self) -> None:
        for waiter in [waiter for waiter in self._waiters if waiter.condition()]:
            self._waiters.remove(waiter)
            # As an event of its own: this may run in the middle of another process's step.
            self._world.after(0.0, waiter.process.resume, True)

    def _enqueue(self, lane: Lane, routine: Routine[None]) -> None:
        self._lanes[lane].append(routine)
        if lane not in self._running:
            self._running.add(lane)
            self._actor.spawn(self._run_lane(lane))

    def _run_lane(self, lane: Lane) -> Steps:
        """Perform the routines of a lane, one after another, until none is queued."""
        waiting = self._lanes[lane]
        while waiting:
            try:
                yield from self.run(waiting.popleft())
            except (EcckptError, OSError):
                continue  # the real performer's thread logs the error and goes on as well
        self._running.discard(lane)

    def _start(self, routine: Routine[Any]) -> _SimulatedTask:
        task = _SimulatedTask()

        def steps() -> Steps:
            try:
                return (yield from self.run(routine))
            except Exception as error:
                return error

        def ended(value: Any) -> None:
            task.done, task.value = True, value
            for process in task.waiting:
                process.resume(value)

        self._actor.spawn(steps(), ended=ended)
        return task

    def _join(self, effect: Join[Any]) -> Steps:
        task = cast(_SimulatedTask, effect.task)
        value = task.value if task.done else (yield task.waiting.append)
        if isinstance(value, Exception):
            raise value
        return value


def _store_effects(session: Session) -> dict[type[Effect[Any]], Callable[[Any], Any]]:
    return {
        StoreAdd: lambda effect: session.add(effect.key, effect.amount),
        StoreSubtract: lambda effect: session.subtract(effect.key, effect.amount, effect.unless),
        StoreAgree: lambda effect: session.agree(effect.key, effect.text),
        StorePut: lambda effect: session.put(effect.key, effect.value),
        StoreGet: lambda effect: session.values.get(effect.key),
        StoreDrop: lambda effect: session.drop(effect.key),
    }
