"""One agent, as seen from elsewhere: a method per request of docs/PROTOCOL.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from ecckpt import errors, wire
from ecckpt.errors import InvalidMessage, RequestRefused, VersionMismatch
from ecckpt.fragment import FORMAT_VERSION, Header, parse_table
from ecckpt.generation import Generation, ShardId
from ecckpt.recovery import Inventory
from ecckpt.transport import http
from ecckpt.transport.http import split_address
from ecckpt.transport.ranges import pull_ranges, ranges_of

T = TypeVar("T")

_READ_BYTES_PER_S = 20e6  # of a disk that others use as well
_FAULT_IN_BYTES_PER_S = 200e6  # a fifth of what fresh tmpfs pages were measured at


def peer_client(address: str, token: str, *, timeout_s: float = 10.0) -> AgentClient:
    """A client of another node's agent, at an address that came over the network.

    Raises ``InvalidConfig`` for anything but ``host:port``: nobody gets at Unix sockets here.
    """
    split_address(address)
    return AgentClient(address, token, timeout_s)


def shard_path(shard: ShardId) -> str:
    """The path under which an agent serves what it has of a shard."""
    return f"/v1/runs/{quote(shard.run)}/shards/{shard.generation}/{shard.rank}"


@dataclass(frozen=True, slots=True)
class AgentClient:
    """Requests to the agent at ``address`` (``host:port`` or ``unix:/path``).

    Every method raises ``AgentUnreachable`` when there is no answer within its deadline,
    the agent's own error (``Fenced``, ``MemoryBudgetTooSmall``, ...) or ``RequestRefused`` when it
    says no, and ``InvalidMessage`` when it talks nonsense.
    Holds no connection between calls.
    """

    address: str
    token: str = ""
    timeout_s: float = 10.0

    def node(self) -> wire.NodeInfo:
        """Who it is; ``VersionMismatch`` if it speaks another protocol or format."""
        status, body = self._exchange("GET", "/v1/node")
        if status != 200:
            raise self._refusal(status, body)
        version = wire.version_of(body)  # before the rest, which another version may shape anew
        if version != wire.PROTOCOL_VERSION:
            raise VersionMismatch(
                f"agent {self.address} (protocol)", found=version, known=wire.PROTOCOL_VERSION
            )
        info = wire.unpack(wire.NodeInfo, body)
        if info.format_version != FORMAT_VERSION:
            where = f"agent {info.node} at {self.address}"
            raise VersionMismatch(where, found=info.format_version, known=FORMAT_VERSION)
        return info

    def inventory(self, run: str) -> Inventory:
        """What it holds of a run."""
        return self._get(Inventory, f"/v1/runs/{quote(run)}/inventory")

    def status(self) -> dict[str, Any]:
        """The status for people, as JSON."""
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
        patience_s: float = http.IDLE_TIMEOUT_S,
        pace: http.Pace | None = None,
        wanted: Callable[[], bool] | None = None,
        last: bool = False,
        early: bool = False,
        connections: int = 1,
    ) -> None:
        """Fill ``target`` with a fragment's bytes from ``offset`` on, unverified.

        ``last``: from the disk rather than from memory, if it has both; ``early``: even if it is
        still being encoded. What is large is pulled over so many ``connections`` at once. Raises
        ``AgentUnreachable`` if nothing comes for ``patience_s``, ``TooSlow`` once it is no longer
        ``wanted``.
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

    def trace(self, run: str) -> wire.Trace:
        """Where time went in saves and restores of a run on that node."""
        return self._get(wire.Trace, f"/v1/runs/{quote(run)}/trace")

    def spans(self, message: wire.Spans) -> None:
        """Tell where a rank's time went (only to the agent of its own node)."""
        self._post(wire.Done, message.run, "spans", message)

    def reserve(self, message: wire.Reserve) -> wire.Slot:
        """A slot to stage a shard in (only on the agent's own node).

        Its first time may take as long as faulting in that much memory does.
        """
        header = message.header
        timeout_s = self.timeout_s + header.file_bytes / _FAULT_IN_BYTES_PER_S
        return self._post(wire.Slot, header.shard.run, "reserve", message, timeout_s=timeout_s)

    def stage(self, message: wire.Stage) -> None:
        """Say what has been put into a reserved slot (only on the agent's own node)."""
        self._post(wire.Done, message.header.shard.run, "stage", message)

    def slot(self, shard: ShardId) -> wire.Slot:
        """The slot of a sealed home copy (only on the agent's own node)."""
        return self._post(wire.Slot, shard.run, "slot", shard)

    def assign(self, shard: ShardId) -> wire.Slot:
        """``slot``, to be mapped for good: never written again (only on the agent's own node)."""
        return self._post(wire.Slot, shard.run, "assign", wire.Assign(shard))

    def protect(self, message: wire.Protect) -> None:
        """Start protecting a staged or sealed shard."""
        self._post(wire.Done, message.shard.run, "protect", message)

    def watch(self, message: wire.Watch) -> wire.Progress:
        """How far a shard is, waiting for news up to ``message.wait_s``."""
        return self._post(
            wire.Progress,
            message.shard.run,
            "watch",
            message,
            timeout_s=self.timeout_s + message.wait_s,
        )

    def prefetch(self, message: wire.Prefetch) -> None:
        """Tell a peer what it will be asked to hold."""
        self._post(wire.Done, message.header.shard.run, "prefetch", message)

    def hold(self, message: wire.Hold) -> None:
        """Ask a peer to pull a fragment; it answers later with ``held``."""
        self._post(wire.Done, message.header.shard.run, "hold", message)

    def held(self, message: wire.Held) -> None:
        """Tell the home that a ``hold`` is done."""
        self._post(wire.Done, message.shard.run, "held", message)

    def guard(self, message: wire.Guard) -> None:
        """Have the agent watch over its home copies of a run (only on its own node)."""
        self._post(wire.Done, message.run, "guard", message)

    def probe(self, message: wire.Probe) -> wire.Presence:
        """What it has of these shards."""
        seen = self._post(wire.Presence, message.run, "probe", message)
        if not len(seen.held) == len(seen.coming) == len(message.shards):
            raise InvalidMessage(f"agent {self.address} answers for other shards than asked")
        return seen

    def commit(self, run: str, generation: Generation) -> None:
        """Tell an agent that a generation is safe everywhere."""
        self._post(wire.Done, run, "commit", wire.Commit(run, generation))

    def store(self, message: wire.Store) -> wire.Stored:
        """Have it write a generation to disk, or learn how far that is."""
        return self._post(wire.Stored, message.run, "store", message)

    def retain(self, message: wire.Retain) -> None:
        """Tell it which generations are on disk everywhere and stay."""
        self._post(wire.Done, message.run, "retain", message)

    def verify(self, message: wire.Verify, header: Header) -> wire.Verified:
        """Have it check a file that it has; takes as long as reading it does."""
        rate = min(message.bytes_per_s or _READ_BYTES_PER_S, _READ_BYTES_PER_S)
        timeout_s = self.timeout_s + 2 * header.file_bytes / rate
        return self._post(wire.Verified, message.shard.run, "verify", message, timeout_s=timeout_s)

    def repair(self, message: wire.Repair) -> None:
        """Have it bring a shard to its node, if it is not there, and spread what is missing."""
        timeout_s = self.timeout_s + message.timeout_s
        run = message.header.shard.run
        self._post(wire.Done, run, "repair", message, timeout_s=timeout_s)

    def begin(self, message: wire.Begin) -> Inventory:
        """Begin a timeline there, and see what it holds; ``Fenced`` if another one has begun."""
        return self._post(Inventory, message.run, "begin", message)

    def forget(self, message: wire.Forget) -> None:
        """Have an agent drop all that it holds of a run; ``Fenced`` if it has begun anew."""
        self._post(wire.Done, message.run, "forget", message)

    def fence(self, message: wire.Fence) -> None:
        """Tell an agent to refuse writers of older timelines."""
        self._post(wire.Done, message.run, "fence", message)

    def fetch(self, message: wire.Fetch) -> wire.Fetched:
        """Bring a shard to the agent's node (only from there)."""
        return self._post(
            wire.Fetched,
            message.header.shard.run,
            "fetch",
            message,
            timeout_s=self.timeout_s + message.timeout_s,
        )

    def shutdown(self) -> None:
        """End the agent; what it holds stays in its folder (only from its own node)."""
        status, body = self._exchange("POST", "/v1/shutdown", b"")
        if status != 200:
            raise self._refusal(status, body)

    def _get(self, kind: type[T], path: str) -> T:
        status, body = self._exchange("GET", path)
        if status != 200:
            raise self._refusal(status, body)
        return wire.unpack(kind, body)

    def _post(
        self, kind: type[T], run: str, verb: str, message: object, *, timeout_s: float = 0.0
    ) -> T:
        path = f"/v1/runs/{quote(run)}/{verb}"
        status, body = self._exchange("POST", path, wire.pack(message), timeout_s=timeout_s)
        if status != 200:
            raise self._refusal(status, body)
        return wire.unpack(kind, body)

    def _exchange(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float = 0.0
    ) -> tuple[int, bytes]:
        return http.request(
            self.address,
            method,
            path,
            body=body,
            token=self.token,
            timeout_s=timeout_s or self.timeout_s,
            limit_bytes=wire.MESSAGE_LIMIT_BYTES,
        )

    def _refusal(self, status: int, body: bytes) -> errors.EcckptError:
        try:
            refusal = wire.unpack(wire.Refusal, body)
        except InvalidMessage:
            text = body[:200].decode(errors="replace")
            return RequestRefused(self.address, status, f"not an ecckpt agent's answer: {text}")
        known = errors.revive(refusal.error, refusal.message, refusal.facts)
        return known or RequestRefused(self.address, status, refusal.message)
