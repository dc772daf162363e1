"""The pull transport against real sockets that behave badly: every call ends, and says how."""

import contextlib
import socket
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from ecckpt.errors import (
    AgentUnreachable,
    CorruptFragment,
    EcckptError,
    InvalidConfig,
    InvalidMessage,
    RequestRefused,
)
from ecckpt.protocol import http
from ecckpt.protocol.agent_client import AgentClient

TIMEOUT_S = 5.0  # of calls that shall be answered, or fail at once
CUT_S = 0.2  # of calls that are not
PATIENCE_S = 10.0


class Peer:
    """A server of one connection after another that reads a request and then does as it likes."""

    def __init__(self, act, *, path=None):
        self._act = act
        self._over = threading.Event()
        self.requests = []
        family = socket.AF_UNIX if path else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(str(path) if path else ("127.0.0.1", 0))
        self._listener.listen(8)
        port = None if path else self._listener.getsockname()[1]
        self.address = f"unix:{path}" if path else f"127.0.0.1:{port}"
        self._thread = threading.Thread(target=self._serve)

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(PATIENCE_S)
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(65536)
                self.requests.append(request)
                self._act(connection, self._over)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def says(*parts, pause_s=0.0):
    """Send these bytes, with pauses, then close."""

    def act(connection, over):
        for part in parts:
            connection.sendall(part)
            if over.wait(pause_s):
                return

    return act


def trickles(data):
    """Send a byte every 50 ms, for as long as anybody listens."""
    return says(*(data[at : at + 1] for at in range(len(data))), pause_s=0.05)


def silent(connection, over):
    over.wait(PATIENCE_S)


def stops(*parts):
    """Send these bytes, then nothing more without closing."""

    def act(connection, over):
        says(*parts)(connection, over)
        silent(connection, over)

    return act


def head(length=None, status="200 OK", extra=""):
    lines = f"HTTP/1.1 {status}\r\nConnection: close\r\n{extra}"
    return (
        lines + (f"Content-Length: {length}\r\n" if length is not None else "") + "\r\n"
    ).encode()


def get(address, **options):
    return http.request(
        address, "GET", "/x", **{"timeout_s": TIMEOUT_S, "limit_bytes": 1000} | options
    )


def pull(address, size=100, **options):
    target = memoryview(bytearray(size))
    http.pull(address, "/x", target, **{"timeout_s": TIMEOUT_S} | options)
    return bytes(target)


def fails(call, *args, **options):
    """The error that a call ends with, in time."""
    started_s = time.monotonic()
    with pytest.raises(EcckptError) as caught:
        call(*args, **options)
    assert time.monotonic() - started_s < PATIENCE_S
    return caught.value


both_calls = pytest.mark.parametrize("call", [get, pull])


# -- peers that answer ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_an_answer_arrives(tmp_path, kind):
    with Peer(says(head(5) + b"hello"), path=tmp_path / "s" if kind == "unix" else None) as peer:
        assert get(peer.address) == (200, b"hello")
        assert pull(peer.address, 5) == b"hello"


def test_a_request_carries_token_range_and_body():
    with Peer(says(head(5) + b"hello")) as peer:
        pull(peer.address, 5, offset=7, token="secret-of-the-cluster")
        http.request(peer.address, "POST", "/y", body=b"abc", timeout_s=TIMEOUT_S, limit_bytes=100)
    first, second = peer.requests
    assert first.startswith(b"GET /x HTTP/1.1\r\n")
    assert b"Range: bytes=7-11\r\n" in first
    assert b"Authorization: Bearer secret-of-the-cluster\r\n" in first
    assert b"Authorization" not in second
    assert b"Content-Length: 3\r\n" in second


@pytest.mark.parametrize("status", ["404 Not Found", "500 Oh", "301 Moved", "401 No"])
def test_other_statuses_come_back_from_requests_and_refuse_pulls(status):
    with Peer(says(head(2, status) + b"no")) as peer:
        assert get(peer.address) == (int(status[:3]), b"no")
        error = fails(pull, peer.address, 2)
    assert isinstance(error, RequestRefused)
    assert error.status == int(status[:3])
    assert peer.address in str(error)


def test_an_answer_in_small_pieces_arrives_whole():
    data = bytes(range(256)) * 40
    pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    with Peer(says(head(len(data)), *pieces, pause_s=0.005)) as peer:
        assert pull(peer.address, len(data)) == data


def test_more_than_announced_is_not_read():
    with Peer(says(head(5) + b"hello, and more")) as peer:
        assert get(peer.address) == (200, b"hello")
        assert pull(peer.address, 5) == b"hello"


# -- peers that do not ----------------------------------------------------------------------------


@both_calls
@pytest.mark.parametrize(
    "act",
    [
        silent,
        stops(b"HTTP/1.1 200"),
        stops(b"HTTP/1.1 200 OK\r\nContent-"),
        stops(head(100)),
        stops(head(100), b"some"),
        trickles(head(100) + b"x" * 100),
        trickles(b"HTTP/1.1 200 OK" + b" " * 100),
        trickles(head(100, extra="X: y\r\n" * 20)),
        says(head(100), *[b"x"] * 100, pause_s=0.05),
        says(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 100, pause_s=0.05),
    ],
    ids=[
        *("silent", "status cut", "header cut", "no body", "body cut"),
        *("all slow", "status slow", "headers slow", "body slow", "continues"),
    ],
)
def test_a_slow_peer_is_cut_off_like_a_silent_one(call, act):
    with Peer(act) as peer:
        error = fails(call, peer.address, timeout_s=CUT_S)
    assert isinstance(error, AgentUnreachable)
    assert "no answer within 0.2 s" in str(error)
    assert error.address == peer.address


