"""Peers for the same bytes, and the limit of memory; peers that are missing are left out."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import zfec

from ecckpt.coding import gf256
from ecckpt.coding.reed_solomon import engines

AHEAD_BYTES = (256, 512, 1024, 1536, 2048)
TRIALS = 3
SEGMENT_BYTES = 1 << 20  # pyeclib copies its input: with pieces of this size it is fastest


def pointers(views: Sequence[np.ndarray]) -> ctypes.Array:
    """Return the addresses of some buffers as a C array."""
    return (ctypes.c_void_p * max(len(views), 1))(*(view.ctypes.data for view in views))


class IsaL:
    """ISA-L, its C functions called directly: parity by zfec's matrix, no checksums."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def encoder(
        self, k: int, m: int, data: Sequence[np.ndarray], parity: Sequence[np.ndarray]
    ) -> Callable[[], None]:
        """Return a function that fills the parity."""
        matrix = b"".join(gf256.generator_matrix(k, k + m)[k:])
        tables = np.zeros(32 * k * m + 64, np.uint8)
        tables = tables[-tables.ctypes.data % 64 :]
        self._library.ec_init_tables(k, m, matrix, ctypes.c_void_p(tables.ctypes.data))
        sources, targets, length = pointers(data), pointers(parity), data[0].size

        def encode() -> None:
            self._library.ec_encode_data(
                length, k, m, ctypes.c_void_p(tables.ctypes.data), sources, targets
            )

        return encode


def isa_l_libraries() -> dict[str, IsaL]:
    """Return every installed ISA-L: the system's, and the newer one that pyeclib brings."""
    found = {}
    if name := ctypes.util.find_library("isal"):
        real = Path(f"/usr/lib/x86_64-linux-gnu/{name}").resolve()
        found[f"ISA-L {real.name.removeprefix('libisal.so.')}"] = IsaL(name)
    spec = importlib.util.find_spec("pyeclib")
    if spec and spec.origin:
        for path in (Path(spec.origin).parents[1] / "pyeclib.libs").glob("libisal*.so*"):
            gfni = "GFNI" if b"gfni" in path.read_bytes() else "no GFNI"
            found[f"ISA-L of pyeclib ({gfni})"] = IsaL(str(path))
    return found


def zfec_encoder(k: int, m: int, data: Sequence[np.ndarray]) -> Callable[[], object]:
    """Return a function that makes parity with zfec, in new memory each time."""
    encoder, numbers = zfec.Encoder(k, k + m), list(range(k, k + m))
    blocks = [memoryview(view) for view in data]
    return lambda: encoder.encode(blocks, numbers)


def pyeclib_encoder(k: int, m: int, payload: np.ndarray) -> Callable[[], None] | None:
    """Return a function that encodes bytes with pyeclib on ISA-L, segment by segment."""
    try:
        from pyeclib.ec_iface import ECDriver
    except ImportError:
        return None
    driver = ECDriver(k=k, m=m, ec_type="isa_l_rs_vand")

    def encode() -> None:
        for at in range(0, payload.size, SEGMENT_BYTES):
            driver.encode(payload[at : at + SEGMENT_BYTES].tobytes())

    return encode


Traffic = Callable[
    [Sequence[np.ndarray], Sequence[np.ndarray], Sequence[np.ndarray]], Callable[[], None]
]


def traffic() -> Traffic | None:
    """Return a maker of functions with the memory accesses of encoding (data, parity, copies).

    Such a function prefetches as far ahead as was fastest for these streams in a few trials.
    """
    compiler = shutil.which("g++")
    if compiler is None or "gfni" not in engines():
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "traffic.so"
        source = Path(__file__).with_name("traffic.cpp")
        flags = ["-std=c++17", "-O3", "-mavx512f", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))

    def mover(
        data: Sequence[np.ndarray], parity: Sequence[np.ndarray], copies: Sequence[np.ndarray]
    ) -> Callable[[], None]:
        size = ctypes.c_size_t
        arguments = (
            *(pointers(data), size(len(data)), pointers(parity), size(len(parity))),
            *(pointers(copies) if copies else None, size(data[0].size)),
        )

        def move(ahead_bytes: int) -> None:
            if library.traffic(*arguments, size(ahead_bytes)):
                raise ValueError(f"no traffic with {len(parity)} outputs")

        def trial_s(ahead_bytes: int) -> float:
            start_s = time.thread_time()
            move(ahead_bytes)
            return time.thread_time() - start_s

        best = min(AHEAD_BYTES, key=lambda ahead: min(trial_s(ahead) for _ in range(TRIALS)))
        return lambda: move(best)

    return mover
