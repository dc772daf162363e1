"""Finding this node's agent, or starting it: on first use, in a session of its own.

An agent that the library starts is no child of the launcher's process group, so it survives the
kill of the workers; it is the same program as one started by systemd or Kubernetes.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from ecckpt.client.config import NodeConfig
from ecckpt.errors import AgentMismatch, AgentUnreachable
from ecckpt.memory.private_folder import private_folder
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.node import NodeInfo

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_LOG_TAIL_BYTES = 2000
# The agent's own name for its socket (agent/daemon.py); the trainer does not import the server.
SOCKET_NAME = "agent.sock"

# Agents outlive us, but those that end before us are reaped here.
_started: list[tuple[Path, subprocess.Popen[bytes]]] = []


def local_client(root: Path, *, timeout_s: float = 10.0) -> AgentClient:
    """A client of the agent that owns ``root``, over its Unix socket."""
    return AgentClient(f"unix:{root / SOCKET_NAME}", timeout_s=timeout_s)


def find_or_start(config: NodeConfig) -> NodeInfo:
    """This node's agent: the one that answers in its folder, else a new one.

    Raises ``AgentUnreachable`` with the end of the agent's log if none comes up in time,
    ``VersionMismatch`` if one of another release runs, ``InvalidConfig`` if the folder is not ours.
    """
    private_folder(config.root)
    client = local_client(config.root)
    with contextlib.suppress(AgentUnreachable):
        return client.node()
    start(config)
    return await_agent(client, log_of(config.root))


def start(config: NodeConfig) -> subprocess.Popen[bytes]:
    """Start an agent for that folder and return at once. If one runs there, the new one ends."""
    private_folder(config.root)
    command = [sys.executable, "-m", "ecckpt", *arguments_of(config)]
    with log_of(config.root).open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    reap()
    _started.append((config.root, process))
    return process


def running(root: Path) -> list[int]:
    """Process ids of agents that were started here for that folder, and have not ended.

    One may still be on its way there, and own nothing yet.
    """
    reap()
    return [process.pid for folder, process in _started if folder == root]


def reap() -> None:
    """Take note of which agents that were started here have ended."""
    _started[:] = [each for each in _started if each[1].poll() is None]


def arguments_of(config: NodeConfig) -> list[str]:
    """What the ``ecckpt`` command is told to be that agent."""
    arguments = ["agent", "--root", str(config.root)]
    arguments += ["--node", config.node, "--domain", config.domain, "--listen", config.listen]
    arguments += ["--engine", config.engine, "--cpus", config.cpus]
    arguments += ["--nice", str(config.nice), "--pull-mb-s", str(config.pull_mb_s)]
    if config.disk:
        arguments += ["--disk", str(config.disk)]
    if config.token_file:
        arguments += ["--token-file", str(config.token_file)]
    return arguments


def log_of(root: Path) -> Path:
    """Where an agent that is started for that folder writes what it has to say."""
    return root / "agent.log"


class Started(Protocol):
    """A process that was started."""

    def poll(self) -> int | None:
        """Its exit status; None if it runs."""


def await_agent(client: AgentClient, log: Path, *, process: Started | None = None) -> NodeInfo:
    """The agent's answer as soon as it gives one; ``AgentUnreachable`` if it ends or takes long."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        ended = process is not None and process.poll() is not None
        try:
            return client.node()
        except AgentUnreachable as error:
            if ended or time.monotonic() > deadline_s:
                what = "ended" if ended else f"did not answer within {_START_TIMEOUT_S:g} s"
                raise AgentUnreachable(
                    client.address, f"the agent {what}", hint=f"its log ends with: {_tail(log)}"
                ) from error
        time.sleep(0.02)


def check_reachable(infos: list[NodeInfo], token: str) -> None:
    """Make sure that each address leads to the agent that gave it.

    Raises ``AgentMismatch`` where another answers: two hosts that both listen on loopback.
    """
    for info in infos:
        found = AgentClient(info.address, token).node()
        if found.instance != info.instance:
            raise AgentMismatch(
                f"node {info.node} says it is at {info.address}, but {found.node} answers there",
                hint="agents on several hosts need --listen with an address their peers can reach",
            )


def _tail(log: Path) -> str:
    try:
        text = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        text = ""
    return " | ".join(text.splitlines()[-3:]) or "nothing"
