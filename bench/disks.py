"""The cost of disks to saves: ``python -m bench.disks FOLDER``.

One rank with a shard of 64 MiB (``--mib``) on 4 real agents of this machine, RS(2, 1), with disks
in that folder and without, in turns. Saves follow one another at once, or with a pause in which the
disks finish. The first saves, which have to allocate the memory, are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path

import torch

import ecckpt
from ecckpt.testing.local_cluster import LocalCluster

RUN = "bench"
WARM = 8


def saves(disk: Path | None, *, mib: int, count: int, pause_s: float) -> list[float]:
    """Return how long each save took to commit, in seconds."""
    state = {"weights": torch.rand(mib << 18)}
    times = []
    with (
        LocalCluster(nodes=4, disk=disk) as cluster,
        ecckpt.Checkpointer(
            RUN, code=(2, 1), root=cluster.root("n0"), agents=cluster.addresses()
        ) as ckpt,
    ):
        ckpt.restore(state)
        for step in range(1, WARM + count + 1):
            started_s = time.monotonic()
            ckpt.save(step, state, patience_s=60).wait(60)
            times.append(time.monotonic() - started_s)
            time.sleep(pause_s)
    return times[WARM:]


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path, help="a folder on the disk")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--saves", type=int, default=16, help="in each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pause-s", type=float, default=1.0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # disks being slower than saves without a pause
    found: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for pause_s in (0.0, given.pause_s):
            for kind in ("memory", "disk"):
                with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                    disk = Path(folder) if kind == "disk" else None
                    times = saves(disk, mib=given.mib, count=given.saves, pause_s=pause_s)
                name = f"{kind}, {'with pauses' if pause_s else 'one after another'}"
                found.setdefault(name, []).extend(times)
    for name, times in found.items():
        print(json.dumps({"saves": name, "commit_ms": round(1000 * statistics.median(times), 1)}))


if __name__ == "__main__":
    main()
