"""What hangs is waited for only so long: holders, and the store through which ranks meet."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import ecckpt
from ecckpt import errors
from ecckpt.agent import deadlines
from ecckpt.agent.runtime.service import AgentService
from ecckpt.client import deadlines as client_deadlines
from ecckpt.client.cluster import local_agent as agents
from ecckpt.client.cluster import rendezvous
from ecckpt.client.config import NodeConfig
from ecckpt.client.effects import Lane
from ecckpt.client.read import shard_reader as reading
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import ShardId
from ecckpt.policy.survival import ShardSources, plan_recovery
from ecckpt.protocol.messages.restore import Fetch, Sources
from ecckpt.protocol.messages.save import Watch
from ecckpt.protocol.verbs import FETCH, INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import generation, writer_of
from tests.support.stored import store
from tests.support.worlds import states_for

STORE = """
import sys, time, datetime, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True,
                      timeout=datetime.timedelta(seconds=60), wait_for_workers=False)
print("up", flush=True)
time.sleep(600)
"""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(pid, signal.SIGCONT)


def test_a_holder_that_hangs_leaves_time_to_ask_another() -> None:
    # It used up all of the time that the fetch had, and a shard that could be had was refused.
    shard = bytes(range(256)) * 200
    with LocalCluster(nodes=6) as cluster:
        store(cluster, [shard])
        address = {node: cluster.client(node).node().address for node in cluster.nodes}
        held = {
            header.index: node
            for node in cluster.nodes
            for header in cluster.client(node).call(INVENTORY, "test").headers
            if header.index != HOME
        }
        sources = tuple(Sources(index, (address[held[index]],)) for index in sorted(held))
        header = next(iter(cluster.client("n5").call(INVENTORY, "test").headers))
        message = Fetch(
            header=replace(header.at(HOME), home="n5"),
            writer=writer_of(1),
            sources=sources,
            memory_bytes=0,
            timeout_s=5.0,
        )
        with stopped(cluster.pid(held[0])):
            fetched = cluster.client("n5").call(FETCH, message)
        with Path(fetched.slot.path).open("rb") as file:
            file.seek(fetched.slot.payload_offset)
            assert file.read(len(shard)) == shard
        assert any(address[held[0]] in problem for problem in fetched.problems)


class _Slow:
    """Stands before an agent, and passes its answers on, 10 kB/s of them."""

    def __init__(self, address: str, bytes_per_s: int = 10_000) -> None:
        self._piece_bytes = bytes_per_s // 10
        self._host, self._port = address.split(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> _Slow:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with suppress(OSError):
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._pass_on, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, near: socket.socket) -> None:
        far = socket.create_connection((self._host, int(self._port)))
        with near, far, suppress(OSError):
            far.sendall(near.recv(65536))
            while (data := far.recv(self._piece_bytes)) and not self._ended.wait(0.1):
                near.sendall(data)


@pytest.mark.long
def test_a_holder_that_lags_is_left_where_another_can_be_asked() -> None:
    # One holder with 10 kB/s kept a restore waiting until its deadline, and made it fail then.
    shard = bytes(range(256)) * 8000
    with LocalCluster(nodes=6) as cluster:
        store(cluster, [shard])
        address = {node: cluster.client(node).node().address for node in cluster.nodes}
        headers = {
            node: cluster.client(node).call(INVENTORY, "test").headers for node in cluster.nodes
        }
        held = {
            each.index: node for node in headers for each in headers[node] if each.index != HOME
        }
        with _Slow(address[held[1]]) as slow:
            sources = [Sources(index, (address[held[index]],)) for index in sorted(held)]
            sources[1] = Sources(1, (slow.address,))
            header = replace(next(iter(headers["n5"])).at(HOME), home="n5")
            fetched = cluster.client("n5").call(
                FETCH,
                Fetch(
                    header=header,
                    writer=writer_of(1),
                    sources=tuple(sources),
                    memory_bytes=0,
                    timeout_s=20.0,
                ),
            )
        with Path(fetched.slot.path).open("rb") as file:
            file.seek(fetched.slot.payload_offset)
            assert file.read(len(shard)) == shard
        assert fetched.rebuilt_fragments == 1
        assert any("left behind" in problem for problem in fetched.problems)


@pytest.mark.long
def test_one_that_refuses_at_once_makes_no_laggards_of_the_others() -> None:
    # Its refusal was taken for what others need, and who took two seconds was left behind.
    shard = bytes(range(256)) * 35000
    with LocalCluster(nodes=6) as cluster:
        store(cluster, [shard])
        address = {node: cluster.client(node).node().address for node in cluster.nodes}
        headers = {
            node: cluster.client(node).call(INVENTORY, "test").headers for node in cluster.nodes
        }
        held = {
            each.index: node for node in headers for each in headers[node] if each.index != HOME
        }
        with _Slow(address[held[1]], 1_000_000) as one, _Slow(address[held[2]], 1_000_000) as other:
            sources = [Sources(index, (address[held[index]],)) for index in sorted(held)]
            sources[0] = Sources(0, ("127.0.0.1:1",))
            sources[1], sources[2] = (
                Sources(1, (one.address,)),
                Sources(2, (other.address,)),
            )
            header = replace(next(iter(headers["n5"])).at(HOME), home="n5")
            fetched = cluster.client("n5").call(
                FETCH,
                Fetch(
                    header=header,
                    writer=writer_of(1),
                    sources=tuple(sources),
                    memory_bytes=0,
                    timeout_s=20.0,
                ),
            )
        assert not any("left behind" in problem for problem in fetched.problems)
        assert fetched.rebuilt_fragments == 1


def _reader(cluster: LocalCluster, slow: dict[str, _Slow], **more: float) -> reading.ShardReader:
    """Of the shard that is stored, as a rank sees it to whom some agents are slow."""
    clients = {node: cluster.client(node) for node in cluster.nodes}
    plan = plan_recovery("test", [client.call(INVENTORY, "test") for client in clients.values()])
    (report,) = plan.chosen.shards
    clients |= {node: replace(clients[node], address=slow[node].address) for node in slow}
    sources = ShardSources(report.header, report.homes, report.fragments)
    return reading.ShardReader(sources, reading.Peers(clients=clients, **more))


@pytest.mark.long
@pytest.mark.parametrize(("slow_nodes", "lost"), [(["n0", "n1", "n2"], []), (["n1", "n2"], ["n0"])])
def test_ranges_come_from_others_where_somebody_lags(
    slow_nodes: list[str], lost: list[str]
) -> None:
    # n0 is the home, n1 to n5 hold a fragment each; one with 10 kB/s was waited for, to the end.
    shard = os.urandom(900_000)
    with LocalCluster(nodes=6) as cluster, ExitStack() as stack:
        store(cluster, [shard])
        address = {node: cluster.client(node).node().address for node in cluster.nodes}
        slow = {node: stack.enter_context(_Slow(address[node])) for node in slow_nodes}
        reader = _reader(cluster, slow, deadline_s=time.monotonic() + 20)
        for node in lost:
            cluster.kill(node)
        reader.require(np.array([0]), np.array([len(shard)]))
        assert reader.data == shard
        assert reader._peers.lagging == set(slow_nodes)
        # Who lags is not asked again, even where that means to decode.
        reader.release()
        reader.require(np.array([400_000]), np.array([500_000]))
        assert reader.data[400_000:500_000] == shard[400_000:500_000]


@pytest.mark.long
def test_ranges_come_from_who_lags_where_nobody_else_has_them() -> None:
    shard = os.urandom(150_000)
    with LocalCluster(nodes=6) as cluster, ExitStack() as stack:
        store(cluster, [shard])
        address = {node: cluster.client(node).node().address for node in cluster.nodes}
        slow = {node: stack.enter_context(_Slow(address[node], 50_000)) for node in ("n1", "n4")}
        reader = _reader(cluster, slow, deadline_s=time.monotonic() + 40)
        for node in ("n0", "n3", "n5"):
            cluster.kill(node)
        reader.require(np.array([0]), np.array([len(shard)]))
        assert reader.data == shard


def test_ranks_wait_for_a_session_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_deadlines, "SESSION_S", 0.2)
    with pytest.raises(errors.RankTimeout, match="session"):
        rendezvous.meet(dist.HashStore(), rank=1, world_size=2)


def test_ranks_wait_for_each_other_to_join_only_so_long(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_deadlines, "JOIN_S", 0.5)
    with pytest.raises(errors.RankTimeout, match=r"join.*\b1\b"):
        ecckpt.Checkpointer(
            "test", root=cluster1.root("n0"), store=dist.HashStore(), rank=0, world_size=2
        )


def test_a_new_agent_is_waited_for_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_deadlines, "START_AGENT_S", 0.3)
    process = agents.start(
        NodeConfig(root=tmp_path, node="n0", domain="n0", listen="127.0.0.1:0", token_file=None)
    )
    try:
        with stopped(process.pid), pytest.raises(errors.AgentUnreachable, match=r"within 0\.3 s"):
            agents.await_agent(agents.local_client(tmp_path), tmp_path / "log", process=process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_nobody_watches_for_longer_than_the_agent_lets_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "WATCH_LIMIT_S", 0.2)
    agent = AgentService(tmp_path, node="n0", domain="n0", address="127.0.0.1:1", token="")
    shard = ShardId("test", generation(), 0)
    assert agent.watch(Watch(shard, "unknown", 1e6)).state == "unknown"


@pytest.mark.long
def test_a_store_that_hangs_keeps_nobody_for_ever(cluster1: LocalCluster) -> None:
    # close() waited for it for as long as it hung.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-c", STORE, str(port)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert server.stdout.readline() == b"up\n"
        meeting = dist.TCPStore(
            "127.0.0.1", port, None, False, timeout=timedelta(seconds=5), wait_for_workers=False
        )
        (state,) = states_for(1, seed=1)
        checkpointer = ecckpt.Checkpointer(
            "test",
            root=cluster1.root("n0"),
            store=meeting,
            rank=0,
            world_size=1,
            save_timeout_s=2.0,
            restore_timeout_s=10.0,
        )
        checkpointer.restore(state)
        first = checkpointer.save(1, state)
        assert first.wait(20)
        while not first.left:  # leaving the save is the last that it needs the store for
            threading.Event().wait(0.01)
        with stopped(server.pid):
            handle = checkpointer.save(2, state, patience_s=20)
            checkpointer.close()
            assert isinstance(handle.error, errors.SaveTimedOut)
        for thread in threading.enumerate():
            if thread.name == Lane.FOLLOW.value:
                thread.join(20)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        server.stdout.close()
