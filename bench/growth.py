"""How saves and restores grow with nodes, bytes and tensors: ``python -m bench.growth``.

One rank on real agents of this machine, RS(2, 1), or RS(8, 2) where there are nodes for it. Of each
size the medians over a few saves, each committed before the next, and restores of a new
Checkpointer on the same node. All agents share two CPUs here, and every start of a timeline asks
each of them three times: what grows with nodes is mostly that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch

import ecckpt
from bench.save import WARM_UP_ROUNDS, even_state
from ecckpt.testing import LocalCluster

NODES = (4, 8, 16, 32)
MIB = (16, 64, 256)
TENSORS = (100, 1_000, 10_000)


# Between saves, as in training: meanwhile agents without ranks are told of the commit, which a save
# right after it would wait for.
PAUSE_S = 0.3


@dataclass(frozen=True)
class Size:
    """What is varied."""

    nodes: int
    mib: int
    tensors: int
    code: tuple[int, int]


SIZES = (
    *(Size(nodes, 32, 100, (2, 1)) for nodes in NODES),
    *(Size(11, mib, 100, (8, 2)) for mib in MIB),
    *(Size(4, 64, tensors, (2, 1)) for tensors in TENSORS),
)


def measure(size: Size, rounds: int) -> dict[str, float]:
    """Medians in seconds, and the bytes that went over the network per byte saved."""
    state = even_state(size.mib << 20, size.tensors)
    stalls_s, protected_s, committed_s, restores_s = [], [], [], []
    with LocalCluster(nodes=size.nodes) as cluster:
        settings = {"code": size.code, "root": cluster.root("n0"), "agents": cluster.addresses()}
        with ecckpt.Checkpointer("growth", **settings) as ckpt:
            ckpt.restore(state)
            for step in range(WARM_UP_ROUNDS + rounds):
                handle = ckpt.save(step, state, patience_s=120)
                assert handle.wait(120)
                time.sleep(PAUSE_S)
                if step >= WARM_UP_ROUNDS:
                    stalls_s.append(handle.stall_s)
                    protected_s.append(handle.protected_s)
                    committed_s.append(handle.committed_s)
        for _ in range(rounds):
            with ecckpt.Checkpointer("growth", **settings) as ckpt:
                restored = ckpt.restore(state)
                assert restored is not None
                assert restored.source == "home"
                restores_s.append(restored.seconds)
    return {
        "stall_ms": 1e3 * statistics.median(stalls_s),
        "protected_ms": 1e3 * statistics.median(protected_s),
        "committed_ms": 1e3 * statistics.median(committed_s),
        "restore_ms": 1e3 * statistics.median(restores_s),
    }


def main() -> None:
    """Print a table, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the smallest of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = SIZES[:: len(NODES) - 1] if arguments.quick else SIZES
    rows = []
    print(
        f"{'nodes':>6} {'MiB':>5} {'tensors':>8} {'code':>6}  stall ms  protected ms  committed ms"
        "  restore ms"
    )
    for size in sizes:
        row = measure(size, arguments.rounds)
        rows.append({**asdict(size), **row})
        code = "+".join(map(str, size.code))
        print(
            f"{size.nodes:6} {size.mib:5} {size.tensors:8} {code:>6}  {row['stall_ms']:8.1f}"
            f"  {row['protected_ms']:12.1f}  {row['committed_ms']:12.1f}  {row['restore_ms']:10.1f}"
        )
    print(json.dumps({"growth": rows}))


if __name__ == "__main__":
    main()
