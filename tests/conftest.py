"""What every test leaves behind: nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ecckpt.testing import agent_forkserver
from ecckpt.testing.local_cluster import LocalCluster

settings.register_profile(
    "same-every-time", derandomize=True, database=None, deadline=None, max_examples=50
)
settings.load_profile("same-every-time")

# Inherited by every process that a test starts, so that others' agents are not taken for ours.
_MARK = f"ECCKPT_TESTS_OF={os.getpid()}"


def _processes() -> dict[int, str]:
    """Processes that our tests started and that still run."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) == os.getpid() or _MARK.encode() not in (
                (path / "environ").read_bytes().split(b"\0")
            ):
                continue
            found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended, or is a zombie that init has not reaped
            continue
    return found


def _files() -> set[str]:
    """Folders in /dev/shm of this process, or of one that has ended."""
    names = {path.name for path in Path("/dev/shm").glob("ecckpt-*-*")}
    owners = {name: name.split("-")[2] for name in names}
    return {
        name
        for name, owner in owners.items()
        if owner == str(os.getpid()) or not Path(f"/proc/{owner}").exists()
    }


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    files = _files()
    name, value = _MARK.split("=")
    os.environ[name] = value
    yield
    agent_forkserver.close()
    # A killed process takes a moment to leave /proc. Another run of tests, beside this one, has
    # folders of processes that it has killed, for a moment.
    deadline_s = time.monotonic() + 10
    while (_processes() or _files() - files) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    threads = [each.name for each in threading.enumerate() if each.name.startswith("ecckpt")]
    assert not _processes(), "processes left running"
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
