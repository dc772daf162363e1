"""What every test leaves behind: nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecckpt.testing import LocalCluster


def _agents() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ecckpt" in words and b"agent" in words:
            found.add(int(path.parent.name))
    return found


def _files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("ecckpt-*")}


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    agents, files = _agents(), _files()
    yield
    deadline_s = time.monotonic() + 10  # a killed process takes a moment to leave /proc
    while _agents() - agents and time.monotonic() < deadline_s:
        time.sleep(0.05)
    threads = [each.name for each in threading.enumerate() if each.name.startswith("ecckpt")]
    assert not _agents() - agents, "agents left running"
    assert not _files() - files, "files left in /dev/shm"
    assert not threads, "threads left running"


@pytest.fixture
def cluster6() -> Iterator[LocalCluster]:
    """Six fresh agents."""
    with LocalCluster(nodes=6) as cluster:
        yield cluster


@pytest.fixture
def cluster1() -> Iterator[LocalCluster]:
    """One fresh agent."""
    with LocalCluster(nodes=1) as cluster:
        yield cluster
