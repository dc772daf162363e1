"""Performs a ``GatherPlan`` with threads and deadlines: pulls, proves, and computes the rest.

For agents that bring a shard home and for processes that read from other nodes. What they have of
their own is how one range is pulled (``PullSpan``) and where its bytes belong (``ViewOf``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from ecckpt.coding.reed_solomon import Codec, Table
from ecckpt.errors import AgentUnreachable, CorruptFragment, EcckptError
from ecckpt.format.block_ranges import span_of
from ecckpt.format.fragment_file import Header
from ecckpt.memory.buffers import COPY_THREADS
from ecckpt.policy.gather_plan import (
    LEAST_PATIENCE_S,
    BlockPull,
    GatherPlan,
    Places,
    no_table,
    table_sources,
)
from ecckpt.protocol.parallel_ranges import connections_for

_PARALLEL_PULLS = 8
# How often the plan is asked whether a pull is still waited for.
_LOOK_S = 0.1

ViewOf = Callable[[int], memoryview]
"""The bytes of a fragment, by its index."""

PullSpan = Callable[[BlockPull, slice, int, Callable[[], bool]], None]
"""Brings a byte range of a fragment into its view, over so many connections.

It asks its last argument now and then whether to go on, and raises ``TooSlow`` if not.
"""


class Gatherer:
    """Performs one plan, straight into place; ``table`` are the checksums of the shard.

    What is ``touched`` and not ``good`` in the plan afterwards is undefined.
    """

    def __init__(self, plan: GatherPlan, table: Table, view_of: ViewOf, pull: PullSpan) -> None:
        self._plan, self._table = plan, table
        self._view_of, self._pull = view_of, pull
        self._codec = Codec(plan.header.k, plan.header.m)
        self._lock = threading.Lock()  # the plan's

    def pull_blocks(self) -> None:
        """Pull until every wanted block is here or can be computed; ``TooFewFragments``."""
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(_PARALLEL_PULLS, thread_name_prefix="gather") as pool:
            while True:
                with self._lock:
                    begun = self._plan.next()
                if len(begun) == 1 and not running:
                    self._perform(begun[0], connections_for(1))  # no other could end before it
                    continue
                connections = connections_for(len(begun) + len(running))
                running |= {pool.submit(self._perform, each, connections) for each in begun}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()

    def _perform(self, pull: BlockPull, connections: int) -> None:
        started_s = time.monotonic()
        header, error = self._plan.header, None

        look_s = LEAST_PATIENCE_S  # asked for every few bytes: the plan seldom need look

        def goes_on() -> bool:
            nonlocal look_s
            took_s = time.monotonic() - started_s
            if took_s < look_s:
                return True
            look_s = took_s + _LOOK_S
            with self._lock:
                patience_s = self._plan.patience_s(pull)
            return patience_s is None or took_s < patience_s

        try:
            for rows in pull.rows:
                span = span_of(header, rows)
                self._pull(pull, span, connections, goes_on)
                bad = self._codec.verify(
                    {pull.index: self._view_of(pull.index)[span]},
                    self._table[:, rows],
                    header.block_bytes,
                    threads=connections,
                )
                with self._lock:
                    self._plan.prove(pull, rows, bad)
        except (EcckptError, OSError) as problem:
            error = problem
        with self._lock:
            self._plan.finish(pull, time.monotonic() - started_s, error)


def rebuild(plan: GatherPlan, table: Table, view_of: ViewOf) -> None:
    """Compute the wanted blocks that were not pulled; ``CorruptFragment`` if one is not right."""
    header = plan.header
    for each in plan.rebuilds():
        span = span_of(header, each.rows)
        plan.touched[each.missing, each.rows] = True
        sums = Codec(header.k, header.m).rebuild(
            {index: view_of(index)[span] for index in each.present},
            {index: view_of(index)[span] for index in each.missing},
            header.block_bytes,
            threads=COPY_THREADS,
        )
        if not np.array_equal(sums[each.missing], table[each.missing, each.rows]):
            raise CorruptFragment(f"{header.shard}: rebuilt blocks fail their CRC32C")
        plan.rebuilt(each)


def find_table(
    header: Header,
    sources: Places,
    ask: Callable[[str], Table],
    *,
    silent: set[str],
    problems: list[str],
) -> Table:
    """The checksums of a shard, from the first source that has them; else ``TooFewFragments``.

    Sources that do not answer become ``silent``; those that are get asked in the second round only.
    Adds what went wrong to ``problems``.
    """
    order = table_sources(sources)
    for turn, source in enumerate(order):
        if source in silent and 2 * turn < len(order):
            continue
        try:
            return ask(source)
        except (EcckptError, OSError) as error:
            problems.append(str(error))
            if isinstance(error, AgentUnreachable):
                silent.add(source)
    raise no_table(header, problems)
