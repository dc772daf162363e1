"""A save's stall beside one memcpy of the same bytes: ``pytest -n 0 bench/test_save.py``."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from bench.save import STATE_BYTES, WARM_UP_ROUNDS, gpt_state, saver

ROUNDS = 7


@pytest.mark.benchmark(group="256 MiB of CPU tensors")
def test_memcpy(benchmark) -> None:
    """Measure the physical limit: one call, into memory that was touched before."""
    source, target = np.ones(STATE_BYTES, np.uint8), np.ones(STATE_BYTES, np.uint8)
    addresses = (target.ctypes.data, source.ctypes.data, STATE_BYTES)
    benchmark.pedantic(ctypes.memmove, addresses, rounds=ROUNDS, warmup_rounds=1)


@pytest.mark.benchmark(group="256 MiB of CPU tensors")
def test_save(benchmark) -> None:
    """Measure from the call of save() to its return; it commits before the next round."""
    state = gpt_state(STATE_BYTES)
    steps = itertools.count(WARM_UP_ROUNDS)
    handles = []
    with saver(state) as checkpointer:

        def settle() -> None:
            assert not handles or handles[-1].wait(120)

        def save() -> None:
            handles.append(checkpointer.save(next(steps), state, patience_s=120))

        benchmark.pedantic(save, setup=settle, rounds=ROUNDS, warmup_rounds=1)
        settle()
