"""Agents of a test's clusters, forked from one process that has imported all that an agent needs.

Most of what it takes to start an agent is importing; a test starts several, and a run of tests
hundreds. From there on they are what ``ecckpt agent`` starts: sessions of their own, with the
arguments, the environment and the folder of whoever starts them. Their parent is the process that
they are forked from, so that is where their exit statuses are (``cli/nursery.py``).
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

_POLL_S = 0.002


class Nursling:
    """An agent that a nursery has started: as much of a ``Popen`` as a cluster needs."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None if it runs."""
        if self._status is None:
            self._status = self._nursery.ask({"poll": self.pid})
        return self._status

    def wait(self, timeout_s: float) -> int:
        """Its exit status, once it has ended. Raises ``TimeoutError``."""
        deadline_s = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"agent {self.pid} has not ended within {timeout_s:g} s")
            time.sleep(_POLL_S)
        return status


class Nursery:
    """The process that forks them. Thread-safe; of no use to forked children of its owner."""

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

    def start(self, config: NodeConfig) -> Nursling:
        """Start an agent for a folder, and return at once; as ``agents.start``."""
        private_folder(config.root)
        return Nursling(
            self,
            self.ask(
                {
                    "arguments": arguments_of(config),
                    "environment": dict(os.environ),
                    "folder": str(Path.cwd()),
                    "log": str(log_of(config.root)),
                }
            ),
        )

    def ask(self, request: dict[str, Any]) -> Any:
        """Its answer to one request. Raises ``AgentUnreachable`` if it has ended."""
        assert os.getpid() == self.owner
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):  # closed
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise AgentUnreachable(f"pid {self._process.pid}", "the nursery has ended")
        return json.loads(answer)

    def end(self) -> None:
        """End it; agents that still run go on, as orphans."""
        self._process.kill()
        self._process.communicate()


_open: list[Nursery] = []


def nursery() -> Nursery:
    """This process's own, started on first use."""
    if not _open or _open[0].owner != os.getpid():
        _open[:] = [Nursery()]
    return _open[0]


def close() -> None:
    """End this process's own, if there is one."""
    while _open:
        found = _open.pop()
        if found.owner == os.getpid():
            found.end()


atexit.register(close)  # before any cluster registers itself, so it is ended after them
