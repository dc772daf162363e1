"""Keeping what several threads read or pull together below a rate."""

from __future__ import annotations

import threading
import time

from ecckpt.protocol.http import Pace


def pace_of(bytes_per_s: float) -> Pace:
    """A function that waits until the bytes it is told of fit into the rate (0: no limit).

    Unused rate is not saved up: after a quiet minute there is no burst.
    """
    lock = threading.Lock()
    free_s = 0.0

    def wait(count: int) -> None:
        nonlocal free_s
        with lock:
            now_s = time.monotonic()
            free_s = max(free_s, now_s) + count / bytes_per_s
            wait_s = free_s - now_s
        time.sleep(wait_s)

    return wait if bytes_per_s else lambda _: None
