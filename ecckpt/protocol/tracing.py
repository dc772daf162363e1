"""Spans: how long the phases of saves and restores take. Kept for a while in each agent.

A rank sends its spans to its node's agent when a save or restore has ended; ``ecckpt trace``
collects them from all agents.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.trace import Span, Trace

KEPT = 4096  # spans of the last few hundred saves of a node


# Seconds by the node's clock, to place a span; and by a clock that never jumps, to measure it.
Moment = tuple[float, float]


def moment() -> Moment:
    """Now, by both clocks."""
    return time.time(), time.perf_counter()


class Tracer:
    """The last spans of one process. Thread-safe, because a deque's operations are atomic."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=KEPT)

    @contextmanager
    def span(self, name: str, shard: ShardId, index: int = HOME) -> Iterator[None]:
        """Record how long the block takes, also if it raises."""
        began = moment()
        try:
            yield
        finally:
            self.since(began, name, shard, index)

    def since(self, began: Moment, name: str, shard: ShardId, index: int = HOME) -> None:
        """Record a phase that ends now; for phases whose shard was not known when they began."""
        began_unix_s, began_s = began
        seconds = time.perf_counter() - began_s
        self._spans.append(
            Span(name=name, shard=shard, index=index, began_unix_s=began_unix_s, seconds=seconds)
        )

    def add_spans(self, spans: Iterable[Span]) -> None:
        """Add spans that another process recorded."""
        self._spans.extend(spans)

    def spans_of(self, run: str) -> tuple[Span, ...]:
        """The spans of a run, oldest first."""
        return tuple(span for span in list(self._spans) if span.shard.run == run)

    def take(self) -> tuple[Span, ...]:
        """Remove and return all spans."""
        taken = []
        while self._spans:
            taken.append(self._spans.popleft())
        return tuple(taken)


def chrome_trace(traces: Iterable[Trace]) -> dict[str, Any]:
    """The spans of several nodes in the format that chrome://tracing and Perfetto open.

    A node is shown as a process and each of its ranks as a thread. The agent is shown as one thread
    for each phase, because it does several things at once. Times are those of the nodes' clocks.
    """
    events: list[dict[str, Any]] = []
    for pid, trace in enumerate(sorted(traces, key=lambda each: each.node), start=1):
        events.append(_name("process_name", pid, 0, f"node {trace.node}"))
        rows = [(f"rank {span.shard.rank}", span) for span in trace.ranks]
        rows += [(f"agent: {span.name}", span) for span in trace.agent]
        threads = {name: tid for tid, name in enumerate(sorted({name for name, _ in rows}), 1)}
        events += [_name("thread_name", pid, tid, name) for name, tid in threads.items()]
        events += [_event(pid, threads[name], span) for name, span in rows]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(pid: int, tid: int, span: Span) -> dict[str, Any]:
    generation = span.shard.generation
    details: dict[str, Any] = {"rank": span.shard.rank, "generation": str(generation)}
    if span.index != HOME:
        details["fragment"] = span.index
    return {
        "ph": "X",
        "name": f"{span.name} {generation.step}",
        "cat": span.name,
        "pid": pid,
        "tid": tid,
        "ts": 1e6 * span.began_unix_s,
        "dur": 1e6 * span.seconds,
        "args": details,
    }
