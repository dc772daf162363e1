"""Kills while DCP saves, from a seed: ``python tests/chaos/dcp_kills.py FIRST_SEED LAST_SEED``.

A round: two ranks save step after step, at once or in the background; at a random moment a rank,
both, or an agent is killed. Then two of the five nodes may be lost, and one to three ranks load.
What must hold: no rank waits beyond its deadlines, what is loaded is one step, whole, and it is not
older than the last one of which any rank was told that it is saved.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ecckpt.integrations.torch_dcp import Reader, Writer
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.dcp import assert_same_world, checkpointer, load, save, world_state
from tests.support.forked import die, run_ranks

RANKS = 2
STEPS = 10
VICTIMS = ("rank 0", "rank 1", "all ranks", "agent 0", "agent 1")


def run(seed: int, folder: Path, say: Callable[[str], None]) -> None:
    """One round in ``folder``, which is empty."""
    chance = random.Random(seed)
    victim, later = chance.choice(VICTIMS), chance.choice([True, False])
    after_s, loaders = chance.uniform(0.0, 0.35), chance.randint(1, 3)
    with LocalCluster(nodes=5) as cluster:

        def train(rank: int) -> str:
            with checkpointer(cluster, "kills", rank, save_timeout_s=15.0) as one:
                Reader(one)
                _save(one, 1, later=False, note=folder / f"told.{rank}")
                kill = (cluster, rank, victim, after_s)
                threading.Thread(target=_kill, args=kill, daemon=True).start()
                for step in range(2, 2 + STEPS):
                    try:
                        _save(one, step, later=later, note=folder / f"told.{rank}")
                    except CheckpointException:
                        continue  # the next may succeed
                    except RuntimeError as error:  # gloo: the other rank is gone
                        return type(error).__name__
            return "all"

        ends = run_ranks(folder, RANKS, train, timeout_s=90)
        told = max(int((folder / f"told.{rank}").read_text()) for rank in range(RANKS))
        cluster.restart(*cluster.nodes)
        if chance.random() < 0.6:
            cluster.replace(*chance.sample(cluster.nodes, 2))

        def restart(rank: int) -> int:
            with checkpointer(cluster, "kills", rank) as one:
                blank = world_state(dist.get_world_size(), blank=True)
                step = load(one, blank).step
                assert_same_world(blank, world_state(dist.get_world_size(), seed=step))
                return step

        loaded = run_ranks(folder, loaders, restart)
    say(f"{seed}: {victim} after {after_s:.2f} s, {ends}, told of {told}, loaded {loaded}")
    assert len(set(loaded)) == 1
    assert loaded[0] >= told


def _save(one: Any, step: int, *, later: bool, note: Path) -> None:
    state = world_state(RANKS, seed=step)
    if later:
        dcp.async_save(state, storage_writer=Writer(one, step)).result(60)
    else:
        save(one, step, state)
    note.write_text(str(step))


def _kill(cluster: LocalCluster, rank: int, victim: str, after_s: float) -> None:
    time.sleep(after_s)
    if victim in (f"rank {rank}", "all ranks"):
        die()
    if victim == f"agent {rank}":
        os.killpg(cluster.pid(cluster.nodes[rank]), signal.SIGKILL)


def main() -> None:
    """Rounds with the seeds that the command line names."""
    for seed in range(int(sys.argv[1]), int(sys.argv[2]) + 1):
        with tempfile.TemporaryDirectory() as folder:
            run(seed, Path(folder), print)


if __name__ == "__main__":
    main()
