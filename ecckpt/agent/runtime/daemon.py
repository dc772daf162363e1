"""The agent process: one per folder, gunicorn around the application, sockets bound by us.

gunicorn's arbiter restarts a worker that dies, and the new one adopts the memory. The sockets are
bound before it starts, so that the published port is the real one and a port in use fails here.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

from gunicorn.app.base import BaseApplication

from ecckpt.agent import deadlines
from ecckpt.agent.runtime.cpu_limits import ProcessLimits
from ecckpt.agent.runtime.http_app import Application
from ecckpt.agent.runtime.request_deadline import install_request_deadlines
from ecckpt.agent.runtime.service import AgentService
from ecckpt.errors import AgentMismatch, InvalidConfig
from ecckpt.format.ids import check_name
from ecckpt.memory.private_folder import private_folder
from ecckpt.protocol.http import split_address

_log = logging.getLogger(__name__)

SOCKET_NAME = "agent.sock"

# Idle ones do not exist; restores of local ranks may occupy a good part of them (node.py).
_THREADS = 64
_SOCKET_PATH_LIMIT = 107


class AlreadyRunning(AgentMismatch):
    """Another agent owns the folder."""


class _Server(BaseApplication):  # type: ignore[misc]
    """gunicorn with our settings and none of its files, flags or environment variables."""

    def __init__(self, settings: dict[str, Any], build: Any) -> None:
        self._settings = settings
        self._build = build
        super().__init__()

    def load_config(self) -> None:
        for name, value in self._settings.items():
            if name in self.cfg.settings:  # a setting that only newer releases know
                self.cfg.set(name, value)

    def load(self) -> Application:
        return self._build()  # type: ignore[no-any-return]


def run_agent(
    root: Path,
    *,
    node: str,
    domain: str,
    listen: str,
    token: str,
    disk: Path | None = None,
    scrub_bytes_per_s: float = 0.0,
    limits: ProcessLimits = ProcessLimits(),  # noqa: B008  (a frozen value)
) -> None:
    """Serve until told to stop. Raises before serving if the arguments or the folder forbid it.

    ``listen`` is ``host:port``, port 0 for any. Other addresses than loopback need a ``token``.
    ``disk`` is a folder for the nodes' disk tiers; each node has one of its own name in it. What is
    there is read again and again at ``scrub_bytes_per_s``, unless that is 0. ``limits`` leave room
    for the training beside it.
    """
    check_name("node", node)
    host, port = split_address(listen)
    if not token and not _is_loopback(host):
        raise InvalidConfig(
            f"refusing to listen on {host} without a credential",
            hint="give --token-file, or listen on 127.0.0.1",
        )
    path = root / SOCKET_NAME
    if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
        raise InvalidConfig(
            f"{path}: longer than a Unix socket's name may be", hint="shorter --root"
        )
    limits.apply()
    private_folder(root)
    lock = _lock(root)
    own_disk, disk_lock, disk_problem = _open_disk(disk, node)
    peers, local = _bind_peers(root, host, port), _bind_unix(path)
    bound_host, bound_port = peers.getsockname()[:2]
    address = f"[{bound_host}]:{bound_port}" if ":" in bound_host else f"{bound_host}:{bound_port}"

    def build() -> Application:
        agent = AgentService(
            root,
            node=node,
            domain=domain,
            address=address,
            token=token,
            disk=own_disk,
            scrub_bytes_per_s=scrub_bytes_per_s,
            pull_bytes_per_s=limits.pull_bytes_per_s,
            disk_problem=disk_problem,
        )
        arbiter = os.getppid()
        return Application(agent, token=token, stop=lambda: os.kill(arbiter, signal.SIGTERM))

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = {
        "bind": [f"fd://{local.detach()}", f"fd://{peers.detach()}"],
        "worker_class": "gthread",
        "workers": 1,
        "threads": _THREADS,
        "timeout": deadlines.WORKER_HANG_S,
        "graceful_timeout": deadlines.STOP_GRACE_S,
        "keepalive": 0,
        "loglevel": "warning",
        "proc_name": f"ecckpt-agent-{node}",
        "worker_tmp_dir": str(root),
        "control_socket_disable": True,
        "post_worker_init": install_request_deadlines,
    }
    try:
        _Server(settings, build).run()
    finally:
        os.close(lock)
        if disk_lock is not None:
            os.close(disk_lock)


def _open_disk(disk: Path | None, node: str) -> tuple[Path | None, int | None, str]:
    """The node's own folder on disk, its lock, and why it cannot be used, if it cannot.

    A disk that fails costs its own redundancy, not the agent. One that is somebody else's does.
    """
    if disk is None:
        return None, None, ""
    folder = disk / node
    try:
        disk.mkdir(parents=True, exist_ok=True)
        return folder, _lock(private_folder(folder)), ""
    except AlreadyRunning:
        raise
    except OSError as error:
        problem = f"disk {folder}: {error.strerror or error}"
        _log.warning("%s: nothing is stored there", problem)
        return folder, None, problem


def _lock(root: Path) -> int:
    descriptor = os.open(root / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise AlreadyRunning(f"{root}: an agent already runs here (pid {owner})") from error
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _bind_peers(root: Path, host: str, port: int) -> socket.socket:
    """The TCP socket; where any port will do, the one it had before a restart comes first.

    The ranks of a run know their peers' addresses: an agent that is back at its old one is back
    in service without anybody having to ask for it.
    """
    memo = root / "port"
    with contextlib.suppress(OSError, ValueError, InvalidConfig):
        if port == 0:
            return _bind_tcp(host, int(memo.read_text()))
    peers = _bind_tcp(host, port)
    memo.write_text(str(peers.getsockname()[1]))
    return peers


def _bind_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    peers = socket.socket(family, socket.SOCK_STREAM)
    peers.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it: a peer that vanished, or stopped reading, is let go.
    peers.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * deadlines.PEER_ACK_TIMEOUT_S)
    )
    try:
        peers.bind((host, port))
    except OSError as error:
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}") from error
    peers.listen(512)
    return peers


def _bind_unix(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # we hold the folder's lock: nobody listens there
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(str(path))
    path.chmod(0o600)
    local.listen(512)
    return local


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
