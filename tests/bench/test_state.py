"""The bench of saving and restoring runs, with figures for every case."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.deepspeed_engines import INSTALLED

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_every_case_has_a_figure_and_a_column():
    command = [sys.executable, "-m", "bench.state", "--mib", "4", "--rounds", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ratios = json.loads(done.stdout.splitlines()[-1])["x_memcpy"]
    assert ratios.pop("memcpy") == 1
    assert all(ratio > 0 for ratio in ratios.values())
    lines = (ROOT / "bench" / "STATE.md").read_text().splitlines()
    header = [line for line in lines if line.startswith("| date")][-1]
    columns = [cell.strip() for cell in header.strip("|").split("|")][4:]
    installed = [name for name in columns if INSTALLED or not name.startswith("DeepSpeed")]
    assert list(ratios) == installed
