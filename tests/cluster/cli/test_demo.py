"""``ecckpt demo`` as its user runs it, small."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def _demo(*arguments: str) -> tuple[int, list[str], str]:
    done = subprocess.run(
        [sys.executable, "-m", "ecckpt", "demo", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_losing_as_many_nodes_as_promised_ends_bit_identical() -> None:
    status, lines, errors = _demo("--nodes=3", "--code=1+1", "--lose=2", "--steps=8", "--json")
    assert status == 0, "\n".join(lines) + errors
    outcome = json.loads(lines[-1])
    assert outcome["bit_identical"] is True
    assert outcome["nodes_lost"] == 2
    assert outcome["restored_step"] >= 2
    assert outcome["sources"] == {"peers": 2, "home": 1}
    for name in ("lost_steps", "save_stall_s", "stall_over_memcpy", "protected_s", "restore_s"):
        assert outcome[name] >= 0
    assert any("empty nodes replace them" in line for line in lines)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_losing_more_tells_that_nothing_is_left() -> None:
    status, lines, errors = _demo("--nodes=2", "--code=1+0", "--lose=2", "--steps=6", "--json")
    assert status == 1, "\n".join(lines) + errors
    outcome = json.loads(lines[-1], parse_constant=pytest.fail)  # NaN is no JSON
    assert outcome["restored_step"] is None
    assert outcome["restore_s"] is None
    assert any(line.split() == ["time", "to", "restore", "-", "s"] for line in lines)
    assert outcome["bit_identical"] is False
    assert any("no generation can be rebuilt" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--code=3+2", "--nodes=5"], "TooFewNodes"),
        (["--code=many"], "InvalidCode"),
        (["--lose=9"], "InvalidConfig"),
        (["--steps=2"], "InvalidConfig"),
    ],
)
def test_arguments_that_cannot_work(arguments: list[str], words: str) -> None:
    status, _, errors = _demo(*arguments)
    assert status == 2
    assert words in errors
