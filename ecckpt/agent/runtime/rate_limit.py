"""Keeping what is read or pulled below a rate, so that others get their share."""

from __future__ import annotations

import threading
import time

from ecckpt.protocol.http import Pace


def pace_of(bytes_per_s: float) -> Pace:
    """Keeps what several threads take together to that rate (0: any).

    Nothing is saved up: after a quiet minute the rate is the same as ever.
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
