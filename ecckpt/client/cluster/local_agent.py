"""Find this node's agent, or start it: on first use, in an operating-system session of its own.

``join``, the ``ecckpt`` command and ecckpt/testing/ use it. A started agent is outside the process
group of the launcher, so it survives when the launcher kills the workers. It is the same program
that systemd or Kubernetes would start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from ecckpt.client import deadlines
from ecckpt.client.config import NodeConfig
from ecckpt.errors import AgentMismatch, AgentUnreachable
from ecckpt.memory.private_folder import private_folder
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.node import NodeInfo

_log = logging.getLogger(__name__)

_LOG_TAIL_BYTES = 2000
_ALREADY = "already runs here"  # in the message of an agent that found another in its folder
_SERVER_VARIABLES = {"WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS", "SENDFILE", "PORT"}
# The same name as in agent/runtime/daemon.py, repeated because the client never imports the agent.
SOCKET_NAME = "agent.sock"

# Agents outlive this process. One that ends earlier is its child, and a zombie until reaped.
_started: list[tuple[Path, subprocess.Popen[bytes]]] = []


def local_client(root: Path, *, timeout_s: float = 10.0) -> AgentClient:
    """A client of the agent that owns ``root``, over the agent's Unix socket."""
    return AgentClient(f"unix:{root / SOCKET_NAME}", timeout_s=timeout_s)


def find_or_start(config: NodeConfig) -> NodeInfo:
    """Return the agent that answers in the configured folder, or start one there.

    Raises ``AgentUnreachable`` with the end of the agent's log if none answers in time,
    ``VersionMismatch`` if an agent of another release runs, ``InvalidConfig`` if other users can
    reach into the folder.
    """
    private_folder(config.root)
    client = local_client(config.root)
    with contextlib.suppress(AgentUnreachable):
        return client.node()
    return await_agent(client, log_of(config.root), process=start(config))


def start(config: NodeConfig) -> subprocess.Popen[bytes]:
    """Start an agent for a folder and return at once.

    If an agent already runs there, the new process ends by itself. The agent outlives the training
    program, so it takes over as little of it as possible: not its folder, whose files could shadow
    modules (``-P``) and which would stay busy, and no settings that were meant for another server.
    """
    private_folder(config.root)
    command = [sys.executable, "-P", "-m", "ecckpt", *arguments_of(config)]
    with log_of(config.root).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={name: text for name, text in os.environ.items() if not _is_foreign(name)},
        )
    reap()
    _started.append((config.root, process))
    return process


def _is_foreign(name: str) -> bool:
    """Whether gunicorn reads this variable, which the program has for a server of its own."""
    return name.startswith("GUNICORN_") or name in _SERVER_VARIABLES


def running(root: Path) -> list[int]:
    """Process ids of the agents that this process started for a folder and that still run.

    One of them may still be starting, and own nothing in the folder yet.
    """
    reap()
    return [process.pid for folder, process in _started if folder == root]


def reap() -> None:
    """Collect the exit status of ended agents that this process started; leave no zombies."""
    _started[:] = [agent for agent in _started if agent[1].poll() is None]


def arguments_of(config: NodeConfig) -> list[str]:
    """The arguments of the ``ecckpt`` command that runs this agent."""
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
    """The file that stdout and stderr of an agent started for this folder go to."""
    return root / "agent.log"


class Started(Protocol):
    """A started process, as far as ``await_agent`` needs it."""

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""


def await_agent(client: AgentClient, log: Path, *, process: Started | None = None) -> NodeInfo:
    """Poll until the agent answers, and return its answer.

    Raises ``AgentUnreachable`` if ``process`` ends first, or after 30 s.
    """
    deadline_s = time.monotonic() + deadlines.START_AGENT_S
    while True:
        # Of several ranks that start an agent at the same moment, the agent of one stays.
        ended = process is not None and process.poll() is not None and _ALREADY not in _tail(log)
        try:
            return client.node()
        except AgentUnreachable as error:
            if ended or time.monotonic() > deadline_s:
                what = "ended" if ended else f"did not answer within {deadlines.START_AGENT_S:g} s"
                raise AgentUnreachable(
                    client.address, f"the agent {what}", hint=f"its log ends with: {_tail(log)}"
                ) from error
        time.sleep(deadlines.START_LOOK_S)


def stop(root: Path) -> None:
    """End the agent that runs in ``root``, and return when it answers no more.

    Raises ``AgentUnreachable`` if none answers there, or if it still runs after 10 s.
    """
    client = local_client(root)
    client.shutdown()
    deadline_s = time.monotonic() + deadlines.STOP_AGENT_S
    while time.monotonic() < deadline_s:
        try:
            client.node()
        except AgentUnreachable:
            return
        time.sleep(deadlines.START_LOOK_S)
    raise AgentUnreachable(
        client.address, f"told to stop, it still answers after {deadlines.STOP_AGENT_S:g} s"
    )


def check_reachable(infos: list[NodeInfo], token: str) -> None:
    """Check that each address leads to the agent that announced it.

    Raises ``AgentMismatch`` where another agent answers, as happens when the agents of two hosts
    both announce a loopback address.
    """
    for info in infos:
        answering = AgentClient(info.address, token).node()
        if answering.instance != info.instance:
            raise AgentMismatch(
                f"node {info.node} announced {info.address}, but {answering.node} answers there",
                hint="agents on several hosts need --listen with an address their peers can reach",
            )


def _tail(log: Path) -> str:
    try:
        text = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        text = ""
    return " | ".join(text.splitlines()[-3:]) or "nothing"
