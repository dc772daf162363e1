"""Starts agents by forking one process that has imported everything that an agent needs.

``LocalCluster`` uses it. Importing takes most of the time of starting an agent; a test starts
several, and a test run hundreds. A forked agent is otherwise like one of ``ecckpt agent``: it leads
its own session and has the arguments, environment and working folder of the process that started
it. Its parent is the server process (``cli/forkserver_main.py``), which therefore knows its exit
status.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ecckpt.client.cluster.local_agent import arguments_of, log_of
from ecckpt.client.config import NodeConfig
from ecckpt.errors import AgentUnreachable
from ecckpt.memory.private_folder import private_folder

_POLL_S = 0.002  # tests wait for the end of agents often, and an agent ends within milliseconds


class ForkedAgent:
    """An agent that the server process has forked; it has the methods of ``Popen`` used here."""

    def __init__(self, server: AgentForkserver, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self._status is None:
            self._status = self._server.request({"poll": self.pid})
        return self._status

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the exit status. Raises ``TimeoutError``."""
        deadline_s = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"agent {self.pid} has not ended within {timeout_s:g} s")
            time.sleep(_POLL_S)
        return status


class AgentForkserver:
    """The server process that forks agents.

    Threads may share it. Only the process that made it may use it: a forked child would share its
    pipes and mix up the answers.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ecckpt.cli.forkserver_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, config: NodeConfig) -> ForkedAgent:
        """Start an agent and return without waiting for it, as ``local_agent.start`` does."""
        private_folder(config.root)
        return ForkedAgent(
            self,
            self.request(
                {
                    "arguments": arguments_of(config),
                    "environment": dict(os.environ),
                    "folder": str(Path.cwd()),
                    "log": str(log_of(config.root)),
                }
            ),
        )

    def request(self, request: dict[str, Any]) -> Any:
        """Return the server's answer to a request. Raises ``AgentUnreachable`` if it has ended."""
        assert os.getpid() == self.owner
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        # BrokenPipeError: the server has ended. ValueError: `end` has closed the pipes.
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise AgentUnreachable(f"pid {self._process.pid}", "the agent forkserver has ended")
        return json.loads(answer)

    def end(self) -> None:
        """End the server process. Agents that still run become orphans and go on."""
        self._process.kill()
        self._process.communicate()


_open: list[AgentForkserver] = []


def agent_forkserver() -> AgentForkserver:
    """Return this process's server, which is started at first use (again after a fork)."""
    if not _open or _open[0].owner != os.getpid():
        _open[:] = [AgentForkserver()]
    return _open[0]


def close() -> None:
    """End this process's server, if there is one."""
    while _open:
        server = _open.pop()
        if server.owner == os.getpid():
            server.end()


# atexit runs in reverse order: registered here, before any cluster registers its `stop`, the server
# ends after all clusters.
atexit.register(close)
