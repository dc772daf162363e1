"""One call for each of several agents or shards, at the same time. The only place that does so.

``client/threads.py`` performs the effect ``CallAgents`` with it; commands and readers, which are no
routines, use it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Agents answer from memory: more threads than this would only wait for the interpreter's lock.
PARALLEL_CALLS = 32
# Headers of shards that are read at once: a round trip each, few bytes.
PARALLEL_HEADERS = 8


def call_each(
    targets: Sequence[T], call: Callable[[T], R], *, parallel: int = PARALLEL_CALLS
) -> list[R]:
    """Return ``call(target)`` for each target, in order; at most ``parallel`` calls run at once.

    Raises what the first failed call raised, once all calls that began have ended.
    """
    threads = min(parallel, len(targets))
    if threads <= 1:
        return [call(target) for target in targets]
    with ThreadPoolExecutor(threads, thread_name_prefix="call") as pool:
        return list(pool.map(call, targets))
