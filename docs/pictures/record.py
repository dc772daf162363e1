"""Runs `ecckpt demo` and writes down what it prints, and when, to ``demo.cast``.

    python docs/pictures/record.py

The transcript is an asciicast, version 2: a header and one line for each line of output. It takes
two minutes or so; ``demo.py`` draws it. Nothing of the output is changed or left out.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

CAST = Path(__file__).with_name("demo.cast")
COMMAND = ("ecckpt", "demo")
COLUMNS = 78  # of the terminal that is shown: longer lines are wrapped there
ROWS = 24


def processor() -> str:
    """The model of this machine's CPU, and how many there are."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {models[0] if models else platform.machine()}"


def record(program: str) -> tuple[list[tuple[float, str]], int]:
    """What the demo printed, each line with the seconds since its start, and its exit status."""
    started_s = time.monotonic()
    events = []
    with subprocess.Popen([program, *COMMAND[1:]], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append((round(time.monotonic() - started_s, 3), line.rstrip("\n")))
            print(line, end="", flush=True)
    return events, process.returncode


def main() -> int:
    """Record once; the transcript is written only if the demo succeeded."""
    beside = Path(sys.executable).with_name(COMMAND[0])
    program = str(beside) if beside.exists() else shutil.which(COMMAND[0])
    if program is None:
        sys.exit(f"{COMMAND[0]} is not installed beside {sys.executable}")
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    load = os.getloadavg()[0]
    events, status = record(program)
    if status:
        return status
    header = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "timestamp": int(now.timestamp()),
        "command": " ".join(COMMAND),
        "title": "ecckpt demo",
        "date": now.isoformat(),
        "machine": f"{processor()}, load {load:.1f} before the start",
    }
    lines = [json.dumps(header)]
    lines += [json.dumps([at_s, "o", f"{line}\r\n"], ensure_ascii=False) for at_s, line in events]
    CAST.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
