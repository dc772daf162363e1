"""All benches, one after another: ``python -m bench [--quick] [--record]``.

Each bench runs in its own process and prints its own tables. ``--record`` appends a dated line with
all figures to ``bench/results.jsonl`` and a row with the most important ones to
``bench/README.md``, and draws the charts in ``docs/`` anew (bench/chart.py). Run it on a machine
with nothing else to do; it takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

from bench import chart, record
from bench.measuring import touch_free_memory

RESULTS = Path(__file__).with_name("results.jsonl")

# Name, module and arguments, and those for ``--quick``.
RUNS = (
    ("save", ("bench.save",), ("bench.save",)),
    ("save, 20,000 tensors", ("bench.save", "--tensors", "20000"), ()),
    ("state", ("bench.state",), ("bench.state", "--mib", "64", "--rounds", "3")),
    ("state, 20,000 tensors", ("bench.state", "--tensors", "20000", "--rounds", "3"), ()),
    ("recovery", ("bench.recovery",), ("bench.recovery", "--rounds", "2", "--mib", "64")),
    ("recovery, 64 MiB", ("bench.recovery", "--mib", "64"), ()),
    ("recovery, 1 GiB", ("bench.recovery", "--mib", "1024", "--rounds", "3"), ()),
    ("recovery, zfec", ("bench.recovery", "--engine", "zfec", "--rounds", "3"), ()),
    ("copies", ("bench.copies",), ()),
    ("costs", ("bench.costs",), ("bench.costs", "--quick")),
    ("training", ("bench.training",), ("bench.training", "--rounds", "3")),
    ("growth", ("bench.growth",), ("bench.growth", "--quick", "--rounds", "2")),
    ("repair", ("bench.repair", "--json"), ()),
    ("planning", ("bench.planning",), ("bench.planning", "--nodes", "256")),
)


def run(command: tuple[str, ...]) -> dict[str, object]:
    """Run a bench, pass its output on, return the JSON in its last line."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        last = line
        if not line.startswith("{"):
            print(line, end="", flush=True)
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed")
    return dict(json.loads(last))


def main() -> None:
    """Run all benches; record their figures with ``--record``."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--record", action="store_true", help="in bench/results.jsonl and docs/")
    arguments = parser.parse_args()
    touch_free_memory()
    found: dict[str, object] = {}
    for name, whole, quick in RUNS:
        command = quick if arguments.quick else whole
        if command:
            print(f"\n== {name}: python -m {' '.join(command)}", flush=True)
            found[name] = run(command)
    if arguments.record:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        row = {"date": today, "machine": record.machine(), "versions": record.versions(), **found}
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if not arguments.quick:
            record.add_run(row)
        chart.draw(row)


if __name__ == "__main__":
    main()
