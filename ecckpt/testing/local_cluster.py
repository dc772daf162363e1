"""``LocalCluster``: a cluster of real agents on this machine, for tests; nodes can be killed.

    with LocalCluster(nodes=6) as cluster:
        ckpt = ecckpt.Checkpointer(run="test", root=cluster.root("n0"), agents=cluster.addresses())
        ...
        cluster.kill("n3")

Each node is an agent process with its own tmpfs folder and port. When the cluster stops, or the
program exits, all processes, sockets and files are removed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ecckpt.client.cluster.local_agent import await_agent, local_client, log_of, reap, running
from ecckpt.client.config import NodeConfig
from ecckpt.errors import AgentUnreachable, InvalidConfig
from ecckpt.memory.native import AUTO
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.testing.agent_forkserver import ForkedAgent, agent_forkserver

_TMPFS = Path("/dev/shm")  # noqa: S108  (agents keep checkpoints in shared memory)


class LocalCluster:
    """Agents as processes on this machine; a context manager.

    Args:
        nodes: number of nodes; their names are n0, n1, ...
        domains: the failure domain of each node (default: each node is its own domain).
        folder: parent of the nodes' folders (default: a new one in /dev/shm). Agents adopt what
            existing folders of nodes contain, as after a kill.
        disk: a folder for the nodes' disks (default: nodes have no disk). The caller removes it.
        engine: the codec engine of the agents.
        pull_mb_s: limit of what each agent pulls from peers, in 10^6 bytes per second; 0: no limit.

    Attributes:
        nodes: names of the nodes that make up the cluster, in order.
    """

    def __init__(
        self,
        nodes: int = 8,
        *,
        domains: Sequence[str] = (),
        folder: Path | None = None,
        disk: Path | None = None,
        engine: str = AUTO,
        pull_mb_s: float = 0.0,
    ) -> None:
        if nodes < 1 or (domains and len(domains) != nodes):
            raise InvalidConfig(f"{nodes} nodes and {len(domains)} domains")
        self.nodes = [f"n{index}" for index in range(nodes)]
        self._domains = dict(zip(self.nodes, domains or self.nodes, strict=True))
        self._given = folder
        self._folder = folder
        self._disk, self._engine, self._pull_mb_s = disk, engine, pull_mb_s
        self._processes: dict[str, ForkedAgent] = {}
        self._addresses: dict[str, str] = {}
        self._replaced = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- the whole cluster ------------------------------------------------------------------------

    def start(self, only: Iterable[str] | None = None) -> None:
        """Start all agents (or ``only`` these) and wait until they answer."""
        if self._folder is None:
            self._folder = Path(
                tempfile.mkdtemp(prefix=f"ecckpt-cluster-{os.getpid()}-", dir=_TMPFS)
            )
        atexit.register(self.stop)
        self._launch(self.nodes if only is None else only)

    def stop(self) -> None:
        """Kill all agents and remove their folders."""
        atexit.unregister(self.stop)
        for node in list(self._processes):
            self._end(node)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._given

    # -- one node ---------------------------------------------------------------------------------

    def kill(self, *nodes: str) -> None:
        """Lose hosts: SIGKILL their agents and remove their memory and disks."""
        for node in nodes:
            self._end(node)
            shutil.rmtree(self.root(node))
            if self._disk is not None:
                shutil.rmtree(self._disk / node, ignore_errors=True)

    def cut_power(self, *nodes: str) -> None:
        """Cut the power of ``nodes`` (default: all): their memory is lost, their disks stay.

        Their agents get SIGKILL. Ports are kept, as a host keeps its address; ``restart`` or
        ``start`` brings the nodes up again.
        """
        nodes = nodes or tuple(self._processes)
        ports = {node: (self.root(node) / "port").read_text() for node in nodes}
        for node in nodes:
            self._end(node)
        for node, port in ports.items():
            # A training process that still runs may be starting an agent in this folder.
            shutil.rmtree(self.root(node), ignore_errors=True)
            self.root(node).mkdir(mode=0o700, exist_ok=True)
            (self.root(node) / "port").write_text(port)

    def restart(self, *nodes: str) -> None:
        """SIGKILL the agents of ``nodes`` and start them again; their memory stays."""
        for node in nodes:
            if node in self._processes:
                self._end(node)
        self._launch(nodes)

    def empty(self, *nodes: str) -> None:
        """Bring hosts up again with empty memory, under the same names and addresses.

        Hosts that still run are killed first.
        """
        for node in nodes:
            if node in self._processes:
                self.kill(node)
            self._launch([node], listen=self._addresses[node])

    def replace(self, *nodes: str) -> list[str]:
        """Replace ``nodes`` by new, empty hosts with new names; return the names."""
        fresh = []
        for node in nodes:
            if node in self._processes:
                self.kill(node)
            self._replaced += 1
            name = f"{node}r{self._replaced}"
            self.nodes[self.nodes.index(node)] = name
            self._domains[name] = name if self._domains[node] == node else self._domains[node]
            fresh.append(name)
        self._launch(fresh)
        return fresh

    # -- inspection -------------------------------------------------------------------------------

    def root(self, node: str) -> Path:
        """Return the node's folder, the ``root`` argument of ``Checkpointer``."""
        assert self._folder is not None, "the cluster is not started"
        return self._folder / node

    def client(self, node: str) -> AgentClient:
        """Return a client of the node's agent over its Unix socket."""
        return local_client(self.root(node))

    def addresses(self) -> list[str]:
        """Return the TCP addresses of the agents that run."""
        return [self.client(node).node().address for node in self.nodes if node in self._processes]

    def pid(self, node: str) -> int:
        """Return the process id of the node's agent, which is also its process group."""
        return self._processes[node].pid

    def wait(self, node: str, *, timeout_s: float = 20.0) -> int:
        """Wait until the node's agent ends by itself; return its exit status.

        Raises ``TimeoutError``.
        """
        return self._processes[node].wait(timeout_s)

    def _launch(self, nodes: Iterable[str], *, listen: str = "127.0.0.1:0") -> None:
        nodes = list(nodes)
        for node in nodes:
            config = NodeConfig(
                root=self.root(node),
                node=node,
                domain=self._domains[node],
                listen=listen,
                token_file=None,
                engine=self._engine,
                disk=self._disk,
                pull_mb_s=self._pull_mb_s,
            )
            self._processes[node] = agent_forkserver().start(config)
        for node in nodes:
            log = log_of(self.root(node))
            info = await_agent(self.client(node), log, process=self._processes[node])
            self._addresses[node] = info.address

    def _end(self, node: str) -> None:
        process = self._processes.pop(node)
        # A training process that found no agent may have started another one. It owns the folder by
        # now, or it is still starting; it has to end as well.
        root = self.root(node)
        owners = {process.pid, _owner(root) or process.pid, *running(root)}
        workers = [pid for owner in owners for pid in (owner, *children(owner))]
        for owner in owners:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(owner, signal.SIGKILL)
        await_end(workers)
        with contextlib.suppress(AgentUnreachable):  # the forkserver has ended: init reaps agents
            process.poll()
        reap()


def await_end(pids: Iterable[int], *, timeout_s: float = 10.0) -> None:
    """Wait until killed processes, which need not be our children, have ended or are zombies.

    It returns silently after ``timeout_s``: SIGKILL cannot be refused, only delayed by the kernel.
    """
    deadline_s = time.monotonic() + timeout_s
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.002)


def _owner(root: Path) -> int | None:
    """Return the process that holds the lock of an agent's folder, if it runs."""
    try:
        pid = int((root / "agent.lock").read_text())
    except (OSError, ValueError):
        return None
    return pid if _runs(pid) else None


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the process has ended
            pids += [int(child) for child in path.read_text().split()]
    return pids


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "\nState:\tZ" not in status
