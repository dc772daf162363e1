"""A deadline for each request: a connection that sends slowly must not keep a server thread.

The server reads a request in a thread of a bounded pool, for as long as bytes trickle in. Without
this deadline a few dozen connections that send one byte a second would occupy all threads.
daemon.py installs it in the server's worker.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

from ecckpt.agent import deadlines


class Listener(socket.socket):
    """A listening socket whose connections have ``REQUEST_TIMEOUT_S`` for all of their request."""

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection and its address."""
        descriptor, address = self._accept()  # type: ignore[attr-defined]
        return _Connection(self.family, self.type, self.proto, fileno=descriptor), address


class _Connection(socket.socket):
    """A connection with one request: the agent keeps no connection alive."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline_s = time.monotonic() + deadlines.REQUEST_TIMEOUT_S

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        left_s = self._deadline_s - time.monotonic()
        self.settimeout(max(0.001, left_s))
        try:
            return super().recv(bufsize, flags)
        except TimeoutError as error:
            # gunicorn takes this for a peer that went away and logs nothing.
            raise ConnectionResetError(errno.ECONNRESET, "the request came too slowly") from error
        finally:
            self.settimeout(deadlines.ANSWER_IDLE_S)


def install_request_deadlines(worker: Any) -> None:
    """Replace the listeners of a server's worker; the server calls it before it accepts."""
    for each in worker.sockets:
        each.sock = Listener(fileno=each.sock.detach())
