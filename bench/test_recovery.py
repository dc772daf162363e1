"""Protecting and restoring from home beside one memcpy: ``pytest -n 0 bench/test_recovery.py``.

These sizes are small; ``python -m bench.recovery`` measures against plain pulls.
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

import ecckpt
from bench.save import WARM_UP_ROUNDS, gpt_state, saver, state_of
from ecckpt.testing.local_cluster import LocalCluster

STATE_BYTES = 64 << 20
ROUNDS = 7

pytestmark = pytest.mark.benchmark(group="64 MiB of CPU tensors, RS(3, 2) over six agents")


def test_memcpy(benchmark) -> None:
    """Measure the physical limit: one call, into memory that was touched before."""
    source, target = np.ones(STATE_BYTES, np.uint8), np.ones(STATE_BYTES, np.uint8)
    addresses = (target.ctypes.data, source.ctypes.data, STATE_BYTES)
    benchmark.pedantic(ctypes.memmove, addresses, rounds=ROUNDS, warmup_rounds=1)


def test_protect(benchmark) -> None:
    """Measure from the call of save() until the commit."""
    state = gpt_state(STATE_BYTES)
    steps = itertools.count(WARM_UP_ROUNDS)
    with saver(state) as checkpointer:
        benchmark.pedantic(
            lambda: checkpointer.save(next(steps), state, patience_s=120).wait(60),
            rounds=ROUNDS,
            warmup_rounds=1,
        )
        handle = checkpointer.save(next(steps), state, patience_s=120)
        assert handle.wait(60)
        assert handle.held == 5


@pytest.mark.parametrize("tensors", [None, 20_000], ids=["GPT", "20,000 tensors"])
def test_restore_from_home(benchmark, tensors: int | None) -> None:
    """Measure restore() in a new Checkpointer, as after the process died."""
    state = state_of(STATE_BYTES >> 20, tensors)
    with LocalCluster(nodes=6) as cluster:
        settings = {"code": (3, 2), "root": cluster.root("n0"), "agents": cluster.addresses()}
        with ecckpt.Checkpointer("bench", **settings) as ckpt:
            ckpt.restore(state)
            assert ckpt.save(0, state).wait(60)
        used: list[ecckpt.Checkpointer] = []

        def renew() -> tuple[tuple[ecckpt.Checkpointer], dict[str, object]]:
            if used:
                used.pop().close()
            used.append(ecckpt.Checkpointer("bench", **settings))
            return (used[-1],), {}

        def restore(ckpt: ecckpt.Checkpointer) -> str:
            restored = ckpt.restore(state, resume="required")
            assert restored is not None
            return restored.source

        source = benchmark.pedantic(restore, setup=renew, rounds=ROUNDS, warmup_rounds=1)
        used.pop().close()
        assert source == "home"
