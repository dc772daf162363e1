"""A large pull as several byte ranges over as many connections at once.

One stream is as fast as one thread at either end can copy. Where many fragments of a shard are
pulled at once there are enough streams; one or two large fragments are pulled in ranges. Used by
agent_client.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

from ecckpt.memory.buffers import usable_threads

# Smaller ranges are not worth a connection of their own.
RANGE_BYTES = 64 << 20
# Ranges begin at multiples of this: whole blocks of the largest size, and whole pages.
_GRAIN_BYTES = 1 << 20
_CONNECTIONS = 4
_STREAMS = 8

# Pulls one range of a target while the function that it is given returns True.
PullRange = Callable[[slice, Callable[[], bool]], None]


def connections_for(pulls: int) -> int:
    """How many connections each of ``pulls`` simultaneous pulls may have: 1 to 4.

    All together at most 8, or one each, because an agent has 64 threads for all its clients. And at
    most one for each CPU, because each needs a thread that copies.
    """
    return usable_threads(max(1, min(_CONNECTIONS, _STREAMS // max(1, pulls))))


def ranges_of(size_bytes: int, connections: int) -> list[slice]:
    """Ranges of a target, in order and about equal, for at most ``connections`` connections."""
    count = max(1, min(connections, size_bytes // RANGE_BYTES))
    grains = -(-size_bytes // _GRAIN_BYTES)
    edges = [min(size_bytes, at * grains // count * _GRAIN_BYTES) for at in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def pull_ranges(
    pull: PullRange, ranges: Sequence[slice], wanted: Callable[[], bool] | None = None
) -> None:
    """Pull all ranges at once, the first in this thread; returns when no pull is running.

    Raises the error of the first range that failed; the other pulls are then no longer wanted. If
    there is no memory for a thread, this thread pulls that range too.
    """
    errors: list[Exception] = []
    over = threading.Event()

    def goes_on() -> bool:
        return not over.is_set() and (wanted is None or wanted())

    def try_to(span: slice) -> None:
        try:
            pull(span, goes_on)
        except Exception as error:
            errors.append(error)
            over.set()

    threads: list[threading.Thread] = []
    try:
        mine = [ranges[0], *_start_threads(try_to, ranges[1:], threads)]
        for span in mine:
            if not over.is_set():
                try_to(span)
    except BaseException:
        over.set()
        raise
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _start_threads(
    act: Callable[[slice], None], ranges: Sequence[slice], threads: list[threading.Thread]
) -> list[slice]:
    """Start a thread for each range; returns the ranges for which no thread could be started."""
    left = []
    for span in ranges:
        thread = threading.Thread(target=act, args=(span,), name="range")
        try:
            thread.start()
        except RuntimeError:
            left.append(span)
        else:
            threads.append(thread)
    return left
