"""Connections that must come to the point: a peer that dawdles is let go, and so is its thread.

The server reads a request in a thread of a bounded pool, for as long as bytes trickle in. Without
a deadline a few dozen connections that send one byte a second would keep the agent from everybody.
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
    """Carries one request: the agent keeps no connection alive."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline_s = time.monotonic() + deadlines.REQUEST_TIMEOUT_S

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        left_s = self._deadline_s - time.monotonic()
        self.settimeout(max(0.001, left_s))
        try:
            return super().recv(bufsize, flags)
        except TimeoutError as error:
            # What the server takes for a peer that went away, which is no news.
            raise ConnectionResetError(errno.ECONNRESET, "the request did not come") from error
        finally:
            self.settimeout(deadlines.ANSWER_IDLE_S)


def install_request_deadlines(worker: Any) -> None:
    """Make the listeners of a server's worker such ones; called in it before it accepts any."""
    for each in worker.sockets:
        each.sock = Listener(fileno=each.sock.detach())
