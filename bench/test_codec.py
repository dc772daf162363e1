"""The two operations of every save, for pytest-benchmark: ``pytest bench/test_codec.py``."""

import numpy as np
import pytest

from ecckpt.codec import Codec, engines
from ecckpt.copying import copy_bytes

FRAGMENT_BYTES = 4 << 20


@pytest.mark.parametrize("engine", engines())
def test_encode(benchmark, engine):
    """Encode 32 MiB with 8+2, checksums included."""
    data = np.ones((8, FRAGMENT_BYTES), np.uint8)
    parity = np.ones((2, FRAGMENT_BYTES), np.uint8)
    coder = Codec(8, 2, engine=engine)
    benchmark.extra_info["data_bytes"] = data.size
    benchmark.pedantic(coder.encode, (list(data), list(parity), 1 << 20), rounds=5, warmup_rounds=1)


def test_copy(benchmark):
    """Copy 32 MiB past the caches."""
    source = np.ones(8 * FRAGMENT_BYTES, np.uint8)
    target = np.ones_like(source)
    benchmark.extra_info["data_bytes"] = source.size
    benchmark.pedantic(copy_bytes, (source, target), rounds=5, warmup_rounds=1)
