"""Performs the client's effects in the training process: sockets, torch's store, threads.

One lock per client, the monitor, is held while a routine runs from one effect to the next, and not
while an effect is performed: so routines of one client may share plain attributes. ``Until`` waits
on the same lock, and is woken whenever a routine has run.

The caller's thread performs ``save()`` and ``restore()``; each lane has a thread of its own, and so
has each started routine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ecckpt.client.cluster.connections import Connections
from ecckpt.client.cluster.rendezvous import Meeting
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
from ecckpt.client.events import Event, Message, SaveFailure
from ecckpt.client.state_effects import SlotExists
from ecckpt.errors import EcckptError, SaveFailed
from ecckpt.memory.mapping import address_space_is_limited
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.fan_out import PARALLEL_CALLS, call_each
from ecckpt.protocol.tracing import Tracer, moment

_log = logging.getLogger(__name__)

R = TypeVar("R")


class ThreadPerformer:
    """Performs routines of one client; ``close`` ends its threads.

    Args:
        connections: the agents.
        tracer: where spans are noted.
        meeting: how the ranks meet; None where no routine needs other ranks.
        state: performs the effects on the state (client/state_performer.py).
        lanes: those that have a thread. They are started here, since a program that is ending can
            start none.
    """

    def __init__(
        self,
        connections: Connections,
        tracer: Tracer,
        state: dict[type[Effect[Any]], Callable[[Any], Any]],
        *,
        meeting: Meeting | None = None,
        lanes: Sequence[Lane] = (),
    ) -> None:
        self._connections, self._tracer, self._meeting = connections, tracer, meeting
        self._monitor = threading.Condition()
        # Kept for the thread that began it: lanes must not lose it in the middle of a question.
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        self._tasks: list[threading.Thread] = []
        self._lanes = {lane: _LaneThread(self, lane) for lane in lanes}
        self._perform: dict[type[Effect[Any]], Callable[[Any], Any]] = state | {
            CallAgent: self._call,
            CallAgents: self._call_all,
            PingAgent: lambda effect: self._client(OWN, effect.patience_s).node(),
            ReviveAgent: lambda effect: connections.revive_agent(),
            RankExchange: self._exchange,
            Now: lambda effect: time.monotonic(),
            Until: self._until,
            Compute: lambda effect: effect.function(),
            Queue: lambda effect: self._lanes[effect.lane].put(effect.routine),
            Start: self._start,
            Join: self._join,
            SlotExists: lambda effect: Path(effect.slot.path).exists(),
            Report: lambda effect: _log_event(effect.event),
            FinishHandle: lambda effect: effect.handle.finish(effect.error, time.monotonic()),
            Mark: lambda effect: moment(),
            TraceSpan: lambda effect: tracer.since(effect.began, effect.name, effect.shard),
            TakeSpans: lambda effect: tracer.take(),
        }
        if meeting is not None:
            self._perform |= self._store_effects(meeting)

    def run(self, routine: Routine[R]) -> R:
        """Perform a routine to its end in the caller's thread; its result, or what it raised."""
        result: Any = None
        error: BaseException | None = None
        while True:
            with self._monitor:
                try:
                    effect = routine.send(result) if error is None else routine.throw(error)
                except StopIteration as end:
                    value: R = end.value
                    return value
                finally:
                    # An error refers to this frame: together they would keep what the routine had.
                    result = error = None
                    self._monitor.notify_all()
            try:
                result = self._perform[type(effect)](effect)
            except BaseException as caught:
                error = caught

    @contextlib.contextmanager
    def calls_in_parallel(self) -> Iterator[None]:
        """Keep the threads that ask all agents from one effect of the caller to the next."""
        with ThreadPoolExecutor(PARALLEL_CALLS, thread_name_prefix="ask") as pool:
            self._pool = threading.get_ident(), pool
            try:
                yield
            finally:
                self._pool = None

    def change(self, act: Callable[[], None]) -> None:
        """Change attributes that routines share, from outside of any routine."""
        with self._monitor:
            act()
            self._monitor.notify_all()

    def close_lane(self, lane: Lane, timeout_s: float) -> bool:
        """End a lane's thread after the routines that it has; False if that takes longer.

        All routines have deadlines, but the store may not answer: it waits for a host that hangs.
        """
        return self._lanes[lane].close(timeout_s)

    def close(self) -> None:
        """End the other lanes and started routines, after what they are performing."""
        for lane in self._lanes.values():
            if lane.is_open:
                lane.close(None)
        for thread in self._tasks:
            thread.join()

    # -- agents -----------------------------------------------------------------------------------

    def _client(self, node: str, patience_s: float) -> AgentClient:
        agent = self._connections.agent if node == OWN else self._connections.peers[node]
        return replace(agent, timeout_s=patience_s)

    def _call(self, effect: CallAgent[Any, Any]) -> Any:
        return self._client(effect.node, effect.patience_s).call(effect.verb, effect.message)

    def _call_all(self, effect: CallAgents[Any, Any]) -> dict[str, Any]:
        def ask(node: str) -> Any:
            try:
                client = self._client(node, effect.patience_s)
                return client.call(effect.verb, effect.message)
            except (EcckptError, OSError) as error:
                return error

        nodes, kept = effect.nodes, self._pool
        if kept is not None and kept[0] == threading.get_ident():
            with contextlib.suppress(RuntimeError):  # a program that ends: the pool takes no more
                return dict(zip(nodes, kept[1].map(ask, nodes), strict=True))
        return dict(zip(nodes, call_each(nodes, ask), strict=True))

    # -- the ranks' store -------------------------------------------------------------------------

    def _store_effects(self, meeting: Meeting) -> dict[type[Effect[Any]], Callable[[Any], Any]]:
        acts: dict[type[Effect[Any]], Callable[[Any], Any]] = {
            StoreAdd: lambda effect: meeting.add(effect.key, effect.amount),
            StoreSubtract: lambda effect: meeting.subtract_unless(
                effect.key, effect.amount, value=effect.unless
            ),
            StoreAgree: lambda effect: meeting.agree(effect.key, effect.text),
            StorePut: lambda effect: meeting.put(effect.key, effect.value),
            StoreGet: lambda effect: meeting.peek(effect.key),
            StoreDrop: lambda effect: meeting.drop(effect.key),
            StoreWait: lambda effect: meeting.wait(effect.key, effect.timeout_s),
        }
        return {kind: _mapped(act) for kind, act in acts.items()}

    def _exchange(self, effect: RankExchange) -> bytes:
        assert self._meeting is not None

        def decide(payloads: list[bytes]) -> Sequence[bytes]:
            return self.run(effect.decide(payloads))

        return self._meeting.decide(effect.tag, effect.payload, decide, timeout_s=effect.timeout_s)

    # -- time and threads -------------------------------------------------------------------------

    def _until(self, effect: Until) -> bool:
        timeout_s = None if math.isinf(effect.timeout_s) else effect.timeout_s
        with self._monitor:
            return self._monitor.wait_for(effect.condition, timeout_s)

    def _start(self, effect: Start[Any]) -> Future[Any]:
        # Where the address space has a limit, a thread that finds no memory for its first step
        # would be waited for without an end.
        if address_space_is_limited():
            raise OSError("no thread is started where the address space is limited")
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self.run(effect.routine))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name="ecckpt-task", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(f"no thread can be started: {error}") from error
        self._tasks = [each for each in self._tasks if each.is_alive()] + [thread]
        return future

    def _join(self, effect: Join[Any]) -> Any:
        timeout_s = None if math.isinf(effect.timeout_s) else effect.timeout_s
        future: Any = effect.task
        return future.result(timeout_s)


