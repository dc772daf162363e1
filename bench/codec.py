"""How fast coding and copying are, in units of one memcpy: ``python -m bench.codec``.

A ratio is the time of one ``memcpy`` call over the k data fragments (256 MiB, large enough for its
non-temporal path) divided by the time of the case, in the same round; the table shows the median
over the rounds. Above 1 is faster than copying the data once. Memory is reused and page-aligned.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np

from ecckpt.codec import Codec, engines
from ecckpt.copying import copy_bytes, copy_many

DATA_BYTES = 256 << 20
BLOCK_BYTES = 1 << 20
ROUNDS = 7
CODES = ((4, 2), (8, 2), (8, 4), (16, 4))
SLOW = {"scalar", "zfec"}  # only one code and one round: they take seconds

Cases = dict[str, Callable[[], object]]


def aligned(count: int) -> np.ndarray:
    """Return `count` touched bytes that start a page."""
    room = np.ones(count + 4096, np.uint8)
    return room[-room.ctypes.data % 4096 :][:count]


def coding_cases(memory: np.ndarray, engine: str) -> Cases:
    """Return encode, rebuild and verify of several codes; all share `memory`."""
    cases: Cases = {}
    for k, m in CODES if engine not in SLOW else [(8, 2)]:
        length = DATA_BYTES // k
        fragments = [memory[i * length :][:length] for i in range(k + m)]
        data, parity = fragments[:k], fragments[k:]
        coder = Codec(k, m, engine=engine)
        present, missing = dict(enumerate(fragments[2:], 2)), dict(enumerate(fragments[:2]))
        name = f"{engine} ({k},{m})"
        cases[f"{name} encode + CRC"] = lambda c=coder, d=data, p=parity: c.encode(
            d, p, BLOCK_BYTES
        )
        cases[f"{name} rebuild 2 + CRC"] = lambda c=coder, p=present, q=missing: c.rebuild(
            p, q, BLOCK_BYTES
        )
        cases[f"{name} CRC only"] = lambda c=coder, d=data: c.rebuild(
            dict(enumerate(d)), {}, BLOCK_BYTES
        )
    return cases


def copying_cases(source: np.ndarray, target: np.ndarray) -> Cases:
    """Return copies of the same bytes in one piece and in many."""
    cases: Cases = {"copy_bytes": lambda: copy_bytes(source, target)}
    for piece in (2 << 20, 64 << 10, 13 << 10):
        starts = np.arange(0, source.size, piece)
        lengths = np.minimum(source.size - starts, piece)
        addresses = (source.ctypes.data + starts, target.ctypes.data + starts, lengths)
        ranges = np.stack(addresses, axis=1).astype(np.int64)
        name = f"copy_many of {starts.size} x {piece >> 10} KiB"
        cases[name] = lambda ranges=ranges: copy_many(ranges)
    return cases


def main() -> None:
    """Run all cases round-robin and print their medians."""
    memory, target = aligned(2 * DATA_BYTES), aligned(DATA_BYTES)
    source = memory[:DATA_BYTES]
    cases: Cases = {
        "memcpy": lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, DATA_BYTES)
    }
    cases |= copying_cases(source, target)
    for engine in engines():
        cases |= coding_cases(memory, engine)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(ROUNDS):
        for name, run in cases.items():
            if turn and name.split()[0] in SLOW:
                continue
            start = time.thread_time()
            run()
            seconds[name].append(time.thread_time() - start)
    print(f"{'case':32} {'x memcpy':>8} {'GB/s':>7}")
    for name, times in seconds.items():
        pairs = zip(seconds["memcpy"], times, strict=False)
        ratio = statistics.median(memcpy / taken for memcpy, taken in pairs)
        print(f"{name:32} {ratio:8.2f} {DATA_BYTES / statistics.median(times) / 1e9:7.2f}")


if __name__ == "__main__":
    main()