def test_a_silent_unix_peer_is_cut_off(tmp_path):
    with Peer(silent, path=tmp_path / "s") as peer:
        assert isinstance(fails(get, peer.address, timeout_s=CUT_S), AgentUnreachable)


@both_calls
def test_a_peer_that_closes_at_once_is_unreachable(call):
    with Peer(says()) as peer:
        assert isinstance(fails(call, peer.address), AgentUnreachable)


@both_calls
@pytest.mark.parametrize("sent", [0, 1, 99])
def test_a_body_that_ends_early_is_corrupt(call, sent):
    with Peer(says(head(100) + b"x" * sent)) as peer:
        error = fails(call, peer.address)
    assert isinstance(error, CorruptFragment)
    assert f"body ended after {sent} of 100 bytes" in str(error)


@both_calls
@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"\x80\x04\x95pickle\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 2OO OK\r\n\r\n",
        b"HTTP/1.1 99999 OK\r\n\r\n",
        b"HTTP/1.1 -5 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X" * 70_000,
        b"H" * 70_000,
        b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_unreachable(call, answer):
    with Peer(says(answer)) as peer:
        error = fails(call, peer.address)
    assert isinstance(error, AgentUnreachable)
    assert len(str(error)) < 1000


@both_calls
@pytest.mark.parametrize(
    "length",
    [
        *(None, "", "-1", "-5", "abc", "1e3", "0x10", "1_0", "\u0661"),
        *(1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, "9" * 5000),
    ],
)
def test_a_length_that_lies_is_refused_without_believing_it(call, length):
    announced = head(length)
    with Peer(says(announced + b"x" * 100)) as peer:
        tracemalloc.start()
        error = fails(call, peer.address)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert isinstance(error, RequestRefused)
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("length", [99, 101])
def test_a_pull_takes_exactly_what_it_asked_for(length):
    with Peer(says(head(length) + b"x" * 200)) as peer:
        error = fails(pull, peer.address, 100)
    assert isinstance(error, RequestRefused)
    assert f"GET /x: {length} bytes for 100 wanted" in str(error)


def test_an_answer_beyond_the_limit_is_refused_with_both_numbers():
    with Peer(says(head(1001) + b"x" * 1001)) as peer:
        error = fails(get, peer.address)
    assert "answer of 1001 bytes, limit 1000" in str(error)


# -- nobody there ---------------------------------------------------------------------------------


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        error = fails(get, address)
    assert isinstance(error, AgentUnreachable)
    assert "refused" in str(error)
    assert error.address == address


def test_a_unix_socket_that_is_not_there(tmp_path):
    error = fails(get, f"unix:{tmp_path}/agent.sock")
    assert isinstance(error, AgentUnreachable)
    assert "No such file" in str(error)


def test_a_unix_socket_that_nobody_owns_any_more(tmp_path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "s"))
    left.close()
    assert isinstance(fails(get, f"unix:{tmp_path}/s"), AgentUnreachable)


@pytest.mark.parametrize("address", ["a..b:80", f"{'a' * 300}:80", "unix:" + "x" * 200, "unix:\0x"])
def test_an_address_that_cannot_lead_anywhere(address):
    assert isinstance(fails(get, address), (AgentUnreachable, InvalidConfig))


# -- no leaks -------------------------------------------------------------------------------------


def test_failed_calls_leave_no_connection_open():
    def sockets():
        links = Path("/proc/self/fd").iterdir()
        return sum(
            str(link.readlink()).startswith("socket:") for link in links if link.is_symlink()
        )

    with Peer(says(head(100) + b"x")) as peer:
        before, errors = sockets(), []
        for _ in range(20):
            errors += [fails(get, peer.address), fails(pull, peer.address)]
        assert sockets() <= before + 1  # the one that the peer may just be closing
        assert len(errors) == 40


# -- the client on top ----------------------------------------------------------------------------


def test_a_server_that_is_no_agent_is_told_apart():
    with Peer(says(head(9, "404 Not Found") + b"not found")) as peer:
        error = fails(AgentClient(peer.address, timeout_s=TIMEOUT_S).node)
    assert isinstance(error, RequestRefused)
    assert "not an ecckpt agent's answer: not found" in str(error)


def test_an_agent_that_talks_nonsense_is_told_apart():
    with Peer(says(head(3) + b"\xc1\xc1\xc1")) as peer:
        error = fails(AgentClient(peer.address, timeout_s=TIMEOUT_S).node)
    assert isinstance(error, InvalidMessage)


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.7:7420", "10.0.0.7", 7420),
        ("node-7.cluster.local:0", "node-7.cluster.local", 0),
        ("localhost:65535", "localhost", 65535),
        ("[::1]:7420", "::1", 7420),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("::1:80", "::1", 80),
    ],
)
def test_addresses(address, host, port):
    assert http.split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", ":80", "host:", "host:x", "host:-1", "host:65536", "host:1e2", "host:\u0661"),
        *("[]:80", "[::1]", "a b:80", "a/b:80", "a\0b:80", "http://h:80", "h:80\n"),
        "host:" + "9" * 5000,
    ],
)
def test_what_is_no_address_is_refused_with_an_example(address):
    with pytest.raises(InvalidConfig, match="is no address") as caught:
        http.split_address(address)
    assert "10.0.0.7:7420" in str(caught.value)
