"""Resources that processes used: CPU time, additional memory, bytes over loopback."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from ecckpt.testing.local_cluster import children

TMPFS = "/dev/shm"
SAMPLES_EVERY_S = 0.005


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for each in found:
        found += children(each)
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of all threads of these processes, to the nanosecond."""
    total_s = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            total_s += time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid makes it
    return total_s


def private_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of these processes that belongs to no file."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2]
            total += 1024 * int(line.split(maxsplit=1)[0])
    return total


def tmpfs_bytes() -> int:
    """Return the bytes of all files in shared memory, of any process of this machine."""
    found = os.statvfs(TMPFS)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def loopback_bytes() -> int:
    """Return the bytes over loopback since the machine started, of any process."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise RuntimeError("no loopback interface")


class Peak:
    """The most memory that processes and tmpfs had while it was open; use as a context manager.

    It samples 200 times a second, which costs time: timed cases run again without it.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.most_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.most_bytes = max(self.most_bytes, private_bytes(self._pids) + tmpfs_bytes())
            if self._done.wait(SAMPLES_EVERY_S):
                return
