"""HTTP/1.1 as a client: bounded requests, and byte ranges read straight into mapped memory.

An address is ``host:port`` or ``unix:/path``. A call has one deadline for all of it, so a peer that
answers a byte at a time is cut off like one that does not answer. Used by agent_client.py.
"""

from __future__ import annotations

import http.client
import math
import re
import socket
import time
from collections.abc import Callable
from typing import Any

from ecckpt.errors import AgentUnreachable, CorruptFragment, InvalidConfig, RequestRefused, TooSlow
from ecckpt.protocol import deadlines

_READ_BYTES = 8 << 20
_PACED_READ_BYTES = 256 << 10  # small, so that a paced pull is even and not in bursts
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[A-Za-z0-9.:%_-]+\]|[0-9A-Fa-f:.]+):([0-9]{1,5})")
_LENGTH = re.compile(r"[0-9]{1,18}")


# Is called with the number of bytes that came; returns when more may come.
NODE_HEADER = "Ecckpt-Node"  # the node that a request is for
Pace = Callable[[int], None]


class _Socket(socket.socket):
    """A socket that receives nothing after ``deadline_s``, also if bytes trickle in."""

    deadline_s = math.inf
    idle_s = math.inf

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.settimeout(min(left_s, self.idle_s))
        return super().recv_into(buffer, nbytes, flags)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = _Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _TcpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock = _Socket(fileno=self.sock.detach())
        self.sock.settimeout(self.timeout)
        # A host that has vanished never sends a reset. With these options, bytes that stay
        # unacknowledged end the connection instead.
        self.sock.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * deadlines.IDLE_TIMEOUT_S)
        )
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def split_address(address: str) -> tuple[str, int]:
    """The host and port of ``host:port`` or ``[v6]:port``; ``InvalidConfig`` for other texts."""
    match = _ADDRESS.fullmatch(address)
    if not match or int(match[2]) > 65535:
        raise InvalidConfig(f"{address!r} is no address", hint="host:port, such as 10.0.0.7:7420")
    return match[1].strip("[]"), int(match[2])


def _connection(address: str, timeout_s: float) -> http.client.HTTPConnection:
    if address.startswith("unix:"):
        return _UnixConnection(address.removeprefix("unix:"), timeout_s)
    host, port = split_address(address)
    return _TcpConnection(host, port, timeout=timeout_s)


class Exchange:
    """One request to one agent, as a context manager that closes it.

    Errors of the system and of http.client become ``AgentUnreachable``.
    """

    def __init__(self, address: str, *, token: str, timeout_s: float) -> None:
        self.address = address
        self.deadline_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._token = token
        self._connection = _connection(address, min(timeout_s, deadlines.IDLE_TIMEOUT_S))
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._connection.close()
        if self._response is not None:
            self._response.close()
        if isinstance(error, TimeoutError):
            raise AgentUnreachable(
                self.address, f"no answer within {self._timeout_s:g} s"
            ) from error
        # UnicodeError: an impossible host name, found when it is looked up.
        foreign = (OSError, http.client.HTTPException, UnicodeError)
        if isinstance(error, foreign) and not isinstance(error, AgentUnreachable):
            raise AgentUnreachable(self.address, str(error) or type(error).__name__) from error

    def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        node: str = "",
        span: tuple[int, int] | None = None,
        patience_s: float = math.inf,
    ) -> http.client.HTTPResponse:
        """Send the request and read the head of the answer; ``span`` is a byte range [start, stop).

        The answer must begin within ``patience_s``, and from then on never pause for longer.
        """
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        if node:
            headers[NODE_HEADER] = node
        if span:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        self._connection.request(method, path, body=body, headers=headers)
        sock: Any = self._connection.sock  # ``getresponse`` drops it on "Connection: close"
        sock.deadline_s, sock.idle_s = self.deadline_s, patience_s
        self._response = self._connection.getresponse()
        sock.idle_s = min(patience_s, deadlines.IDLE_TIMEOUT_S)
        return self._response

    def read_into(
        self,
        response: http.client.HTTPResponse,
        target: memoryview,
        pace: Pace | None = None,
        wanted: Callable[[], bool] | None = None,
    ) -> None:
        """Fill ``target`` from the body; the deadline holds for each receive."""
        done, most = 0, _PACED_READ_BYTES if pace else _READ_BYTES
        while done < len(target):
            count = response.fp.readinto1(target[done : done + most])
            if not count:
                raise CorruptFragment(
                    f"{self.address}: body ended after {done} of {len(target)} bytes"
                )
            done += count
            if pace is not None:
                pace(count)
            if wanted is not None and not wanted():
                raise TooSlow(self.address, done_bytes=done, size_bytes=len(target))


def request(
    address: str,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    token: str = "",
    node: str = "",
    timeout_s: float,
    limit_bytes: int,
) -> tuple[int, bytes]:
    """Status and body of one small request; if ``node`` is given, no other node's agent serves it.

    Raises ``AgentUnreachable`` if there is no answer in time, ``RequestRefused`` if the answer has
    no length or is longer than ``limit_bytes``.
    """
    with Exchange(address, token=token, timeout_s=timeout_s) as exchange:
        response = exchange.send(method, path, body=body, node=node)
        length = _length(response)
        if not 0 <= length <= limit_bytes:
            raise RequestRefused(
                address, response.status, f"answer of {length} bytes, limit {limit_bytes}"
            )
        content = bytearray(length)
        exchange.read_into(response, memoryview(content))
        return response.status, bytes(content)


def pull(
    address: str,
    path: str,
    target: memoryview,
    *,
    offset: int = 0,
    token: str = "",
    timeout_s: float,
    patience_s: float = deadlines.IDLE_TIMEOUT_S,
    pace: Pace | None = None,
    wanted: Callable[[], bool] | None = None,
) -> None:
    """Fill ``target`` with the bytes of ``path`` from ``offset`` on, straight from the socket.

    A peer that sends nothing for ``patience_s`` is given up before ``timeout_s`` is over, so that
    there is time to ask another one. ``pace`` is told how many bytes came each time and waits if
    that was too fast. ``wanted`` is asked each time whether to go on.

    ``target`` stays the caller's; its content is undefined after an error. Raises
    ``AgentUnreachable``, ``RequestRefused`` (not there, or of another length), ``CorruptFragment``
    (the body ended early) and ``TooSlow`` (no longer wanted).
    """
    with Exchange(address, token=token, timeout_s=timeout_s) as exchange:
        span = offset, offset + len(target)
        response = exchange.send("GET", path, span=span, patience_s=patience_s)
        length = _length(response)
        if response.status not in (200, 206):
            raise RequestRefused(address, response.status, f"GET {path}: {response.reason}")
        if length != len(target):
            raise RequestRefused(
                address, response.status, f"GET {path}: {length} bytes for {len(target)} wanted"
            )
        exchange.read_into(response, target, pace, wanted)


def patience(left_s: float) -> float:
    """How long to wait for one peer when others can be asked, with ``left_s`` for all of them.

    A quarter: three further sources can be tried before the time is over.
    """
    return min(deadlines.IDLE_TIMEOUT_S, left_s / 4)


def _length(response: http.client.HTTPResponse) -> int:
    """The length of the body by its header; -1 if the header is absent or not a number."""
    text = response.headers.get("Content-Length") or ""
    return int(text) if _LENGTH.fullmatch(text) else -1
