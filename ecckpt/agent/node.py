"""One node's agent, without the server around it: a method per request."""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path
from typing import Any

from ecckpt import wire
from ecckpt.agent.fetch import fetch_shard, slot_of
from ecckpt.agent.hold import Holder
from ecckpt.agent.protect import Protector
from ecckpt.agent.shelf import Shelf, steady_bytes
from ecckpt.errors import AgentMismatch, InvalidMessage, MemoryBudgetTooSmall, RequestRefused
from ecckpt.fragment import FORMAT_VERSION, HOME, SUPERBLOCK_BYTES
from ecckpt.generation import ShardId
from ecckpt.recovery import Inventory

_FETCHES = 32


class Agent:
    """Owns the checkpoint memory under ``root``; adopts what it finds there.

    Thread-safe: the server calls it from many threads. Peers reach it at ``address``.
    """

    def __init__(self, root: Path, *, node: str, domain: str, address: str, token: str) -> None:
        self.shelf = Shelf(root, node=node)
        self._token = token
        self._fetching = threading.BoundedSemaphore(_FETCHES)
        self._protector = Protector(self.shelf, address=address, token=token)
        self._holder = Holder(self.shelf, token=token)
        self.info = wire.NodeInfo(
            node=node,
            instance=_instance(root, node),
            domain=domain,
            address=address,
            root=str(root),
            protocol_version=wire.PROTOCOL_VERSION,
            format_version=FORMAT_VERSION,
            pid=os.getpid(),
        )

    def inventory(self, run: str) -> Inventory:
        """Everything complete that this node has of a run."""
        with self.shelf.changed:
            return self.shelf.look(run).inventory(self.info.node)

    def reserve(self, message: wire.Reserve) -> wire.Slot:
        """A slot for the next shard of a rank on this node."""
        header = message.header
        run, rank = header.shard.run, header.shard.rank
        if header.index != HOME:
            raise InvalidMessage(f"a slot for index {header.index}: only home copies are staged")
        budget_bytes = message.memory_bytes or self.shelf.tier.default_budget_bytes()
        need_bytes = steady_bytes(header, local_ranks=message.local_ranks, holders=message.holders)
        if need_bytes > budget_bytes:
            raise MemoryBudgetTooSmall(
                self.info.node,
                need_bytes=need_bytes,
                have_bytes=budget_bytes,
                what=f"keeping shards of {header.shard_bytes:,} bytes for {message.local_ranks} "
                f"local ranks with RS({header.k}, {header.m})",
            )
        self.shelf.admit(run, header.shard.generation.timeline)
        self.shelf.discard(run, rank, message.discard)
        self.shelf.discard_unfinished(run, rank)
        region = self.shelf.allocate(
            run, header.file_bytes, budget_bytes=budget_bytes, what=f"a slot for rank {rank}"
        )
        self.shelf.reserve(run, rank, region)
        return slot_of(header, region)

    def stage(self, message: wire.Stage) -> wire.Done:
        """Say what has been put into a reserved slot."""
        header = message.header
        self.shelf.admit(header.shard.run, header.shard.generation.timeline)
        self.shelf.stage(header, message.region)
        return wire.Done()

    def slot(self, shard: ShardId) -> wire.Slot:
        """The sealed home copy of a shard."""
        with self.shelf.pinned(shard, HOME) as entry:
            if entry.table is None:
                raise InvalidMessage(f"{shard} is still being staged")
            return slot_of(entry.header, entry.region)

    def protect(self, message: wire.Protect) -> wire.Done:
        """Start protecting; ``watch`` tells how it goes."""
        self._protector.start(message)
        return wire.Done()

    def watch(self, message: wire.Watch) -> wire.Progress:
        """How far a shard is."""
        return self._protector.progress(message)

    def hold(self, message: wire.Hold) -> wire.Done:
        """Start pulling a fragment; ``held`` goes to its home when that is done."""
        self._holder.start(message)
        return wire.Done()

    def held(self, message: wire.Held) -> wire.Done:
        """A holder's answer to this home."""
        self._protector.held(message)
        return wire.Done()

    def commit(self, message: wire.Commit) -> wire.Done:
        """Let older generations go."""
        self.shelf.commit(message.run, message.generation)
        return wire.Done()

    def fence(self, message: wire.Fence) -> wire.Done:
        """Refuse older timelines."""
        self.shelf.fence(message.run, message.timeline, message.restored, message.roll_backs)
        return wire.Done()

    def fetch(self, message: wire.Fetch) -> wire.Fetched:
        """Bring a shard here.

        Fetching keeps a server thread until it is done; it may never keep so many that none is
        left to serve the peers that fetch from here.
        """
        if not self._fetching.acquire(blocking=False):
            raise RequestRefused(self.info.node, 503, f"{_FETCHES} shards are being fetched")
        try:
            return fetch_shard(self.shelf, message, token=self._token)
        finally:
            self._fetching.release()

    def locate_shard(self, shard: ShardId) -> tuple[Path, int, int]:
        """File, offset and length of the safetensors file within a home copy."""
        with self.shelf.pinned(shard, HOME) as entry:
            if entry.table is None:
                raise InvalidMessage(f"{shard} is still being staged")
            return entry.region.path, SUPERBLOCK_BYTES, entry.header.shard_bytes

    def status(self) -> dict[str, Any]:
        """What people and tools want to know, as plain JSON values."""
        return {
            "node": self.info.node,
            "domain": self.info.domain,
            "address": self.info.address,
            "pid": self.info.pid,
            "runs": {run: self._run_status(run) for run in self.shelf.runs()},
        }

    def _run_status(self, run: str) -> dict[str, Any]:
        inventory = self.inventory(run)
        homes = [header for header in inventory.headers if header.index == HOME]
        return {
            "committed": str(inventory.committed or ""),
            "timeline": inventory.fence,
            "home_copies": len(homes),
            "fragments": len(inventory.headers) - len(homes),
            "generations": sorted({str(header.shard.generation) for header in inventory.headers}),
            "used_bytes": self.shelf.tier.used_bytes(run),
            "rejected": dict(inventory.rejected),
        }


def _instance(root: Path, node: str) -> str:
    """The id of this node's memory: drawn once, and gone when the memory is.

    Raises ``AgentMismatch`` if the folder is another node's: its peers know it by that name.
    """
    path = root / "instance"
    if not path.exists():
        path.write_text(f"{secrets.token_hex(8)} {node}")
    instance, owner = path.read_text().split(maxsplit=1)
    if owner != node:
        raise AgentMismatch(
            f"{root} is the memory of node {owner}, not of {node}",
            hint=f"give --node {owner}, or another --root",
        )
    return instance
