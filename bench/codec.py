"""How fast the codec is, in units of one memcpy: ``python -m bench.codec``.

A ratio is the time of one ``memcpy`` call over the k data fragments divided by the time of the
case, in the same round; a table shows the medians over the rounds. A ratio above 1 is faster than
copying the data once. ``bench/README.md`` explains the cases; ``--record`` adds a row to it and
draws the chart in ``docs/``.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench import peers, record
from bench.measuring import (
    Case,
    cpu_clock,
    median_s,
    others_cpus,
    ratio,
    reused_memory,
    take_turns,
    wall_clock,
)
from ecckpt.coding.reed_solomon import Codec, engines
from ecckpt.format.fragment_file import BLOCK_BYTES, fragment_bytes_for

DATA_BYTES = 256 << 20  # one memcpy of this bypasses the caches; a smaller one is much slower
CODES = ((4, 2), (8, 2), (8, 4), (10, 4), (16, 4), (32, 8))
MEMCPY = "memcpy"

# Two threads are measured when other processes take less than so many CPUs, in so many attempts.
QUIET_CPUS = 0.15
ATTEMPTS = 6
PAUSE_S = 5.0


@dataclass(frozen=True)
class Memory:
    """The fragments of one code, one after another with the stride of the store, and a copy."""

    k: int
    m: int
    data: list[np.ndarray]
    parity: list[np.ndarray]
    copies: list[np.ndarray]
    payload: np.ndarray  # the data, whole
    copied: np.ndarray

    @property
    def fragments(self) -> dict[int, np.ndarray]:
        """Return data and parity by index."""
        return dict(enumerate([*self.data, *self.parity]))


def laid_out(pool: np.ndarray, k: int, m: int) -> Memory:
    """Cut the pool into fragments and copies."""
    size = fragment_bytes_for(DATA_BYTES, k)
    pieces = [pool[i * size : (i + 1) * size] for i in range(2 * k + m)]
    payload, copied = pool[: k * size], pool[(k + m) * size : (2 * k + m) * size]
    return Memory(k, m, pieces[:k], pieces[k : k + m], pieces[k + m :], payload, copied)


def memcpy(memory: Memory) -> Callable[[], object]:
    """Return one call over the data."""
    target, source = memory.copied.ctypes.data, memory.payload.ctypes.data
    return lambda: ctypes.memmove(target, source, memory.payload.size)


def our_cases(memory: Memory, engine: str, threads: int = 1) -> dict[str, Case]:
    """Return the cases of a save and a restore."""
    coder = Codec(memory.k, memory.m, engine=engine)
    data, parity, copies = memory.data, memory.parity, memory.copies

    def encode(copied: Sequence[np.ndarray] = (), checksums: bool = True) -> Callable[[], object]:
        return lambda: coder.encode(
            data, parity, BLOCK_BYTES, copies=copied, checksums=checksums, threads=threads
        )

    def rebuild(lost: int, restore: bool) -> Callable[[], object]:
        # The k present fragments with the lowest indices, as a restore pulls them. Missing ones are
        # rebuilt in place; a restore makes the whole payload elsewhere.
        fragments = memory.fragments
        present = {i: fragments[i] for i in range(lost, memory.k + lost)}
        place = copies if restore else data
        missing = {i: place[i] for i in range(lost)}
        copied = {i: copies[i] for i in range(lost, memory.k)} if restore else {}
        return lambda: coder.rebuild(present, missing, BLOCK_BYTES, copies=copied, threads=threads)

    return {
        "encode": Case(encode(checksums=False)),
        "encode + CRC": Case(encode()),
        "copy + encode + CRC": Case(encode(copies)),
        "rebuild 1 + CRC": Case(rebuild(1, restore=False)),
        f"rebuild {memory.m} + CRC": Case(rebuild(memory.m, restore=False)),
        "restore, 1 lost": Case(rebuild(1, restore=True)),
        f"restore, {memory.m} lost": Case(rebuild(memory.m, restore=True)),
    }


def other_cases(memory: Memory, full: bool) -> dict[str, Case]:
    """Return the limits of memory, the weaker engines, and the peers."""
    cases: dict[str, Case] = {}
    if mover := peers.traffic():
        for name, copies in (("", []), ("copy + ", memory.copies)):
            move = mover(memory.data, memory.parity, copies)
            cases[f"limit: {name}encode without arithmetic"] = Case(move)
        for lost in (1, memory.m):  # spoils the data: from here on only times count
            present = [*memory.data[lost:], *memory.parity[:lost]]
            move = mover(present, memory.data[:lost], [])
            cases[f"limit: rebuild {lost} without arithmetic"] = Case(move)
        cases["limit: reading alone"] = Case(mover(memory.data, [], []))
    if "avx2" in engines():
        coder = Codec(memory.k, memory.m, engine="avx2")
        cases["avx2 engine, encode + CRC"] = Case(
            lambda: coder.encode(memory.data, memory.parity, BLOCK_BYTES)
        )
    for name, library in peers.isa_l_libraries().items():
        encode = library.encoder(memory.k, memory.m, memory.data, memory.parity)
        cases[f"{name}, encode"] = Case(encode)
    if full:
        if encode := peers.pyeclib_encoder(memory.k, memory.m, memory.payload):
            cases["pyeclib, encode in 1 MiB segments"] = Case(encode, slow=True)
        encode = peers.zfec_encoder(memory.k, memory.m, memory.data)
        cases["zfec, encode"] = Case(encode, slow=True)
    return cases


def one_thread(memory: Memory, rounds: int, full: bool) -> dict[str, Case]:
    """Measure all cases in one thread, by its CPU time."""
    cases = {MEMCPY: Case(memcpy(memory))}
    cases |= our_cases(memory, engines()[0]) | other_cases(memory, full)
    take_turns(cases, rounds, cpu_clock)
    return cases


def two_threads(memory: Memory, rounds: int) -> dict[str, float]:
    """Return how much sooner two threads are done than one, by wall time.

    While other processes want the CPUs this cannot be measured: then the result is empty.
    """
    for _ in range(ATTEMPTS):
        alone, shared = our_cases(memory, engines()[0]), our_cases(memory, engines()[0], threads=2)
        cases = {}
        for name in alone:
            cases |= {f"{name} 1": alone[name], f"{name} 2": shared[name]}
        others = others_cpus(lambda c=cases: take_turns(c, rounds, wall_clock))
        if others < QUIET_CPUS:
            return {name: ratio(shared[name], alone[name]) for name in alone}
        time.sleep(PAUSE_S)
    return {}


def print_table(title: str, ratios: dict[str, tuple[float, float]]) -> None:
    """Print ratios and GB/s."""
    print(f"\n{title:42} {'x memcpy':>8} {'GB/s':>7}")
    for name, (times, speed) in ratios.items():
        print(f"{name:42} {times:8.2f} {speed:7.2f}")


def main() -> None:
    """Measure and print; record with ``--record``."""
    parser = argparse.ArgumentParser(prog="python -m bench.codec")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--codes", default=",".join(f"{k}+{m}" for k, m in CODES))
    parser.add_argument("--quick", action="store_true", help="without zfec, pyeclib, two threads")
    parser.add_argument("--tmpfs", action="store_true", help="use tmpfs memory, as the agent does")
    parser.add_argument("--record", action="store_true", help="into bench/README.md and docs/")
    arguments = parser.parse_args()
    codes = [tuple(map(int, code.split("+"))) for code in arguments.codes.split(",")]
    pool_bytes = max((2 * k + m) * fragment_bytes_for(DATA_BYTES, k) for k, m in codes)
    pool = reused_memory(pool_bytes, shared=arguments.tmpfs)

    found: record.Results = {}
    for k, m in codes:
        memory = laid_out(pool, k, m)
        cases = one_thread(memory, arguments.rounds, not arguments.quick)
        size = memory.payload.size
        table = {
            name: (ratio(case, cases[MEMCPY]), size / median_s(case) / 1e9)
            for name, case in cases.items()
        }
        print_table(f"({k},{m}) {engines()[0]}, 1 thread, CPU time", table)
        found[k, m] = {name: times for name, (times, _) in table.items()}
        if not arguments.quick:
            speedups = two_threads(memory, arguments.rounds)
            listed = ", ".join(f"{name} {speedup:.2f}" for name, speedup in speedups.items())
            print(f"2 threads, x 1 thread: {listed or 'not measured on a busy machine'}")
            found[k, m] |= {f"2 threads: {name}": value for name, value in speedups.items()}
    print(f"\n{record.reach(found)}")
    if arguments.record and not arguments.tmpfs:
        record.add_row(found)
        record.draw(found)


if __name__ == "__main__":
    main()
