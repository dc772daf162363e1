"""How an agent leaves room: its CPUs, its priority, its pace."""

import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ecckpt.agent.runtime.cpu_limits import ProcessLimits, parse_cpus
from ecckpt.agent.runtime.rate_limit import pace_of
from ecckpt.client.cluster.local_agent import await_agent, local_client, start
from ecckpt.client.config import NodeConfig
from ecckpt.errors import InvalidConfig
from ecckpt.testing.local_cluster import children


def test_lists_of_cpus():
    assert parse_cpus("") == set()
    assert parse_cpus("0-3,8") == {0, 1, 2, 3, 8}
    assert parse_cpus("5") == {5}
    for wrong in ("a", "1-", "1,,2", "-1", "0x3", "99999-99999"):
        with pytest.raises(InvalidConfig):
            parse_cpus(wrong)


def test_what_cannot_be_had_is_said():
    before = os.sched_getaffinity(0)
    with pytest.raises(InvalidConfig, match="cannot have CPUs 8000"):
        ProcessLimits(cpus="8000").apply()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("ECCKPT_NICE", "20"), ("ECCKPT_NICE", "low"), ("ECCKPT_PULL_MB_S", "-1")],
)
def test_settings_that_are_none(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfig, match=name):
        NodeConfig.from_environment()


@contextmanager
def agent(root, **manners):
    """The process ids of an agent, arbiter and worker."""
    config = NodeConfig(
        root=root, node="n1", domain="n1", listen="127.0.0.1:0", token_file=None, **manners
    )
    process = start(config)
    try:
        await_agent(local_client(root), root / "agent.log", process=process)
        yield (process.pid, *children(process.pid))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(prefix="ecckpt-manners-", dir="/dev/shm") as folder:
        yield Path(folder) / "n1"


def test_an_agent_keeps_to_its_cpus_and_priority(root):
    last = max(os.sched_getaffinity(0))
    with agent(root, cpus=str(last), nice=3) as pids:
        for pid in pids:
            assert os.sched_getaffinity(pid) == {last}
            assert os.getpriority(os.PRIO_PROCESS, pid) == 3


def test_an_agent_that_a_bound_rank_starts_is_not_bound(root):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        with agent(root) as pids:
            assert all(os.sched_getaffinity(pid) == before for pid in pids)
    finally:
        os.sched_setaffinity(0, before)


def test_a_pace_is_kept_by_several_threads_together():
    pace = pace_of(1e6)
    started_s = time.monotonic()
    threads = [threading.Thread(target=pace, args=(50_000,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started_s >= 0.2


def test_nothing_is_saved_up():
    pace = pace_of(1e6)
    pace(10_000)
    time.sleep(0.1)
    started_s = time.monotonic()
    pace(100_000)
    assert time.monotonic() - started_s >= 0.1
