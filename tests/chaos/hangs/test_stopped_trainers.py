"""A trainer stopped in the middle of a save, while another takes over, that wakes up late."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecckpt.testing.local_cluster import LocalCluster
from tests.chaos.hangs.trainer import digest, state_of

pytestmark = pytest.mark.long

DEADLINE_S = 60.0
TRAINER = Path(__file__).with_name("trainer.py")


class Trainer:
    """The process, and what it says."""

    def __init__(self, cluster: LocalCluster, node: str) -> None:
        command = [sys.executable, str(TRAINER), str(cluster.root(node)), *cluster.addresses()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def save(self, step: int) -> None:
        self._process.stdin.write(f"save {step}\n".encode())

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def line(self) -> list[str]:
        """The words of the next line that it says."""
        raw = b""
        while not raw.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
            assert ready, f"nothing within {DEADLINE_S} s after {raw!r}"
            byte = self._process.stdout.read(1)
            assert byte, f"it ended after {raw!r}"
            raw += byte
        return raw.decode().split()


@pytest.mark.parametrize(("node", "delay_s"), [("n0", 0.0), ("n1", 0.01)])
def test_a_trainer_that_wakes_up_late_is_fenced_off(node: str, delay_s: float) -> None:
    with LocalCluster(nodes=4) as cluster, Trainer(cluster, "n0") as first:
        assert first.line()[:3] == ["restored", "0", "1"]
        first.save(1)
        assert [first.line()[0], first.line()[0]] == ["staged", "committed"]
        first.save(2)
        time.sleep(delay_s)
        first.signal(signal.SIGSTOP)
        with Trainer(cluster, node) as second:
            word, step, timeline, found = second.line()
            assert (word, timeline) == ("restored", "2")
            assert step in ("1", "2")
            assert found == digest(state_of(int(step)))
            second.save(12)
            assert [second.line()[0], second.line()[0]] == ["staged", "committed"]
            first.signal(signal.SIGCONT)
            words = first.line()
            if words[0] == "staged":
                words = first.line()
            # Committed it can only be if it was before the second took over, which then found it.
            assert words[:2] == ["failed", "2"] or (words == ["committed", "2"] and step == "2")
            first.save(3)
            words = first.line()
            words = first.line() if words[0] == "staged" else words
            assert words[:3] == ["failed", "3", "Fenced"], words
        with Trainer(cluster, "n2") as third:
            assert third.line() == ["restored", "12", "3", digest(state_of(12))]
