"""The operations of every save and restore, for ``pytest -n 0 bench/test_codec.py``.

These sizes are small; ``python -m bench.codec`` measures against memory and the peers.
"""

import numpy as np
import pytest

from bench.measuring import reused_memory
from ecckpt.coding.reed_solomon import Codec, engines
from ecckpt.format.fragment_file import BLOCK_BYTES, fragment_bytes_for
from ecckpt.memory.buffers import copy_bytes

DATA_BYTES = 32 << 20


def cut(k, m):
    """Return data, parity and copies with the stride of the store."""
    size = fragment_bytes_for(DATA_BYTES, k)
    pool = reused_memory((2 * k + m) * size)
    pieces = [pool[i * size : (i + 1) * size] for i in range(2 * k + m)]
    return pieces[:k], pieces[k : k + m], pieces[k + m :]


def timed(benchmark, run, *arguments, **named):
    """Run the operation a few times on the same memory."""
    benchmark.extra_info["data_bytes"] = DATA_BYTES
    return benchmark.pedantic(run, arguments, named, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("engine", engines())
def test_encode(benchmark, engine):
    """Encode 8+2 with all checksums."""
    data, parity, _ = cut(8, 2)
    table = timed(benchmark, Codec(8, 2, engine=engine).encode, data, parity, BLOCK_BYTES)
    assert Codec(8, 2).verify(dict(enumerate([*data, *parity])), table, BLOCK_BYTES) == []


@pytest.mark.parametrize(("k", "m"), [(4, 2), (8, 4), (10, 4), (16, 4), (32, 8)])
def test_encode_codes(benchmark, k, m):
    """Encode other codes with all checksums."""
    data, parity, _ = cut(k, m)
    timed(benchmark, Codec(k, m).encode, data, parity, BLOCK_BYTES)


def test_encode_without_checksums(benchmark):
    """Encode 8+2, parity alone."""
    data, parity, _ = cut(8, 2)
    timed(benchmark, Codec(8, 2).encode, data, parity, BLOCK_BYTES, checksums=False)


@pytest.mark.parametrize("threads", [1, 2])
def test_copy_and_encode(benchmark, threads):
    """Encode 8+2 with all checksums and copy the data elsewhere in the same pass."""
    data, parity, copies = cut(8, 2)
    coder = Codec(8, 2)
    timed(benchmark, coder.encode, data, parity, BLOCK_BYTES, copies=copies, threads=threads)
    assert all(np.array_equal(c, d) for c, d in zip(copies, data, strict=True))


@pytest.mark.parametrize("lost", [1, 2])
def test_rebuild(benchmark, lost):
    """Rebuild lost data of 8+2 in place, with all checksums."""
    data, parity, _ = cut(8, 2)
    coder = Codec(8, 2)
    table = coder.encode(data, parity, BLOCK_BYTES)
    present = {i: f for i, f in enumerate([*data, *parity]) if lost <= i < 8 + lost}
    missing = dict(enumerate(data[:lost]))
    rebuilt = timed(benchmark, coder.rebuild, present, missing, BLOCK_BYTES)
    assert np.array_equal(rebuilt[: 8 + lost], table[: 8 + lost])


def test_copy(benchmark):
    """Copy the same bytes past the caches, for comparison."""
    source, target = reused_memory(DATA_BYTES), reused_memory(DATA_BYTES)
    timed(benchmark, copy_bytes, source, target)
