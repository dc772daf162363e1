"""One call for each of several agents or shards, at the same time. The only place that does so.

``client/threads.py`` performs the effect ``CallAgents`` with it; commands and readers, which are no
routines, use it themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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

    The caller's thread makes calls, too: all of them where no thread can be started, as in a
    program that ends. Raises what the first call that failed raised, once all calls that began have
    ended.
    """
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    left, lock = iter(range(len(targets))), threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                at = next(left, -1)
            if at < 0:
                return
            try:
                results[at] = call(targets[at])
            except BaseException as error:  # raised by the caller
                errors[at] = error

    threads = _started(min(parallel, len(targets)) - 1, work)
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[at] for at in range(len(targets))]


def _started(count: int, work: Callable[[], None]) -> list[threading.Thread]:
    threads: list[threading.Thread] = []
    for number in range(count):
        thread = threading.Thread(target=work, name=f"call_{number}")
        try:
            thread.start()
        except RuntimeError:  # no memory for one more, or the interpreter is shutting down
            break
        threads.append(thread)
    return threads
