"""Agents that are forked, not started by name: what they have of their starter, how they end."""

import os
import signal
from pathlib import Path

import pytest

from ecckpt.errors import AgentUnreachable
from ecckpt.testing.agent_forkserver import AgentForkserver
from ecckpt.testing.local_cluster import LocalCluster


def test_they_get_the_environment_and_folder_of_their_starter(cluster1, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cluster1.restart("n0")
    assert Path(f"/proc/{cluster1.pid('n0')}/cwd").resolve() == tmp_path
    monkeypatch.setenv("ECCKPT_TOKEN_FILE", "no-such-token")
    with pytest.raises(AgentUnreachable, match="no-such-token"):
        cluster1.restart("n0")
    monkeypatch.delenv("ECCKPT_TOKEN_FILE")
    cluster1.restart("n0")


def test_each_leads_a_session_and_has_none_of_its_starters_streams(cluster1):
    pid = cluster1.pid("n0")
    assert os.getsid(pid) == os.getpgid(pid) == pid
    streams = [Path(f"/proc/{pid}/fd/{each}").resolve() for each in range(3)]
    log = cluster1.root("n0") / "agent.log"
    assert streams == [Path("/dev/null"), log, log]


def test_how_one_ended_is_known(cluster1):
    with pytest.raises(TimeoutError, match="has not ended"):
        cluster1.wait("n0", timeout_s=0.01)
    os.killpg(cluster1.pid("n0"), signal.SIGKILL)
    assert cluster1.wait("n0") == -signal.SIGKILL


def test_without_the_forkserver_they_go_on_and_can_be_ended(monkeypatch):
    own = AgentForkserver()
    monkeypatch.setattr("ecckpt.testing.local_cluster.agent_forkserver", lambda: own)
    with LocalCluster(nodes=1) as cluster:
        own.end()
        assert cluster.client("n0").node().node == "n0"
        with pytest.raises(AgentUnreachable, match="the agent forkserver has ended"):
            cluster.wait("n0")
