"""Agents in network namespaces of their own, on one bridge: packets can be dropped either way."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from ecckpt.client.cluster.local_agent import await_agent, local_client
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.testing.local_cluster import await_end, children

Way = Literal["in", "out", "both"]

_NUMBERS = itertools.count()


def missing() -> str:
    """Why agents cannot be put into namespaces here; empty if they can."""
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    name = f"ecp{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        return f"no right to make network namespaces: {made.stderr.decode().strip()}"
    inside = ["ip", "netns", "exec", name, "iptables", "-A", "INPUT", "-j", "DROP"]
    dropped = subprocess.run(inside, capture_output=True, check=False)
    run_tool("ip", "netns", "delete", name)
    return f"iptables: {dropped.stderr.decode().strip()}" if dropped.returncode else ""


class Namespaces:
    """n agents, n0 at 10.B.0.10 and so on; what has ranks runs outside, at 10.B.0.1."""

    def __init__(self, nodes: int) -> None:
        self.nodes = [f"n{index}" for index in range(nodes)]
        number = next(_NUMBERS)
        self._mark = f"ec{os.getpid()}{'abcdefgh'[number]}"
        self._net = f"10.{100 + (os.getpid() + number) % 100}.0"
        self._folder = Path(tempfile.mkdtemp(prefix=f"ecckpt-netns-{os.getpid()}-", dir="/dev/shm"))
        self._token = self._folder / "token"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._folder)
            self._token.write_text("a token of the tests\n")
            self._token.chmod(0o600)
            stack.enter_context(_environment("ECCKPT_TOKEN_FILE", str(self._token)))
            addresses = {node: f"{self._net}.{10 + at}" for at, node in enumerate(self.nodes)}
            self._lay(stack, addresses)
            stack.callback(self._end_all)
            for node, address in addresses.items():
                self.start(node, address)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # -- faults -----------------------------------------------------------------------------------

    def drop(self, node: str, way: Way) -> None:
        """Lose every packet that goes in or out there."""
        for chain in {"in": ["INPUT"], "out": ["OUTPUT"], "both": ["INPUT", "OUTPUT"]}[way]:
            self._inside(node, "iptables", "-A", chain, "-j", "DROP")

    def heal(self, node: str) -> None:
        """Lose none any more."""
        self._inside(node, "iptables", "-F")

    def move(self, node: str, last: int) -> None:
        """The node's address vanishes; it comes back at another, with its memory."""
        self.end(node)
        address = f"{self._net}.{last}"
        self._inside(node, "ip", "address", "flush", "dev", "eth0")
        self._inside(node, "ip", "address", "add", f"{address}/24", "dev", "eth0")
        self.start(node, address)

    # -- agents -----------------------------------------------------------------------------------

    def start(self, node: str, address: str) -> None:
        root = self.root(node)
        root.mkdir(mode=0o700, exist_ok=True)
        command = ["ip", "netns", "exec", f"{self._mark}{node}"]
        command += [sys.executable, "-m", "ecckpt", "agent", "--root", str(root), "--node", node]
        command += ["--domain", node, "--listen", f"{address}:0"]
        command += ["--token-file", str(self._token)]
        with (root / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._processes[node] = process
        await_agent(self.client(node), root / "agent.log", process=process)

    def end(self, node: str) -> None:
        process = self._processes.pop(node)
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        await_end(workers)

    def lose(self, *nodes: str) -> None:
        """Hosts that come back with nothing in memory, at their addresses."""
        for node in nodes:
            address = self.address(node).rpartition(":")[0]
            self.end(node)
            shutil.rmtree(self.root(node))
            self.start(node, address)

    def root(self, node: str) -> Path:
        return self._folder / node

    def client(self, node: str) -> AgentClient:
        return local_client(self.root(node))

    def address(self, node: str) -> str:
        return self.client(node).node().address

    def _end_all(self) -> None:
        for node in list(self._processes):
            self.end(node)

    def _lay(self, stack: contextlib.ExitStack, addresses: dict[str, str]) -> None:
        """Namespaces, and a network between them and us."""
        bridge = f"{self._mark}b"
        run_tool("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(run_tool, "ip", "link", "delete", bridge)
        run_tool("ip", "address", "add", f"{self._net}.1/24", "dev", bridge)
        run_tool("ip", "link", "set", bridge, "up")
        for node, address in addresses.items():
            self._join(stack, bridge, node, address)

    def _add_namespace(self, stack: contextlib.ExitStack, node: str) -> str:
        name = f"{self._mark}{node}"
        run_tool("ip", "netns", "add", name)
        stack.callback(run_tool, "ip", "netns", "delete", name)
        return name

    def _join(self, stack: contextlib.ExitStack, bridge: str, node: str, address: str) -> None:
        name, cable = self._add_namespace(stack, node), f"{self._mark}v{node}"
        run_tool("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        run_tool("ip", "link", "set", cable, "master", bridge, "up")
        self._inside(node, "ip", "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._inside(node, "ip", "link", "set", device, "up")

    def _inside(self, node: str, *command: str) -> None:
        run_tool("ip", "netns", "exec", f"{self._mark}{node}", *command)


def run_tool(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
