"""Saving and restoring beside the peers, in units of one memcpy: ``python -m bench.state``.

The state is that of ``bench.save``: 256 MiB of CPU tensors, hundreds of a small GPT or, with
``--tensors 20000``, that many of equal size. Each peer runs in its own process with as much state
(``bench.files``, ``bench.deepspeed_engines``); files are in tmpfs, as ecckpt's memory is. In each
round every case runs once, so that a change of the machine's speed meets all of them. A figure is
the median over the rounds of (its time / the round's ``memcpy`` of as many bytes into memory that
was touched before). ecckpt codes with RS(3, 2) over six agents on this machine, which continues
after its ``save`` returns; the next case begins after the commit.

- *stall* cases are timed until the caller may change the state, the others until all is written.
- *into the state* cases end with the values in the tensors that were there before.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import ecckpt
from bench import deepspeed_engines
from bench.elsewhere import Elsewhere
from bench.files import dcp_files, one_file
from bench.measuring import SLOW_ROUNDS, Timed, timed
from bench.record import machine, versions
from bench.save import STATE_BYTES, WARM_UP_ROUNDS, state_of
from ecckpt.integrations.torch_dcp import Reader, Writer
from ecckpt.testing.local_cluster import LocalCluster

ROUNDS = 7
SLOW_S = 2.0  # such cases run in the first rounds only
RECORD = Path(__file__).parent / "STATE.md"

State = dict[str, dict[str, torch.Tensor]]


def copies(state_bytes: int) -> dict[str, Timed]:
    """Return the case of the unit, one memcpy."""
    source, target = np.ones(state_bytes, np.uint8), np.ones(state_bytes, np.uint8)

    def copy() -> None:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, state_bytes)

    return {"memcpy": timed(copy)}


@contextlib.contextmanager
def others(mib: int, tensors: int | None) -> Iterator[dict[str, Timed]]:
    """Yield the cases of peers that write files, each in its own process; name missing peers."""
    makers = {"torch and safetensors": one_file, "DCP": dcp_files}
    if deepspeed_engines.INSTALLED:
        makers["DeepSpeed"] = deepspeed_engines.engines
    else:
        print("without DeepSpeed, which is not installed: pip install 'ecckpt[bench]'")
    if tensors:
        print("without peers that share each tensor with a process: too many open files")
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(Elsewhere(make, mib, tensors)) for make in makers.values()]
        yield {name: case for each in started for name, case in each.cases().items()}


@contextlib.contextmanager
def our_cases(state: State) -> Iterator[dict[str, Timed]]:
    """Yield cases of Checkpointer, and of the same memory under DCP.

    The runs that restore are not those that save, because a restore begins a new timeline, whose
    first save has no slot from before.
    """
    with LocalCluster(nodes=6) as cluster, contextlib.ExitStack() as stack:
        agents, root = cluster.addresses(), cluster.root("n0")
        saving, under, restoring, loading = (
            stack.enter_context(ecckpt.Checkpointer(run, code=(3, 2), root=root, agents=agents))
            for run in ("saves", "dcp-saves", "restores", "dcp-loads")
        )
        steps = iter(range(1 << 20))
        for each in (saving, restoring):
            each.restore(state)
        for each in (under, loading):
            Reader(each)
        assert restoring.save(0, state).wait(120)
        dcp.save(state, storage_writer=Writer(loading, 0))

        def save_later() -> Any:
            return dcp.async_save(state, storage_writer=Writer(under, next(steps)))

        cases = {
            "ecckpt save, stall": timed(
                lambda: saving.save(next(steps), state, patience_s=120),
                lambda handle: handle.wait(120),
            ),
            "ecckpt save, committed": timed(
                lambda: saving.save(next(steps), state, patience_s=120).wait(120)
            ),
            "ecckpt restore, into the state": timed(
                lambda: restoring.restore(state), lambda restored: restored.reprotection.wait(120)
            ),
            "dcp.save to ecckpt, committed": timed(
                lambda: dcp.save(state, storage_writer=Writer(under, next(steps)))
            ),
            "dcp.async_save to ecckpt, stall": timed(save_later, lambda future: future.result(120)),
            "dcp.load from ecckpt, into the state": timed(
                lambda: dcp.load(state, storage_reader=Reader(loading))
            ),
        }
        for _ in range(WARM_UP_ROUNDS):
            for name, case in cases.items():
                if "save" in name:
                    case()
        yield cases


def measure(mib: int, tensors: int | None, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every case in every round."""
    state = state_of(mib, tensors)
    state_bytes = sum(each.nbytes for kind in state.values() for each in kind.values())
    with our_cases(state) as ours, others(mib, tensors) as theirs:
        cases = {**copies(state_bytes), **ours, **theirs}
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        slow = {name for name, case in cases.items() if case() > SLOW_S}  # this round also warms up
        for turn in range(rounds):
            for name, case in cases.items():
                if turn < SLOW_ROUNDS or name not in slow:
                    seconds[name].append(case())
    return seconds


def record(ratios: dict[str, float], tensors: int) -> None:
    """Append a dated row to STATE.md, whose table has a column for each case."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    names = [line for line in RECORD.read_text().splitlines() if line.startswith("| date")]
    columns = [cell.strip() for cell in names[-1].strip("|").split("|")][4:]
    cells = [f"{ratios[name]:.2f}" if name in ratios else "" for name in columns]
    facts = [today, machine(), torch.__version__, f"{tensors:,}"]
    RECORD.write_text(RECORD.read_text() + f"| {' | '.join(facts + cells)} |\n")


def main() -> None:
    """Print ratios and medians, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="bench.state", description=__doc__)
    parser.add_argument("--tensors", type=int, help="this many of equal size, not those of a GPT")
    parser.add_argument("--mib", type=int, default=STATE_BYTES >> 20, help="size of the state")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--record", action="store_true", help="append a row to bench/STATE.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings():  # one process only is intended
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        seconds = measure(chosen.mib, chosen.tensors, chosen.rounds)
    unit = seconds["memcpy"]
    ratios = {
        name: statistics.median(each / base for each, base in zip(taken, unit, strict=False))
        for name, taken in seconds.items()
    }
    print(f"{'':40} {'x memcpy':>9} {'median s':>9}")
    for name, taken in seconds.items():
        print(f"{name:40} {ratios[name]:9.2f} {statistics.median(taken):9.3f}")
    tensors = sum(map(len, state_of(1, chosen.tensors).values()))
    print(json.dumps({"tensors": tensors, "versions": versions(), "x_memcpy": ratios}))
    if chosen.record:
        record(ratios, tensors)


if __name__ == "__main__":
    main()
