"""Memory to measure on, and ratios of cases that take turns."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
SLOW_ROUNDS = 3
_SPARED_BYTES = 2 << 30
_TOUCHED_LIMIT_BYTES = 32 << 30
_CALM_S, _CALM_LIMIT_S, _CALM_CPUS = 1.0, 6.0, 0.1

# Runs a case and returns how many seconds of it count.
Timed = Callable[[], float]


def timed(act: Callable[[], Any], settle: Callable[[Any], object] = lambda _: None) -> Timed:
    """Return a case that runs ``act`` and returns its seconds; ``settle`` is not counted."""

    def run() -> float:
        started_s = time.perf_counter()
        result = act()
        seconds = time.perf_counter() - started_s
        settle(result)
        return seconds

    return run


def reused_memory(count: int, *, shared: bool = False) -> np.ndarray:
    """Return `count` noisy bytes on huge pages, all of them touched.

    Fresh pages would cost several times the measured time; the store reuses its memory, too.
    ``shared`` memory comes from tmpfs, and so on small pages unless the system gives it others.
    """
    sharing = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    room = mmap.mmap(-1, count + 2 * HUGE_PAGE_BYTES, flags=sharing | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(room, np.uint8)
    view = whole[-whole.ctypes.data % HUGE_PAGE_BYTES :][:count]
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    for at in range(0, count, noise.size):
        view[at : at + noise.size] = np.roll(noise, at >> 10)[: count - at]
    return view


def touch_free_memory() -> None:
    """Use all free memory once, and give it back.

    A virtual machine that has just been started gets each page from its host at its first use. That
    takes many times as long as zeroing the page, and would slow down random cases of a bench.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    count = min((free_kib << 10) - _SPARED_BYTES, _TOUCHED_LIMIT_BYTES)
    if count <= 0:
        return
    with mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, count, mmap.PAGESIZE):
            room[at] = 1


@dataclass
class Case:
    """A case and its time in each round. Slow cases run in the first rounds only."""

    run: Callable[[], object]
    slow: bool = False
    seconds: list[float] = field(default_factory=list)


def take_turns(cases: dict[str, Case], rounds: int, clock: Callable[[], float]) -> None:
    """Run all cases once per round, so that a change of the machine's speed meets all of them."""
    for turn in range(rounds):
        for case in cases.values():
            if case.slow and turn >= SLOW_ROUNDS:
                continue
            start = clock()
            case.run()
            case.seconds.append(clock() - start)


def others_cpus(run: Callable[[], None]) -> float:
    """Call ``run``; return how many CPUs' worth of time other processes took meanwhile."""

    def busy_s() -> float:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - time.process_time()

    busy_before_s, start_s = busy_s(), time.perf_counter()
    run()
    return (busy_s() - busy_before_s) / (time.perf_counter() - start_s)


def await_calm() -> None:
    """Wait until other processes and the kernel have been nearly idle for a second; at most six.

    Kernel threads of a virtual machine may give memory that was freed a moment ago back to its
    host. For the memory of a bench's lost nodes they take a second or two of the CPUs.
    """
    deadline_s = time.monotonic() + _CALM_LIMIT_S
    while others_cpus(lambda: time.sleep(_CALM_S)) > _CALM_CPUS and time.monotonic() < deadline_s:
        pass


def ratio(case: Case, base: Case) -> float:
    """Return how much faster than the base a case was: the median over the rounds."""
    pairs = zip(base.seconds, case.seconds, strict=False)
    return statistics.median(base_s / case_s for base_s, case_s in pairs)


def median_s(case: Case) -> float:
    """Return the median time of a case."""
    return statistics.median(case.seconds)


cpu_clock = time.thread_time
wall_clock = time.perf_counter
