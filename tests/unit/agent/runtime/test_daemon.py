"""The agent as a process: who may do what, what it costs, what a kill leaves."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ecckpt.agent.runtime import daemon
from ecckpt.agent.storage.instance import instance_of
from ecckpt.client.cluster.local_agent import await_agent, find_or_start, local_client, start
from ecckpt.client.config import NodeConfig
from ecckpt.errors import RequestRefused
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.encoding import MESSAGE_LIMIT_BYTES, pack_message, unpack_message
from ecckpt.protocol.http import request
from ecckpt.protocol.messages.node import Done, Refusal
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster, await_end
from tests.support.worlds import World, states_for


def _ask(
    client: AgentClient, method: str, path: str, body: bytes | None = None, token: str = ""
) -> tuple[int, bytes]:
    return request(
        client.address,
        method,
        path,
        body=body,
        token=token,
        timeout_s=10,
        limit_bytes=MESSAGE_LIMIT_BYTES,
    )


def test_it_never_loads_torch_and_stays_small(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=1, elements=2_000_000)
    with World(cluster1) as world:
        world.restore([state])
        for step in range(5):
            assert world.save(step, [state])[0].wait(30)
    resident_bytes = 0
    for pid in (cluster1.pid("n0"), cluster1.client("n0").node().pid):
        process = Path(f"/proc/{pid}")
        assert "libtorch" not in (process / "maps").read_text()
        facts = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        # Without RssShmem: that is what it holds.
        resident_bytes += 1024 * sum(int(facts[name].split()[0]) for name in ("RssAnon", "RssFile"))
    assert resident_bytes < 100e6


def test_its_folder_is_private(cluster1: LocalCluster) -> None:
    root = cluster1.root("n0")
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "agent.sock").stat().st_mode) == 0o600
    for folder in ("regions", "runs"):
        assert stat.S_IMODE((root / folder).stat().st_mode) == 0o700


def test_peers_may_not_do_what_is_for_local_ranks(cluster1: LocalCluster) -> None:
    peer = AgentClient(cluster1.client("n0").node().address)
    for verb in ("reserve", "stage", "protect", "watch", "fetch", "slot", "assign"):
        status, body = _ask(peer, "POST", f"/v1/runs/test/{verb}", b"\x80")
        assert status == 403, verb
        assert b"Unix socket" in body
    assert _ask(peer, "POST", "/v1/shutdown", b"")[0] == 403


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 404),
        ("GET", "/v1/runs/test/nonsense", None, 404),
        ("GET", "/v1/runs/test/shards/1.2.00000000000000aa/0/table", None, 404),
        ("GET", "/v1/runs/test/shards/1.2.zz/0/table", None, 404),
        ("GET", "/v1/runs/test/shards/1.2/0/table", None, 400),
        ("GET", "/v1/runs/test/shards/1.2.00000000000000aa/0/fragments/x", None, 404),
        ("GET", "/v1/runs/test/shards/1.2.00000000000000aa/0/fragments/1", None, 404),
        ("POST", "/v1/runs/test/hold", b"garbage", 400),
        ("POST", "/v1/runs/test/hold", b"\x80", 400),
        ("POST", "/v1/runs/test/commit", pack_message(Done()), 400),
        ("DELETE", "/v1/runs/test/hold", b"", 405),
    ],
)
def test_requests_that_make_no_sense(
    cluster1: LocalCluster, method: str, path: str, body: bytes | None, status: int
) -> None:
    client = cluster1.client("n0")
    found, answer = _ask(client, method, path, body)
    assert found == status, answer
    assert unpack_message(Refusal, answer).message
    assert client.node().node == "n0"


def test_a_body_that_claims_to_be_huge_is_refused_unread(cluster1: LocalCluster) -> None:
    host, port = cluster1.client("n0").node().address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        peer.sendall(b"POST /v1/runs/t/hold HTTP/1.1\r\nHost: x\r\nContent-Length: 1")
        peer.sendall(b"0" * 15 + b"\r\n\r\n")
        assert b" 413 " in peer.recv(4096)


def test_a_token_is_asked_for_over_tcp(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("0123456789abcdef0123")
    secret.chmod(0o600)
    root = Path(f"/dev/shm/ecckpt-token-{os.getpid()}")
    config = NodeConfig(
        root=root, node="guarded", domain="guarded", listen="127.0.0.1:0", token_file=secret
    )
    process = start(config)
    try:
        info = await_agent(local_client(root), root / "agent.log", process=process)
        assert AgentClient(info.address, "0123456789abcdef0123").node() == info
        for token in ("", "0123456789abcdef0124"):
            with pytest.raises(RequestRefused, match="wants a token"):
                AgentClient(info.address, token).node()
    finally:
        local_client(root).shutdown()
        process.wait(10)
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        root.rmdir()


def test_a_new_agent_waits_for_the_lock_of_one_that_is_ending(tmp_path: Path) -> None:
    ending = daemon._lock(tmp_path)
    release = threading.Timer(0.1, os.close, [ending])
    release.start()
    lock = daemon._lock(tmp_path)
    release.join()
    assert (tmp_path / "agent.lock").read_text() == f"{os.getpid()}\n"
    os.close(lock)


def test_one_agent_per_folder(cluster1: LocalCluster) -> None:
    root = cluster1.root("n0")
    second = subprocess.run(
        [sys.executable, "-m", "ecckpt", "agent", "--root", str(root), "--node", "other"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert f"pid {cluster1.pid('n0')}" in second.stderr
    assert cluster1.client("n0").node().node == "n0"


def test_a_folder_is_one_nodes_memory(cluster1: LocalCluster) -> None:
    root = cluster1.root("n0")
    os.killpg(cluster1.pid("n0"), signal.SIGKILL)
    cluster1.wait("n0")
    other = subprocess.run(
        [sys.executable, "-m", "ecckpt", "agent", "--root", str(root), "--node", "other"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert other.returncode != 0
    assert "is the memory of node n0, not of other" in other.stderr


@pytest.mark.parametrize("text", ["", "x", "0123456789abcdef", "\0" * 20, "0" * 16 + " \xff\xfe"])
def test_an_id_of_the_memory_that_is_damaged_is_drawn_anew(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = instance_of(tmp_path, "n0")
    assert instance_of(tmp_path, "n0") == first
    (tmp_path / "instance").write_text(text)
    again = instance_of(tmp_path, "n0")
    assert again == instance_of(tmp_path, "n0") != first
    assert "no id of a node's memory" in caplog.text


@pytest.mark.parametrize("text", ["", "99999", "-1", "0", "x", "1" * 400])
def test_a_port_that_is_none_is_forgotten(tmp_path: Path, text: str) -> None:
    (tmp_path / "port").write_text(text)
    with daemon._bind_peers(tmp_path, "127.0.0.1", 0) as peers:
        assert (tmp_path / "port").read_text() == str(peers.getsockname()[1])


def test_a_killed_worker_is_restarted_and_adopts(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=2)
    client = cluster1.client("n0")
    with World(cluster1) as world:
        world.restore([state])
        assert world.save(1, [state])[0].wait(30)
        before = client.node()
        os.kill(before.pid, signal.SIGKILL)
        await_end([before.pid])
        after = await_agent(client, cluster1.root("n0") / "agent.log")
        assert (after.instance, after.address) == (before.instance, before.address)
        assert len(client.call(INVENTORY, "test").headers) == 1
        assert world.save(2, [state])[0].wait(30)


def test_it_comes_back_at_its_old_address(cluster1: LocalCluster) -> None:
    before = cluster1.client("n0").node()
    cluster1.restart("n0")
    after = cluster1.client("n0").node()
    assert after.pid != before.pid
    assert (after.instance, after.address) == (before.instance, before.address)


def test_an_empty_replacement_is_another_instance(cluster1: LocalCluster) -> None:
    before = cluster1.client("n0").node().instance
    (fresh,) = cluster1.replace("n0")
    assert cluster1.client(fresh).node().instance != before


def test_terminating_it_leaves_memory_to_adopt(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=3)
    with World(cluster1) as world:
        world.restore([state])
        assert world.save(1, [state])[0].wait(30)
    os.kill(cluster1.pid("n0"), signal.SIGTERM)
    assert cluster1.wait("n0") == 0
    cluster1.restart("n0")
    blank = states_for(1, seed=0)
    with World(cluster1) as world:
        assert world.restore(blank)[0].step == 1


def test_a_reader_that_stops_is_let_go() -> None:
    """The listener's TCP_USER_TIMEOUT is inherited: no thread waits for ever on a dead peer."""
    from ecckpt.agent.runtime.daemon import _bind_tcp

    listener = _bind_tcp("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()) as peer:
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
            assert peer.getpeername() == listener.getsockname()


@pytest.mark.parametrize("lost", ["agent.sock", "agent.lock", ""])
def test_an_agent_that_lost_its_folder_ends_and_its_successor_gets_its_port(
    cluster1: LocalCluster, lost: str
) -> None:
    root, address = cluster1.root("n0"), cluster1.client("n0").node().address
    if lost:
        (root / lost).unlink()
    else:
        shutil.rmtree(root)
    cluster1.wait("n0")
    if lost:
        cluster1.restart("n0")
    else:
        root.mkdir(mode=0o700)
        cluster1.empty("n0")
    assert cluster1.client("n0").node().address == address


def test_a_new_agent_waits_for_the_port_of_one_that_lost_its_folder(
    cluster1: LocalCluster,
) -> None:
    root, before = cluster1.root("n0"), cluster1.client("n0").node()
    config = NodeConfig(
        root=root,
        node="n0",
        domain="n0",
        listen=before.address,
        token_file=None,
    )
    shutil.rmtree(root)
    after = find_or_start(config)
    assert after.address == before.address
    assert after.pid != before.pid
    cluster1.client("n0").shutdown()