class _LaneThread:
    """One thread that performs the routines of a lane, one after another."""

    def __init__(self, performer: ThreadPerformer, lane: Lane) -> None:
        self.is_open = True
        self._performer = performer
        self._work: queue.Queue[Routine[None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=lane.value, daemon=True)
        self._thread.start()

    def put(self, routine: Routine[None]) -> None:
        """Perform a routine after those that are queued."""
        self._work.put(routine)

    def close(self, timeout_s: float | None) -> bool:
        """End after what is queued; False if that takes longer."""
        self.is_open = False
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (routine := self._work.get()) is not None:
            try:
                self._performer.run(routine)
            except (EcckptError, OSError) as error:
                _log.warning("behind the training: %s", error)
            except Exception:
                _log.exception("background work failed")


def _mapped(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Torch's errors become ``SaveFailed``."""

    def in_store(effect: Any) -> Any:
        try:
            return act(effect)
        except EcckptError:
            raise
        except (RuntimeError, OSError) as error:
            first_line = str(error).split("\n", 1)[0]  # torch adds a stack of its own
            raise SaveFailed(f"the ranks' store: {first_line}") from error

    return in_store


def _log_event(event: Event) -> None:
    match event:
        case Message(level, text):
            _log.log(level, "%s", text)
        case SaveFailure(shard, error):
            _log.warning("step %d was not saved: %s", shard.generation.step, error)
        case _:
            _log.debug("%s", event)
