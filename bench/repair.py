"""The time to repair a lost holder, and the cost of watching: ``python -m bench.repair``.

One rank with a shard of 64 MiB (``--mib``) on 12 real agents of this machine, RS(8, 2), one of them
a spare. No save is made after the first. In each round

- a holder is lost and comes back at its address with nothing in memory;
- a holder is lost for good, until the spare node has what it held; it then comes back, and a save
  puts everything in its place again.

It also measures the CPU time of all agents over 20 s without any work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ecckpt
from ecckpt.testing.local_cluster import LocalCluster, children

K, M = 8, 2
FULL = M + 1
RUN = "bench"
IDLE_S = 20.0


def guard(cluster: LocalCluster) -> dict[str, Any]:
    """Return the state of the holders that the home's agent reports."""
    (run,) = cluster.client("n0").status()["runs"].values()
    found: dict[str, Any] = run["guard"]
    return found


def until(cluster: LocalCluster, true: Callable[[dict[str, Any]], bool], started_s: float) -> float:
    """Wait until ``true`` holds of the guard; return the seconds since ``started_s``."""
    while not true(guard(cluster)):
        if time.monotonic() > started_s + 60:
            raise TimeoutError(guard(cluster))
        time.sleep(0.02)
    return time.monotonic() - started_s


def cpu_s(cluster: LocalCluster) -> float:
    """Return the CPU time of all agents so far."""
    agents = [cluster.pid(node) for node in cluster.nodes]
    pids = [each for agent in agents for each in (agent, *children(agent))]
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def measure(rounds: int, mib: int) -> dict[str, Any]:
    """Return medians over the rounds, in seconds."""
    times: dict[str, list[float]] = {"emptied": [], "lost": [], "spare": []}
    state = {"weights": torch.rand(mib << 18)}
    with LocalCluster(nodes=K + M + 2) as cluster:
        ckpt = ecckpt.Checkpointer(
            RUN, code=(K, M), root=cluster.root("n0"), agents=cluster.addresses()
        )
        with ckpt:
            ckpt.restore(state)
            for step in range(1, rounds + 1):
                ckpt.save(step, state, patience_s=60).wait(60)
                until(cluster, lambda seen: seen["margin"] == FULL, time.monotonic())
                started_s = time.monotonic()
                cluster.empty("n3")
                until(cluster, lambda seen: seen["margin"] != FULL, started_s)
                full_s = until(cluster, lambda seen: seen["margin"] == FULL, started_s)
                times["emptied"].append(full_s)
                started_s = time.monotonic()
                cluster.kill("n5")
                times["lost"].append(until(cluster, lambda seen: bool(seen["lost"]), started_s))
                full_s = until(cluster, lambda seen: seen["margin"] == FULL, started_s)
                times["spare"].append(full_s)
                cluster.empty("n5")
                until(cluster, lambda seen: not seen["lost"], time.monotonic())
            before_s = cpu_s(cluster)
            time.sleep(IDLE_S)
            idle_s = cpu_s(cluster) - before_s
    asked = (K + M) * IDLE_S / 2.0
    return {name: round(statistics.median(each), 2) for name, each in times.items()} | {
        "cpu_ms_per_question": round(1000 * idle_s / asked, 2),
        "mib": mib,
        "rounds": rounds,
    }


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.rounds, arguments.mib)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"RS({K}, {M}), a shard of {found['mib']} MiB, {found['rounds']} rounds, medians")
    print(f"holder back with empty memory: full margin again {found['emptied']} s after its loss")
    print(f"holder lost for good: noticed after {found['lost']} s, full margin {found['spare']} s")
    print(f"asking one holder once: {found['cpu_ms_per_question']} ms of CPU, both sides together")


if __name__ == "__main__":
    main()
