"""A training that is killed and resumed goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ecckpt.testing.local_cluster import LocalCluster

pytestmark = pytest.mark.long

HAS_TORCHDATA = importlib.util.find_spec("torchdata") is not None
PROGRAM = Path(__file__).with_name("exact_training.py")
STARTS = {5: 0, 10: 5, 15: 11, -1: 15}  # killed at: first step, one after the last save


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where all trainings left their results, and what they complained about."""
    modes = ["plain", "ddp", "fsdp"] + ["torchdata"] * HAS_TORCHDATA
    folder = tmp_path_factory.mktemp("exact")
    # torchdata calls it in torch 2.13, which no longer wants it.
    warnings = ["-W", "error", "-W", "ignore:'set_vital' is deprecated"]
    with LocalCluster(nodes=1) as cluster:
        done = subprocess.run(
            [sys.executable, *warnings, PROGRAM, cluster.root("n0"), folder, *modes],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=110,
        )
    return folder, done.stderr[-3000:]


@pytest.mark.parametrize("mode", ["plain", "torchdata", "ddp", "fsdp"])
def test_killed_at_5_10_and_15(mode: str, results: tuple[Path, str]) -> None:
    if mode == "torchdata" and not HAS_TORCHDATA:
        pytest.skip("torchdata is not installed")
    folder, complaints = results
    for rank in range(2 if mode in ("ddp", "fsdp") else 1):
        want = _read(folder / f"{mode}.undisturbed.{rank}")
        assert len({each["loss"] for each in want}) == len(want) == 20, complaints
        assert len({each["scale"] for each in want}) > 2
        killed = _read(folder / f"{mode}.killed.{rank}")
        for kill, first in STARTS.items():
            steps = [each for each in killed if each["start"] == kill]
            last = 19 if kill < 0 else kill
            assert [each["step"] for each in steps] == list(range(first, last + 1)), complaints
            for each in steps:
                assert each == want[each["step"]] | {"start": kill}
