"""A large pull as several ranges, over as many connections at once.

One stream is as fast as one thread at either end can copy. Where many fragments of a shard are
pulled at once there are streams enough; where it is one or two, each is pulled in ranges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

from ecckpt.memory.buffers import usable_threads

# What one connection is worth being opened for.
RANGE_BYTES = 64 << 20
# Ranges begin at whole blocks of the usual size, and at whole pages.
_GRAIN_BYTES = 1 << 20
_CONNECTIONS = 4
_STREAMS = 8

# Pulls one range of a target, as long as the function that it is given says to go on.
PullRange = Callable[[slice, Callable[[], bool]], None]


def connections_for(pulls: int) -> int:
    """How many connections each of so many pulls may have that go on at once, 1 to 4.

    Together no more than 8, or one each: an agent has 64 threads to serve all others. And no more
    than there are CPUs to copy from them.
    """
    return usable_threads(max(1, min(_CONNECTIONS, _STREAMS // max(1, pulls))))


def ranges_of(size_bytes: int, connections: int) -> list[slice]:
    """Ranges of a target, in order, about equal, for at most so many connections."""
    count = max(1, min(connections, size_bytes // RANGE_BYTES))
    grains = -(-size_bytes // _GRAIN_BYTES)
    edges = [min(size_bytes, at * grains // count * _GRAIN_BYTES) for at in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def pull_ranges(
    pull: PullRange, ranges: Sequence[slice], wanted: Callable[[], bool] | None = None
) -> None:
    """Pull all ranges at once, the first in this thread; returns when none is being pulled.

    Raises what the first of them raised that failed; the others are then no longer wanted. Where
    there is no memory for a thread, this one pulls that range as well.
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
        mine = [ranges[0], *_begin(try_to, ranges[1:], threads)]
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


def _begin(
    act: Callable[[slice], None], ranges: Sequence[slice], threads: list[threading.Thread]
) -> list[slice]:
    """Start a thread for each range; returns those for which there is no memory."""
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
