"""The agent's HTTP interface (docs/PROTOCOL.md) as a WSGI application.

It routes by the table of verbs (protocol/verbs.py) to the methods of ``AgentService``.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ecckpt.agent.runtime import metrics
from ecckpt.agent.runtime.service import AgentService
from ecckpt.errors import (
    AgentMismatch,
    EcckptError,
    Fenced,
    InvalidConfig,
    InvalidMessage,
    MemoryBudgetTooSmall,
    NotHeld,
    NotMapped,
    OlderStart,
    RequestRefused,
    TmpfsFull,
    TwoHistories,
    facts,
)
from ecckpt.format.ids import Generation, ShardId, check_run
from ecckpt.protocol.addresses import check_addresses
from ecckpt.protocol.encoding import REQUEST_LIMIT_BYTES, pack_message, run_of, unpack_message
from ecckpt.protocol.http import NODE_HEADER
from ecckpt.protocol.messages.node import Done, Refusal
from ecckpt.protocol.verbs import VERBS, Verb

_log = logging.getLogger(__name__)

_SHARD = re.compile(
    r"/v1/runs/(?P<run>[^/]+)/shards/(?P<generation>[0-9a-f.]+)/(?P<rank>\d{1,8})/(?P<what>.+)"
)
_RUN = re.compile(r"/v1/runs/(?P<run>[^/]+)/(?P<verb>[a-z]+)")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_REASONS = {
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    413: "Content Too Large",
    416: "Range Not Satisfiable",
    421: "Misdirected Request",
    500: "Internal Server Error",
    503: "Service Unavailable",
    507: "Insufficient Storage",
}
_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (NotHeld, 404),
    (Fenced, 409),
    (OlderStart, 409),
    (AgentMismatch, 421),
    (TwoHistories, 409),
    (InvalidMessage, 400),
    (InvalidConfig, 400),
    (MemoryBudgetTooSmall, 507),
    (TmpfsFull, 507),
    (NotMapped, 507),
)
_SEND_BYTES = 1 << 20
_NODE_KEY = "HTTP_" + NODE_HEADER.upper().replace("-", "_")

Environ = Mapping[str, Any]
Reply = tuple[int, str, bytes]


class Refused(Exception):
    """A request that ends with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Application:
    """WSGI: routes a request to the agent and maps its errors to statuses.

    Requests over the Unix socket come from this node, since its folder is private to the user, and
    may do everything. Peers over TCP need the token, if there is one, and may not use the verbs
    that are marked local, nor shut the agent down.
    """

    def __init__(self, agent: AgentService, *, token: str, stop: Callable[[], None]) -> None:
        self._agent = agent
        self._token = token.encode()
        self._stop = stop

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        try:
            local = _is_local(environ)  # file permissions are the credential of the Unix socket
            if not local:
                self._authorize(environ)
                self._check_target(environ)
            if environ["REQUEST_METHOD"] == "GET":
                match = _SHARD.fullmatch(environ["PATH_INFO"])
                if match and match["what"] != "table":
                    return self._send(match, environ, start_response)
                status, kind, body = self._get(environ["PATH_INFO"], match)
            else:
                status, kind, body = self._post(environ, local=local)
        except (EcckptError, Refused, OSError) as error:
            status, kind, body = _refusal(error)
        except Exception as error:
            _log.exception("%s %s", environ["REQUEST_METHOD"], environ["PATH_INFO"])
            status, kind, body = _refusal(error)
        _start(start_response, status, kind, len(body))
        return [body]

    def _authorize(self, environ: Environ) -> None:
        shown = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ").encode()
        if self._token and not hmac.compare_digest(shown, self._token):
            raise Refused(401, "this agent wants a token")

    def _check_target(self, environ: Environ) -> None:
        """Refuse what is for another node: this agent has an address that was another's."""
        wanted, node = environ.get(_NODE_KEY, ""), self._agent.info.node
        if wanted and wanted != node:
            raise AgentMismatch(f"this is the agent of node {node}, not of {wanted[:64]}")

    def _get(self, path: str, match: re.Match[str] | None) -> Reply:
        if match:
            return 200, "application/octet-stream", self._agent.table(_shard(match))
        if path == "/v1/node":
            return _message(self._agent.info)
        if path == "/v1/status":
            return 200, "application/json", json.dumps(self._agent.status()).encode()
        if path == "/metrics":
            return 200, metrics.KIND, metrics.exposition(self._agent.status()).encode()
        run = _RUN.fullmatch(path)
        verb = VERBS.get(run["verb"]) if run else None
        if run is None or verb is None or not verb.is_read:
            raise Refused(404, f"nothing at {path}")
        return _message(self._handler(verb)(check_run(run["run"])))

    def _post(self, environ: Environ, *, local: bool) -> Reply:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != "POST":
            raise Refused(405, f"{environ['REQUEST_METHOD']} {path}: only GET and POST")
        if path == "/v1/shutdown":
            if not local:
                raise Refused(403, "shutdown is for this node, over the Unix socket")
            self._stop()
            return _message(Done())
        match = _RUN.fullmatch(path)
        verb = VERBS.get(match["verb"]) if match else None
        if match is None or verb is None or verb.is_read:
            raise Refused(404, f"there is no {environ['REQUEST_METHOD']} {path}")
        if verb.local and not local:
            raise Refused(403, f"{verb.name} is for this node's own ranks, over the Unix socket")
        message: object = unpack_message(verb.request, _body(environ))
        if run_of(message) != match["run"]:
            raise Refused(400, f"the message is about run {run_of(message)!r}, not {path}")
        check_addresses(message)
        return _message(self._handler(verb)(message))

    def _handler(self, verb: Verb[Any, Any]) -> Callable[[Any], object]:
        handler: Callable[[Any], object] = getattr(self._agent, verb.name)
        return handler

    def _send(
        self, match: re.Match[str], environ: Environ, start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        shard = _shard(match)
        if match["what"] == "shard":
            path, offset, size_bytes = self._agent.locate_shard(shard)
        else:
            kind, _, index = match["what"].partition("/")
            if kind != "fragments" or not index.isdecimal():
                raise Refused(404, f"nothing at {environ['PATH_INFO']}")
            query = environ.get("QUERY_STRING", "")
            path, offset, size_bytes = self._agent.locate(
                shard, int(index), last=query == "last", early=query == "early"
            )
        start, stop, status = _span(environ.get("HTTP_RANGE", ""), size_bytes)
        # The region may be recycled while it is sent: its reader verifies every block anyway.
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError as error:  # removed since it was located
            raise NotHeld(f"the file {path} of {shard} is not there any more") from error
        file.seek(offset + start)
        extra = (
            [("Content-Range", f"bytes {start}-{stop - 1}/{size_bytes}")] if status == 206 else []
        )
        _start(start_response, status, "application/octet-stream", stop - start, extra)
        wrapper: Callable[..., Iterable[bytes]] = environ["wsgi.file_wrapper"]
        return wrapper(file, _SEND_BYTES)


def _is_local(environ: Environ) -> bool:
    connection = environ["gunicorn.socket"]
    return bool(connection.family == socket.AF_UNIX)


def _body(environ: Environ) -> bytes:
    length = environ.get("CONTENT_LENGTH") or ""
    if not length.isdecimal():
        raise Refused(400, "a body needs a Content-Length")
    if int(length) > REQUEST_LIMIT_BYTES:
        raise Refused(413, f"a body of {length} bytes, limit {REQUEST_LIMIT_BYTES}")
    body: bytes = environ["wsgi.input"].read(int(length))
    return body


def _shard(match: re.Match[str]) -> ShardId:
    run = check_run(match["run"])
    return ShardId(run, Generation.parse(match["generation"]), int(match["rank"]))


def _span(text: str, size_bytes: int) -> tuple[int, int, int]:
    """Start, stop and status for a Range header. Only one range is supported."""
    if not text:
        return 0, size_bytes, 200
    match = _RANGE.fullmatch(text)
    start = int(match[1]) if match else size_bytes
    stop = min(int(match[2]) + 1, size_bytes) if match and match[2] else size_bytes
    if start >= stop:
        raise Refused(416, f"range {text[:60]!r} of {size_bytes} bytes")
    return start, stop, 206


def _message(message: object) -> Reply:
    return 200, "application/msgpack", pack_message(message)


def _refusal(error: Exception) -> Reply:
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    if isinstance(error, (Refused, RequestRefused)):
        status = error.status
    numbers = facts(error) if isinstance(error, EcckptError) else {}
    refusal = Refusal(type(error).__name__, str(error), numbers)
    return status, "application/msgpack", pack_message(refusal)


def _start(
    start_response: Callable[..., Any],
    status: int,
    kind: str,
    length: int,
    extra: Iterable[tuple[str, str]] = (),
) -> None:
    headers = [("Content-Type", kind), ("Content-Length", str(length)), *extra]
    start_response(f"{status} {_REASONS[status]}", headers)
