"""How long a save stalls its caller, in units of one memcpy: ``python -m bench.save``.

The state is 256 MiB of CPU tensors: the parameters and AdamW moments of a small GPT, or with
``--tensors 20000`` that many of equal size. Each round times one ``memcpy`` call over as many
bytes, into memory that was touched before, and one ``save()`` of a run that is protected with
RS(3, 2) over six agents on this machine; the save is committed before the next round begins. The
ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import ecckpt
from ecckpt.state.snapshot.plan import ShardPlan, plan_shard
from ecckpt.testing.local_cluster import LocalCluster

STATE_BYTES = 256 << 20
LAYERS = 12
WARM_UP_ROUNDS = 4  # until every slot exists and is mapped
ROUNDS = 11


def gpt_state(state_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return weights and two moments for four matrices and four vectors in every layer."""
    per_layer = state_bytes // (3 * 4 * LAYERS)
    width = int((per_layer / 12) ** 0.5)
    shapes = {"qkv": (3 * width, width), "out": (width, width)}
    shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
    shapes |= {f"norm{index}": (width,) for index in range(4)}
    return {
        kind: {
            f"layer{layer}.{name}": torch.rand(shape)
            for layer in range(LAYERS)
            for name, shape in shapes.items()
        }
        for kind in ("weights", "exp_avg", "exp_avg_sq")
    }


def even_state(state_bytes: int, tensors: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors of one size, each in its own memory."""
    elements = state_bytes // 4 // tensors
    return {"weights": {f"layer{index}.weight": torch.rand(elements) for index in range(tensors)}}


def flat(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the same tensors in one flat dict, for peers without nested states."""
    return {f"{kind}.{name}": each for kind, some in state.items() for name, each in some.items()}


def state_of(mib: int, tensors: int | None) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of a GPT, or so many tensors of equal size."""
    return even_state(mib << 20, tensors) if tensors else gpt_state(mib << 20)


def plan_s(state: dict[str, dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Return the seconds to plan a state first, and again after only its contents changed."""
    first_s, again_s = [], []
    previous: ShardPlan | None = None
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        plan = plan_shard(state, previous=previous)
        (again_s if previous else first_s).append(time.perf_counter() - started_s)
        plan.write(memoryview(bytearray(plan.shard_bytes)))  # a written plan holds no tensors
        previous = plan
    return first_s[0], statistics.median(again_s)


@contextmanager
def saver(state: dict[str, dict[str, torch.Tensor]]) -> Iterator[ecckpt.Checkpointer]:
    """A run that has saved before: slots exist, plans are cached."""
    with (
        LocalCluster(nodes=6) as cluster,
        ecckpt.Checkpointer(
            "bench", code=(3, 2), root=cluster.root("n0"), agents=cluster.addresses()
        ) as checkpointer,
    ):
        checkpointer.restore(state)
        for step in range(WARM_UP_ROUNDS):
            assert checkpointer.save(step, state, patience_s=120).wait(120)
        yield checkpointer


def agent_rss_bytes(pid: int) -> int:
    """Return the resident memory of a process without its shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    facts = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * sum(int(facts[name].split()[0]) for name in ("RssAnon", "RssFile"))


def main() -> None:
    """Print the medians, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="bench.save", description=__doc__)
    parser.add_argument("--tensors", type=int, help="this many of equal size, not those of a GPT")
    tensors = parser.parse_args().tensors
    torch.set_num_threads(1)
    state = even_state(STATE_BYTES, tensors) if tensors else gpt_state(STATE_BYTES)
    first_plan_s, next_plan_s = plan_s(state)
    state_bytes = sum(each.nbytes for kind in state.values() for each in kind.values())
    source, target = np.ones(state_bytes, np.uint8), np.ones(state_bytes, np.uint8)
    ratios, stalls_s, copies_s, protected_s = [], [], [], []
    with saver(state) as checkpointer:
        for turn in range(ROUNDS):
            started_s = time.perf_counter()
            ctypes.memmove(target.ctypes.data, source.ctypes.data, state_bytes)
            copies_s.append(time.perf_counter() - started_s)
            handle = checkpointer.save(WARM_UP_ROUNDS + turn, state, patience_s=120)
            assert handle.wait(120)
            stalls_s.append(handle.stall_s)
            protected_s.append(handle.protected_s)
            ratios.append(handle.stall_s / copies_s[-1])
    row = {
        "state_mib": round(state_bytes / 2**20),
        "tensors": sum(map(len, state.values())),
        "first_plan_s": first_plan_s,
        "plan_s": next_plan_s,
        "memcpy_s": statistics.median(copies_s),
        "stall_s": statistics.median(stalls_s),
        "stall_over_memcpy": statistics.median(ratios),
        "stall_over_memcpy_worst": max(ratios),
        "protected_s": statistics.median(protected_s),
    }
    for name, value in row.items():
        print(f"{name:24} {value:.4g}")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
