"""The agent process: one for each folder, gunicorn around the application, on sockets bound here.

gunicorn's arbiter restarts a worker that dies, and the new worker adopts the memory. The sockets
are bound before gunicorn starts, so that the published port is the real one and a port that is in
use fails the start. ``ecckpt agent`` runs this.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
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
LOCK_NAME = "agent.lock"

# A thread serves one request. Up to 32 fetches of local ranks (core/fetch.py) and 4 verifications
# (service.py) occupy a thread for long, and so does a ``watch`` of each local rank.
_THREADS = 64
_SOCKET_PATH_LIMIT = 107  # bytes of sun_path in Linux, without the final zero


class AlreadyRunning(AgentMismatch):
    """Another agent has the folder locked."""


class _Server(BaseApplication):  # type: ignore[misc]
    """gunicorn with the settings given here; it reads no files, flags or environment variables."""

    def __init__(self, settings: dict[str, Any], build: Any) -> None:
        self._settings = settings
        self._build = build
        super().__init__()

    def load_config(self) -> None:
        for name, value in self._settings.items():
            if name in self.cfg.settings:  # else an older release does not know it
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

    ``listen`` is ``host:port``, port 0 for any free one. Addresses other than loopback need a
    ``token``. ``disk`` is a folder for disk tiers; each node has a folder of its own name in it. It
    is scrubbed at ``scrub_bytes_per_s`` (0: never). ``limits`` are applied to this process first.
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
    _reset_signals()
    limits.apply()
    private_folder(root)
    lock = _lock(root)  # before the old socket is unlinked: it may be another agent's
    own_disk, disk_lock, disk_problem = _open_disk(disk, node)
    peers, local = _bind_peers(root, host, port), _bind_unix(path)
    marks = _marks(root)
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
        watch = (root, arbiter, marks)
        threading.Thread(target=_end_without_folder, args=watch, daemon=True).start()
        return Application(agent, token=token, stop=lambda: os.kill(arbiter, signal.SIGTERM))

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = {
        "bind": [f"fd://{local.detach()}", f"fd://{peers.detach()}"],
        "worker_class": "gthread",
        "workers": 1,  # one process owns the memory and its records
        "threads": _THREADS,
        "timeout": deadlines.WORKER_HANG_S,
        "graceful_timeout": deadlines.STOP_GRACE_S,
        "keepalive": 0,  # an idle connection would keep a thread
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


def _reset_signals() -> None:
    """Undo what the program that started this process ignored or blocked.

    With SIGCHLD ignored, gunicorn would never notice that its worker has died; with SIGTERM blocked
    the agent could not be stopped.
    """
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _open_disk(disk: Path | None, node: str) -> tuple[Path | None, int | None, str]:
    """The node's own folder on disk, its lock, and why it cannot be used (empty if it can).

    A disk that fails costs the redundancy on disk, not the agent. A disk folder that another agent
    has locked is an error, because two agents would write the same files.
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
        _log.warning("%s: this agent stores nothing on disk", problem)
        return folder, None, problem


def _lock(root: Path) -> int:
    descriptor = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + deadlines.LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() < deadline_s:
                time.sleep(deadlines.LOCK_LOOK_S)
                continue
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise AlreadyRunning(f"{root}: an agent already runs here (pid {owner})") from error
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor


def _marks(root: Path) -> list[int]:
    """The inodes of the agent's lock and socket; 0 for a file that is not there."""
    found = []
    for name in (LOCK_NAME, SOCKET_NAME):
        try:
            found.append((root / name).stat().st_ino)
        except OSError:
            found.append(0)
    return found


def _end_without_folder(root: Path, arbiter: int, marks: list[int]) -> None:
    """End the agent once its lock or socket has been removed or replaced.

    No rank of this node reaches such an agent any more, and it would keep the port from the agent
    that a rank starts instead. That one adopts the files that are left. The end is a SIGKILL,
    because gunicorn's orderly end would unlink the successor's socket.
    """
    while _marks(root) == marks:
        time.sleep(deadlines.FOLDER_LOOK_S)
    _log.error(
        "%s: the lock or the socket of this agent was removed by another process, so it ends", root
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(arbiter, signal.SIGKILL)
    os._exit(1)


def _bind_peers(root: Path, host: str, port: int) -> socket.socket:
    """The TCP socket. If any port will do, the port before a restart is tried first.

    The ranks of a run know their peers' addresses, so an agent that is back at its old address is
    back in service without further messages.
    """
    memo = root / "port"
    with contextlib.suppress(OSError, ValueError, InvalidConfig):
        before = int(memo.read_text())
        # Another number is no port: the file was damaged, and is written again.
        if port == 0 and 0 < before < 1 << 16:
            return _bind_tcp(host, before)
    peers = _bind_tcp(host, port)
    with contextlib.suppress(OSError):  # a full tmpfs costs the memory of the port only
        memo.write_text(str(peers.getsockname()[1]))
    return peers


def _bind_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    peers = socket.socket(family, socket.SOCK_STREAM)
    peers.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit the option.
    peers.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * deadlines.PEER_ACK_TIMEOUT_S)
    )
    deadline_s = time.monotonic() + deadlines.PORT_PATIENCE_S
    while True:
        try:
            peers.bind((host, port))
            break
        except OSError as error:
            # An agent that has lost its folder keeps the port until it notices.
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline_s:
                time.sleep(deadlines.LOCK_LOOK_S)
                continue
            peers.close()
            raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}") from error
    peers.listen(512)
    return peers


def _bind_unix(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # this process has the folder's lock, so no agent listens there
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
