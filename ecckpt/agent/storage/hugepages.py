"""Huge pages for regions that were made without, gathered in the background.

A region is made of huge pages if the kernel has free ones. If it had none at that moment, or if an
earlier agent left the region, its pages are gathered later. That pays off, because a region is
recycled as long as the run lasts: coding and copying get faster, and a restarted process maps it at
once. A process that touches a page while it is moved waits a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ecckpt.agent import deadlines
from ecckpt.memory.mapping import HUGE_PAGE_BYTES, make_huge

if TYPE_CHECKING:
    from ecckpt.agent.storage.region import Region

# Seconds asleep for each second of work, because training needs the memory too.
_REST = 1.0
_NICE = 19


class HugePages:
    """One thread of low priority, started with the first region that is large enough."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[float, weakref.ref[Region]]] = queue.SimpleQueue()
        self._moving = threading.Lock()
        self._thread: threading.Thread | None = None

    def want(self, region: Region) -> None:
        """Have the region gathered soon. It may be freed or recycled meanwhile."""
        if region.size_bytes < HUGE_PAGE_BYTES:
            return
        self._new.put((time.monotonic() + deadlines.HUGE_PAGES_DELAY_S, weakref.ref(region)))
        with self._moving:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hugepages", daemon=True)
                with contextlib.suppress(RuntimeError):  # no memory for a thread: pages stay small
                    thread.start()
                    self._thread = thread

    def let_go(self) -> None:
        """Return when this thread refers to no region: within a few milliseconds.

        A region is unmapped, and its memory free, only when the last reference to it is gone.
        """
        with self._moving:
            pass

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            at_s, region = self._new.get()
            time.sleep(max(0.0, at_s - time.monotonic()))
            start = 0
            while self._move(region, start):
                start += HUGE_PAGE_BYTES

    def _move(self, reference: weakref.ref[Region], start: int) -> bool:
        """Gather one huge page; False at the end of the region, or if nothing can be gained."""
        with self._moving:
            region = reference()
            if region is None or start + HUGE_PAGE_BYTES > region.size_bytes:
                return False
            started_s = time.monotonic()
            worked = make_huge(region.view[start : start + HUGE_PAGE_BYTES])
            del region
        time.sleep(_REST * (time.monotonic() - started_s))
        return worked
