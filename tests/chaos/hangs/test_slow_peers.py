"""The agent drops peers that read too slowly, and goes on serving the others meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from ecckpt.format.fragment_file import HOME
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.stored import store

MANY = 80  # more than the agent has threads
HEAD = b"POST /v1/runs/test/commit HTTP/1.1\r\nHost: agent\r\nContent-Length: 100\r\n"


@contextmanager
def dawdlers(
    address: str, opening: bytes, act: Callable[[socket.socket], object]
) -> Iterator[list[socket.socket]]:
    """Connections that say something at once, and then do something once a second."""
    host, port = address.split(":")
    ended = threading.Event()
    peers = [socket.create_connection((host, int(port))) for _ in range(MANY)]

    def dawdle() -> None:
        while not ended.wait(1.0):
            for peer in peers:
                with suppress(OSError):  # let go
                    act(peer)

    thread = threading.Thread(target=dawdle)
    try:
        for peer in peers:
            peer.sendall(opening)
        thread.start()
        yield peers
    finally:
        ended.set()
        thread.join()
        for peer in peers:
            peer.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "opening",
    [
        b"POST /v1/ru",
        pytest.param(HEAD + b"\r\n", marks=pytest.mark.long),
    ],
    ids=["a request", "a body"],
)
def test_a_byte_a_second(cluster1: LocalCluster, opening: bytes) -> None:
    # Each kept one of the agent's 64 threads for as long as it liked.
    with dawdlers(cluster1.addresses()[0], opening, lambda peer: peer.send(b"x")) as peers:
        assert cluster1.client("n0").node().node == "n0"  # or AgentUnreachable after 10 s
        peers[0].settimeout(20)
        with suppress(ConnectionResetError):
            while peers[0].recv(4096):
                pass


@pytest.mark.long
def test_readers_of_a_byte_a_second() -> None:
    with LocalCluster(nodes=1) as cluster:
        # More than what the sockets between them take in.
        store(cluster, [bytes(24 << 20)], code=(1, 0))
        (header,) = cluster.client("n0").call(INVENTORY, "test").headers
        assert header.index == HOME
        shard = header.shard
        path = f"/v1/runs/test/shards/{shard.generation}/{shard.rank}/shard"
        request = f"GET {path} HTTP/1.1\r\nHost: agent\r\n\r\n".encode()
        with dawdlers(cluster.addresses()[0], request, lambda peer: peer.recv(1)) as peers:
            for peer in peers[:60]:
                assert peer.recv(1) == b"H"  # an answer has begun
            slow = cluster.client("n0")
            attempts = 0
            while attempts < 3:  # within three deadlines of a request, the idle have gone
                attempts += 1
                with suppress(Exception):
                    slow.node()
                    break
            assert slow.node().node == "n0"


def test_a_peer_that_lies_about_the_length_of_its_request(cluster1: LocalCluster) -> None:
    host, port = cluster1.addresses()[0].split(":")
    for length, status in {
        b"-1": 400,
        b"1e3": 400,
        b"\xb2": 400,
        b"99999999": 413,
        b"0": 400,
    }.items():
        with socket.create_connection((host, int(port))) as peer:
            peer.settimeout(20)
            peer.sendall(HEAD.replace(b"100", length) + b"\r\n" + b"x" * 10)
            assert f" {status} ".encode() in peer.recv(4096), length
    assert cluster1.client("n0").node().node == "n0"
