"""A cluster on this machine, for tests: real agents, real memory, real kills.

    with LocalCluster(nodes=6) as cluster:
        ckpt = ecckpt.Checkpointer(run="test", root=cluster.root("n0"), agents=cluster.addresses())
        ...
        cluster.kill("n3")

Every node is an agent process with its own tmpfs folder and port. Nothing is left behind: no
process, no socket, no file.
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
from ecckpt.testing.agent_forkserver import Nursling, nursery

_TMPFS = Path("/dev/shm")  # noqa: S108  (that it is shared memory is the point)


class LocalCluster:
    """n agents as processes on this machine; use as a context manager.

    Args:
        nodes: how many; they are called n0, n1, ...
        domains: a label per node; without, each node is its own domain.
        folder: where the nodes' folders are made (default: a new one in /dev/shm). Folders that
            are there already are adopted, as agents do after a kill.
        disk: a folder for the nodes' disks (default: they have none). It is yours to remove.
        engine: of the agents' codec.
        pull_mb_s: the most that each agent pulls, in 10^6 bytes a second (0: no limit).
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
        self._processes: dict[str, Nursling] = {}
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

    # -- all of it --------------------------------------------------------------------------------

    def start(self, only: Iterable[str] | None = None) -> None:
        """Start the agents (or ``only`` those) and wait until they answer."""
        if self._folder is None:
            self._folder = Path(
                tempfile.mkdtemp(prefix=f"ecckpt-cluster-{os.getpid()}-", dir=_TMPFS)
            )
        atexit.register(self.stop)
        self._launch(self.nodes if only is None else only)

    def stop(self) -> None:
        """Kill every agent and remove every folder."""
        atexit.unregister(self.stop)
        for node in list(self._processes):
            self._end(node)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._given

    # -- one node ---------------------------------------------------------------------------------

    def kill(self, *nodes: str) -> None:
        """Lose hosts: SIGKILL to their agents, and their memory and disks are gone."""
        for node in nodes:
            self._end(node)
            shutil.rmtree(self.root(node))
            if self._disk is not None:
                shutil.rmtree(self._disk / node, ignore_errors=True)

    def cut_power(self, *nodes: str) -> None:
        """SIGKILL to the agents, and their memory is gone; what is on disk stays.

        All of them, or those named. Their ports are kept, as a host keeps its address.
        """
        nodes = nodes or tuple(self._processes)
        ports = {node: (self.root(node) / "port").read_text() for node in nodes}
        for node in nodes:
            self._end(node)
        for node, port in ports.items():
            # A trainer that lives on may be starting an agent here.
            shutil.rmtree(self.root(node), ignore_errors=True)
            self.root(node).mkdir(mode=0o700, exist_ok=True)
            (self.root(node) / "port").write_text(port)

    def restart(self, *nodes: str) -> None:
        """SIGKILL the agents of nodes whose memory stays, and start them again."""
        for node in nodes:
            if node in self._processes:
                self._end(node)
        self._launch(nodes)

    def empty(self, *nodes: str) -> None:
        """Bring hosts up again with nothing in memory: same names and addresses.

        Those that still run are lost before.
        """
        for node in nodes:
            if node in self._processes:
                self.kill(node)
            self._launch([node], listen=self._addresses[node])

    def replace(self, *nodes: str) -> list[str]:
        """Put new, empty hosts in the places of lost ones; returns their names."""
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

    # -- looking ----------------------------------------------------------------------------------

    def root(self, node: str) -> Path:
        """The node's folder: what ``Checkpointer(root=)`` wants."""
        assert self._folder is not None, "the cluster is not started"
        return self._folder / node

    def client(self, node: str) -> AgentClient:
        """A client of the node's agent over its Unix socket."""
        return local_client(self.root(node))

    def addresses(self) -> list[str]:
        """TCP addresses of the agents that run."""
        return [self.client(node).node().address for node in self.nodes if node in self._processes]

    def pid(self, node: str) -> int:
        """Process id (and group) of the node's agent."""
        return self._processes[node].pid

    def wait(self, node: str, *, timeout_s: float = 20.0) -> int:
        """Wait until the node's agent has ended by itself; its exit status."""
        return self._processes[node].wait(timeout_s)

    def _launch(self, nodes: Iterable[str], *, listen: str = "127.0.0.1:0") -> None:
        nodes = list(nodes)
        for node in nodes:
            config = NodeConfig(
                self.root(node),
                node,
                self._domains[node],
                listen,
                None,
                self._engine,
                self._disk,
                pull_mb_s=self._pull_mb_s,
            )
            self._processes[node] = nursery().start(config)
        for node in nodes:
            log = log_of(self.root(node))
            info = await_agent(self.client(node), log, process=self._processes[node])
            self._addresses[node] = info.address

    def _end(self, node: str) -> None:
        process = self._processes.pop(node)
        # A trainer that missed its agent may have started another, which is here or on its way.
        root = self.root(node)
        owners = {process.pid, _owner(root) or process.pid, *running(root)}
        workers = [pid for owner in owners for pid in (owner, *children(owner))]
        for owner in owners:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(owner, signal.SIGKILL)
        await_end(workers)
        with contextlib.suppress(AgentUnreachable):  # the nursery has ended; init has them now
            process.poll()
        reap()


def await_end(pids: Iterable[int], *, timeout_s: float = 10.0) -> None:
    """Wait until killed processes that are not our children have ended (reaped or not)."""
    deadline_s = time.monotonic() + timeout_s
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.002)


def _owner(root: Path) -> int | None:
    """The process that says it owns an agent's folder, if it runs."""
    try:
        pid = int((root / "agent.lock").read_text())
    except (OSError, ValueError):
        return None
    return pid if _runs(pid) else None


def children(pid: int) -> list[int]:
    """Process ids of a process's children."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended already
            found += [int(child) for child in path.read_text().split()]
    return found


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "\nState:\tZ" not in status
