"""What a save and a restore cost: ``python -m bench.costs``.

A row has the CPU seconds per GB of state, of the calling process (of a clique: all its ranks) and
of all other processes that it started; bytes over loopback; memory, kept afterwards and at the
most, beyond the memory before (the first save; each restore); and seconds. Bytes and memory are per
byte of state. ecckpt runs RS(8, 2) on eleven agents, for 64 MiB, 256 MiB and 1 GiB a rank, with
three nodes lost or (256 MiB) one or two; the peers run 256 MiB.

- ecckpt's save lasts until it is committed, its seconds until it is protected; ``dcp.async_save``
  lasts until all is written, its seconds until the caller may go on. ecckpt's other processes are
  all eleven agents, as if this machine were all nodes: encoding, serving, pulling and checking of
  one shard.
- Memory is the processes' private memory and all of /dev/shm. /dev/shm and loopback belong to the
  whole machine: no other program may use them meanwhile.
- CPU and bytes are means over the rounds, seconds medians; a separate round looks for the most
  memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench import cliques, usage
from bench.elsewhere import Elsewhere
from bench.files import dcp_files, one_file
from bench.measuring import Timed
from bench.recovery import COPIES, NODES, K, M, checkpointer, lose
from bench.recovery import restore as restored_s
from bench.save import WARM_UP_ROUNDS, state_of
from ecckpt.testing.local_cluster import LocalCluster

SIZES_MIB = (64, 256, 1024)
PEERS_MIB = 256
ROOM = 10  # times the state: its copy at home, fragments, the next generation, the state itself
GB = 1e9

# The maker of a peer's cases, the case that saves, and the case that loads, if measured.
PEERS = (
    (one_file, "torch.save", "torch.load, into the state"),
    (one_file, "safetensors save_file", "safetensors load_file, into the state"),
    (dcp_files, "dcp.save", "dcp.load, into the state"),
    (dcp_files, "dcp.async_save, stall", ""),
    (dcp_files, "dcp.async_save by a process, stall", ""),
)


@dataclass(frozen=True)
class Cost:
    """Costs of one save or restore, per byte of state unless the name has another unit."""

    what: str
    mib: int
    seconds: float
    caller_cpu_s_per_gb: float
    other_cpu_s_per_gb: float
    kept: float
    most: float
    sent: float

    def __str__(self) -> str:
        return (
            f"{self.what:48} {self.mib:5} {self.seconds:8.3f} {self.caller_cpu_s_per_gb:7.2f} "
            f"{self.other_cpu_s_per_gb:7.2f} {self.kept:6.2f} {self.most:6.2f} {self.sent:6.2f}"
        )


HEADINGS = (
    f"{'':48} {'MiB':>5} {'seconds':>8} {'CPU/GB':>7} {'others':>7} "
    f"{'kept':>6} {'most':>6} {'sent':>6}"
)


@contextlib.contextmanager
def coded(folder: Path, mib: int) -> Iterator[dict[str, Timed]]:
    """Cases for ``bench.elsewhere``: all saves precede the first restore, which ends the saver."""
    state = state_of(mib, None)
    with LocalCluster(nodes=NODES, folder=folder) as cluster, contextlib.ExitStack() as stack:
        home, steps = cluster.nodes[0], iter(range(1 << 20))
        ckpt = stack.enter_context(checkpointer(cluster, home))
        ckpt.restore(state)
        stalls_s = []

        def save() -> float:
            handle = ckpt.save(next(steps), state, patience_s=120)
            if not handle.wait(300) or handle.held != K + M:
                raise RuntimeError(f"{handle.held} fragments held: {handle.problems}")
            stalls_s.append(handle.stall_s)
            return handle.protected_s

        def last_stall() -> float:
            return statistics.median(stalls_s[WARM_UP_ROUNDS:])

        def restore() -> float:
            stack.close()
            return restored_s(cluster, home, state, "home")

        def lose_some(count: int) -> float:
            nonlocal home
            home = lose(cluster, home, count)
            return 0.0

        def restore_elsewhere() -> float:
            return restored_s(cluster, home, state, "peers")

        yield {
            "save": save,
            "stall": last_stall,
            "restore": restore,
            **{f"lose {n}": functools.partial(lose_some, n) for n in range(1, COPIES + 1)},
            "restore elsewhere": restore_elsewhere,
        }


class Meter:
    """Measures cases of processes that hold ``mib`` of state together."""

    def __init__(self, callers: Sequence[Elsewhere], mib: int, rounds: int) -> None:
        self._callers, self._mib, self._rounds = callers, mib, rounds

    def save(self, what: str, case: str, *, warm_ups: int = 1) -> Cost:
        """Return the costs of a save; memory counts from before the first save."""
        return self._cost(what, case, lambda: 0.0, warm_ups, self._memory_bytes())

    def restore(self, what: str, case: str, *, before: str = "") -> Cost:
        """Return the costs of a restore; the case ``before`` runs ahead of each, uncounted."""
        prepare = cliques.together(self._callers, before) if before else lambda: 0.0
        return self._cost(what, case, prepare, 1, None)

    def _cost(
        self, what: str, case: str, prepare: Timed, warm_ups: int, before_bytes: int | None
    ) -> Cost:
        run = cliques.together(self._callers, case)
        for _ in range(warm_ups):
            prepare()
            run()
        seconds, caller_s, other_s, sent = [], 0.0, 0.0, 0
        for _ in range(self._rounds):
            prepare()
            cpu_before, sent_before = self._cpu_s(), usage.loopback_bytes()
            seconds.append(run())
            sent += usage.loopback_bytes() - sent_before
            cpu_after = self._cpu_s()
            caller_s += cpu_after[0] - cpu_before[0]
            other_s += cpu_after[1] - cpu_before[1]
        prepare()
        before_bytes = before_bytes or self._memory_bytes()
        with usage.Peak(self._pids()) as peak:
            run()
        kept_bytes = self._memory_bytes() - before_bytes
        state_bytes = self._mib << 20
        work = self._rounds * state_bytes
        return Cost(
            *(what, self._mib, statistics.median(seconds)),
            *(GB * caller_s / work, GB * other_s / work),
            *(kept_bytes / state_bytes, (peak.most_bytes - before_bytes) / state_bytes),
            sent / work,
        )

    def _pids(self) -> list[int]:
        return [pid for each in self._callers for pid in usage.tree(each.pid)]

    def _cpu_s(self) -> tuple[float, float]:
        callers = [each.pid for each in self._callers]
        whole_s, callers_s = usage.cpu_s(self._pids()), usage.cpu_s(callers)
        return callers_s, whole_s - callers_s

    def _memory_bytes(self) -> int:
        return usage.private_bytes(self._pids()) + usage.tmpfs_bytes()


def ours(mib: int, rounds: int) -> Iterator[Cost]:
    """Yield the costs of ecckpt; if the machine is too small, print that and yield nothing."""
    free_bytes = shutil.disk_usage(usage.TMPFS).free
    if free_bytes < ROOM * mib << 20:
        print(
            f"{mib} MiB a rank left out: {usage.TMPFS} has {free_bytes >> 20:,} MiB free, "
            f"{ROOM * mib:,} are needed"
        )
        return
    with Elsewhere(coded, mib) as caller:
        caller.names()
        meter = Meter([caller], mib, rounds)
        yield meter.save("ecckpt save", "save", warm_ups=WARM_UP_ROUNDS)
        print(f"{'  its stall':48} {mib:5} {caller.timed('stall')():8.3f}")
        yield meter.restore("ecckpt restore, process died", "restore")
        for lost in range(1 if mib == PEERS_MIB else COPIES, COPIES + 1):
            what = f"ecckpt restore, {lost} node{'s' if lost > 1 else ''} lost"
            yield meter.restore(what, "restore elsewhere", before=f"lose {lost}")


def theirs(mib: int, rounds: int) -> Iterator[Cost]:
    """Yield the costs of the peers, each in new processes."""
    for make, save, load in PEERS:
        with Elsewhere(make, mib, None) as caller:
            caller.names()
            meter = Meter([caller], mib, rounds)
            yield meter.save(save.removesuffix(", stall"), save)
            if load:
                yield meter.restore(load, load)
    if not cliques.INSTALLED:
        print(cliques.MISSING)
        return
    with cliques.clique(2, mib) as members:
        meter = Meter(members, mib, rounds)
        yield meter.save("nvidia-resiliency-ext, clique of 2, save", "save")
        yield meter.restore("nvidia-resiliency-ext, clique of 2, load", "load")


def main() -> None:
    """Print a table, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.costs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="64 MiB, and no peers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(HEADINGS)
    rows = []
    for mib in SIZES_MIB[:1] if arguments.quick else SIZES_MIB:
        for cost in ours(mib, arguments.rounds):
            rows.append(cost)
            print(cost, flush=True)
    for cost in theirs(PEERS_MIB, arguments.rounds) if not arguments.quick else ():
        rows.append(cost)
        print(cost, flush=True)
    print(json.dumps({"costs": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
