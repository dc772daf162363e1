"""A client of one agent: its requests, as docs/PROTOCOL.md has them.

Ranks use it for their own agent and for others, agents for their peers, and the tools for all.
Verbs are called by the table in verbs.py; the other paths have a method each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from ecckpt import errors
from ecckpt.errors import InvalidMessage, RequestRefused, VersionMismatch
from ecckpt.format.fragment_file import FORMAT_VERSION, Header, parse_table
from ecckpt.format.ids import ShardId
from ecckpt.protocol import deadlines, http
from ecckpt.protocol.encoding import (
    MESSAGE_LIMIT_BYTES,
    PROTOCOL_VERSION,
    pack_message,
    run_of,
    unpack_message,
    version_of,
)
from ecckpt.protocol.http import split_address
from ecckpt.protocol.messages.node import NodeInfo, Refusal
from ecckpt.protocol.parallel_ranges import pull_ranges, ranges_of
from ecckpt.protocol.verbs import A, M, Verb


def peer_client(
    address: str, token: str, *, for_node: str = "", timeout_s: float = deadlines.CALL_TIMEOUT_S
) -> AgentClient:
    """A client of another node's agent, at an address that came over the network.

    Raises ``InvalidConfig`` for anything but ``host:port``: an address from the network must not
    reach Unix sockets of this host.
    """
    split_address(address)
    return AgentClient(address, token, timeout_s, for_node)


def shard_path(shard: ShardId) -> str:
    """The path under which an agent serves its files of a shard."""
    return f"/v1/runs/{quote(shard.run)}/shards/{shard.generation}/{shard.rank}"


@dataclass(frozen=True, slots=True)
class AgentClient:
    """Requests to the agent at ``address`` (``host:port`` or ``unix:/path``).

    Every method raises ``AgentUnreachable`` if there is no answer within its deadline, the agent's
    own error (``Fenced``, ``MemoryBudgetTooSmall``, ...) or ``RequestRefused`` if the agent
    refuses, and ``InvalidMessage`` if the answer does not follow the protocol. No connection is
    kept between calls. With ``for_node``, requests are for the agent of that node alone: one that
    has its address by now refuses them with ``AgentMismatch``.
    """

    address: str
    token: str = ""
    timeout_s: float = deadlines.CALL_TIMEOUT_S
    for_node: str = ""

    def node(self) -> NodeInfo:
        """Who the agent is; ``VersionMismatch`` if it has another protocol or format version."""
        status, body = self._exchange("GET", "/v1/node")
        if status != 200:
            raise self._refusal(status, body)
        version = version_of(body)  # first: another version may have other fields
        if version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"agent {self.address} (protocol)", found=version, known=PROTOCOL_VERSION
            )
        info = unpack_message(NodeInfo, body)
        if info.format_version != FORMAT_VERSION:
            where = f"agent {info.node} at {self.address}"
            raise VersionMismatch(where, found=info.format_version, known=FORMAT_VERSION)
        return info

    def call(self, verb: Verb[M, A], message: M, *, timeout_s: float = 0.0) -> A:
        """Call one of the verbs of protocol/verbs.py; the run is taken from the message.

        ``timeout_s`` replaces the client's timeout and what the verb adds to it.
        """
        timeout_s = timeout_s or self.timeout_s + verb.extra_s(message)
        if verb.is_read:
            path, body = f"/v1/runs/{quote(str(message))}/{verb.name}", None
        else:
            path, body = f"/v1/runs/{quote(run_of(message))}/{verb.name}", pack_message(message)
        method = "GET" if verb.is_read else "POST"
        status, answer = self._exchange(method, path, body, timeout_s=timeout_s)
        if status != 200:
            raise self._refusal(status, answer)
        return unpack_message(verb.answer, answer)

    def status(self) -> dict[str, Any]:
        """The status for people and tools, as JSON."""
        status, body = self._exchange("GET", "/v1/status")
        if status != 200:
            raise RequestRefused(self.address, status, body.decode(errors="replace")[:200])
        return dict(json.loads(body))

    def table(self, header: Header) -> np.ndarray:
        """The checksum table of a shard, uint32 (n, rows); ``CorruptFragment`` if damaged."""
        status, body = self._exchange("GET", f"{shard_path(header.shard)}/table")
        if status != 200:
            raise self._refusal(status, body)
        return parse_table(body, header, f"{header.shard} from {self.address}")

    def pull_fragment(
        self,
        shard: ShardId,
        index: int,
        target: memoryview,
        *,
        offset: int = 0,
        timeout_s: float,
        patience_s: float = deadlines.IDLE_TIMEOUT_S,
        pace: http.Pace | None = None,
        wanted: Callable[[], bool] | None = None,
        last: bool = False,
        early: bool = False,
        connections: int = 1,
    ) -> None:
        """Fill ``target`` with a fragment's bytes from ``offset`` on. They are not verified.

        Args:
            shard, index: the fragment.
            target: filled completely; its content is undefined after an error.
            offset: where in the fragment the bytes begin.
            timeout_s: for the whole pull.
            patience_s: ``AgentUnreachable`` is raised if no byte comes for this long.
            pace: is told how many bytes came, and returns when more may come.
            wanted: asked after each read; ``TooSlow`` is raised once it returns False.
            last: prefer the copy on disk to the one in memory.
            early: also if the home copy is still being encoded.
            connections: large targets are pulled over up to so many connections at once.
        """
        query = "?last" if last else "?early" if early else ""
        path = f"{shard_path(shard)}/fragments/{index}{query}"

        def pull(span: slice, wanted: Callable[[], bool] | None) -> None:
            http.pull(
                self.address,
                path,
                target[span],
                offset=offset + span.start,
                token=self.token,
                timeout_s=timeout_s,
                patience_s=patience_s,
                pace=pace,
                wanted=wanted,
            )

        ranges = ranges_of(len(target), connections)
        if len(ranges) > 1:
            pull_ranges(pull, ranges, wanted)
        else:
            pull(ranges[0], wanted)

    def shutdown(self) -> None:
        """End the agent's process; its folder keeps what it holds. Only from its own node."""
        status, body = self._exchange("POST", "/v1/shutdown", b"")
        if status != 200:
            raise self._refusal(status, body)

    def _exchange(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float = 0.0
    ) -> tuple[int, bytes]:
        return http.request(
            self.address,
            method,
            path,
            body=body,
            token=self.token,
            node=self.for_node,
            timeout_s=timeout_s or self.timeout_s,
            limit_bytes=MESSAGE_LIMIT_BYTES,
        )

    def _refusal(self, status: int, body: bytes) -> errors.EcckptError:
        try:
            refusal = unpack_message(Refusal, body)
        except InvalidMessage:
            text = body[:200].decode(errors="replace")
            return RequestRefused(self.address, status, f"not an ecckpt agent's answer: {text}")
        known = errors.revive(refusal.error, refusal.message, refusal.facts)
        return known or RequestRefused(self.address, status, refusal.message)
