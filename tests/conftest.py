"""What every test leaves behind: nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ecckpt.testing import agent_forkserver
from ecckpt.testing.local_cluster import LocalCluster

settings.register_profile(
    "same-every-time", derandomize=True, database=None, deadline=None, max_examples=50
)
settings.load_profile("same-every-time")

# Inherited by every process that a test starts, so that agents of another worker, or of another run
# of tests, are not taken for ours.
_MARK = f"ECCKPT_TESTS_OF={os.getpid()}"
# A killed process takes a moment to leave /proc. Another run of tests beside this one has, for a
# moment, folders of processes that it has killed.
_PATIENCE_S = 10
_FILES_BEFORE = pytest.StashKey[set[str]]()


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


def _files() -> dict[str, str]:
    """Folders in /dev/shm, and the process in whose name each was made."""
    return {path.name: path.name.split("-")[2] for path in Path("/dev/shm").glob("ecckpt-*-*")}


def _own_files() -> set[str]:
    return {name for name, owner in _files().items() if owner == str(os.getpid())}


def _ownerless_files() -> set[str]:
    return {name for name, owner in _files().items() if not Path(f"/proc/{owner}").exists()}


def _await(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not done() and time.monotonic() < deadline_s:
        time.sleep(0.05)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Each process that runs tests answers for the processes, threads and files of its own."""
    files = _own_files()
    name, value = _MARK.split("=")
    os.environ[name] = value
    yield
    agent_forkserver.close()
    _await(lambda: not _processes() and not _own_files() - files)
    threads = [each.name for each in threading.enumerate() if each.name.startswith("ecckpt")]
    assert not _processes(), "processes left running"
    assert not _own_files() - files, "files left in /dev/shm"
    assert not threads, "threads left running"


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_FILES_BEFORE] = _ownerless_files()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the last worker: files of processes that have ended have no owner left to ask."""
    if hasattr(session.config, "workerinput"):
        return
    before = session.config.stash[_FILES_BEFORE]
    _await(lambda: not _ownerless_files() - before)
    if found := _ownerless_files() - before:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"ERROR: files left in /dev/shm: {sorted(found)}", red=True)


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
