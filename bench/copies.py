"""A shard made safe by whole copies, and by coding: ``python -m bench.copies``.

The state is 256 MiB in all, on this machine. In each round

- one rank of ecckpt saves, until all ten fragments of RS(8, 2) are verified on other nodes (any
  three nodes may be lost then);
- 1, 2 or 3 processes pull the whole shard from its agent through the same transport, check nothing
  and keep it in memory that they had before: the least cost of keeping 1, 2 or 3 whole copies;
- nvidia-resiliency-ext, where it is installed, runs cliques of 2 and of 4 ranks, which share the
  256 MiB and keep 1 and 3 copies on other ranks, over gloo, in files in tmpfs; a rank also loads
  from its own file (``bench.cliques``).

Times are medians over the rounds, in seconds and in units of one memcpy of the 256 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import statistics
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench import cliques
from bench.measuring import Timed, timed
from bench.pulling import Pullers
from bench.recovery import COPIES, NODES, checkpointer, plain_pulls
from bench.save import STATE_BYTES, WARM_UP_ROUNDS, state_of
from ecckpt.testing.local_cluster import LocalCluster

ROUNDS = 3


@contextlib.contextmanager
def ours(mib: int) -> Iterator[dict[str, Timed]]:
    """Return cases of coding, and of only copying, from the same agents."""
    state = state_of(mib, None)
    with (
        LocalCluster(nodes=NODES) as cluster,
        Pullers(COPIES, room_bytes=(mib + 1) << 20) as pullers,
        checkpointer(cluster, "n0") as ckpt,
    ):
        ckpt.restore(state)
        steps = iter(range(1 << 20))
        for _ in range(WARM_UP_ROUNDS):
            assert ckpt.save(next(steps), state, patience_s=120).wait(120)

        def protected() -> float:
            handle = ckpt.save(next(steps), state, patience_s=120)
            assert handle.wait(120)
            assert handle.protected_s is not None
            return handle.protected_s

        def copied(count: int) -> Callable[[], float]:
            return lambda: pullers.seconds(plain_pulls(cluster, "n0")[1][:count])

        yield {
            "ecckpt RS(8, 2), protected": protected,
            **{
                f"our transport, {n} whole cop{'ies' if n > 1 else 'y'}": copied(n)
                for n in range(1, COPIES + 1)
            },
        }


def theirs(stack: contextlib.ExitStack, mib: int, factors: tuple[int, ...]) -> dict[str, Timed]:
    """Return cases of cliques with these numbers of ranks."""
    cases: dict[str, Timed] = {}
    for factor in factors:
        members = stack.enter_context(cliques.clique(factor, mib))
        name = f"nvidia-resiliency-ext, clique of {factor}"

        cases |= {
            f"{name}, exchange (stall at least)": cliques.together(members, "exchange"),
            f"{name}, save": cliques.together(members, "save"),
            f"{name}, load, into the state": cliques.together(members, "load"),
        }
    return cases


def measure(mib: int, rounds: int, factors: tuple[int, ...]) -> dict[str, list[float]]:
    """Return the seconds of every case in every round."""
    source, target = np.ones(mib << 20, np.uint8), np.ones(mib << 20, np.uint8)

    def copy() -> None:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)

    with contextlib.ExitStack() as stack:
        cases = {"memcpy": timed(copy), **stack.enter_context(ours(mib))}
        cases |= theirs(stack, mib, factors)
        for case in cases.values():
            case()  # to warm up
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, case in cases.items():
                found[name].append(case())
    return found


def main() -> None:
    """Print medians, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.copies")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--mib", type=int, default=STATE_BYTES >> 20)
    parser.add_argument("--quick", action="store_true", help="no clique of four")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    factors = (2,) if arguments.quick else (2, 4)
    if not cliques.INSTALLED:
        factors = ()
        print(cliques.MISSING)
    found = measure(arguments.mib, arguments.rounds, factors)
    row = {name: statistics.median(seconds) for name, seconds in found.items()}
    print(f"{'':62} {'x memcpy':>9} {'median s':>9}")
    for name, seconds in row.items():
        print(f"{name:62} {seconds / row['memcpy']:9.2f} {seconds:9.3f}")
    print(json.dumps({"mib": arguments.mib, **row}))


if __name__ == "__main__":
    main()
