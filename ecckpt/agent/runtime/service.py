"""One node's agent without the server around it: one method for each request.

http_app.py calls it from the server's threads. Requests that change something go through the driver
to the core; the others read the core's records under the driver's lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ecckpt.agent import deadlines
from ecckpt.agent.core.core import Core
from ecckpt.agent.core.fetch import slot_of
from ecckpt.agent.core.repair import GuardStatus
from ecckpt.agent.runtime.disk_store import Disk
from ecckpt.agent.runtime.driver import Driver
from ecckpt.agent.runtime.network import PeerNetwork
from ecckpt.agent.runtime.rate_limit import pace_of
from ecckpt.agent.runtime.region_store import RegionStore
from ecckpt.agent.runtime.verify import Blocks, check_entry, check_file
from ecckpt.agent.storage.instance import instance_of
from ecckpt.errors import CorruptFragment, RequestRefused
from ecckpt.format.fragment_file import FORMAT_VERSION, HOME
from ecckpt.format.ids import ShardId
from ecckpt.policy.survival import UNREADABLE_DISK, Inventory
from ecckpt.protocol.encoding import PROTOCOL_VERSION
from ecckpt.protocol.http import Pace
from ecckpt.protocol.messages.disk import Block, Retain, Store, Stored, Verified, Verify
from ecckpt.protocol.messages.node import Done, Identities, NodeInfo
from ecckpt.protocol.messages.repair import Guard, Presence, Probe, Repair
from ecckpt.protocol.messages.restore import Assign, Begin, Fence, Fetch, Fetched, Forget
from ecckpt.protocol.messages.save import (
    Commit,
    Held,
    Hold,
    Prefetch,
    Progress,
    Protect,
    Reserve,
    Revoke,
    Slot,
    Stage,
    Watch,
)
from ecckpt.protocol.messages.trace import Spans, Trace
from ecckpt.protocol.tracing import Tracer

_VERIFYING = 4  # at a time: each keeps one of the server's threads
_LEAST_BYTES_PER_S = 1 << 20  # of a verification: slower ones would keep a thread for hours


class AgentService:
    """Owns the memory under ``root`` and the folder ``disk``; adopts what it finds there.

    Thread-safe. Peers reach the agent at ``address``. ``disk_problem`` says why a configured disk
    cannot be used. The disk is scrubbed at ``scrub_bytes_per_s`` (0: never). Fragments to hold are
    pulled at no more than ``pull_bytes_per_s`` (0: no limit).
    """

    def __init__(
        self,
        root: Path,
        *,
        node: str,
        domain: str,
        address: str,
        token: str,
        disk: Path | None = None,
        disk_problem: str = "",
        scrub_bytes_per_s: float = 0.0,
        pull_bytes_per_s: float = 0.0,
    ) -> None:
        self.region_store = RegionStore(root, node=node)
        self._disk = Disk(disk, node=node) if disk and not disk_problem else None
        self._disk_folder = str(disk or "")
        self.core = Core(
            node=node,
            address=address,
            budget_bytes=self.region_store.tier.default_budget_bytes(),
            disk=disk is not None,
            disk_problem=disk_problem,
            scrub_bytes_per_s=scrub_bytes_per_s if self._disk else 0.0,
        )
        # In this order: memory and its notes first, since they hold the fence; then the disk, whose
        # older notes never replace newer ones; then work that needs both.
        self.region_store.adopt(self.core.records)
        if disk_problem:
            self.core.records.rejected[UNREADABLE_DISK] = disk_problem
        self._tracer, self._ranks_tracer = Tracer(), Tracer()
        network = PeerNetwork(token, self._tracer, pull_bytes_per_s=pull_bytes_per_s)
        self._driver = Driver(self.core, self.region_store, network, self._tracer, self._disk)
        self._driver.adopt_disk(patience_s=deadlines.DISK_SCAN_PATIENCE_S)
        self._driver.start()
        self._verifying = threading.BoundedSemaphore(_VERIFYING)
        self._changed = self._driver.changed
        self.info = NodeInfo(
            node=node,
            instance=instance_of(root, node),
            domain=domain,
            address=address,
            root=str(root),
            protocol_version=PROTOCOL_VERSION,
            format_version=FORMAT_VERSION,
            pid=os.getpid(),
        )

    # -- requests that the core decides -----------------------------------------------------------

    def reserve(self, message: Reserve) -> Slot:
        """Reserve a slot for the next shard of a rank on this node."""
        return cast(Slot, self._driver.ask(message))

    def stage(self, message: Stage) -> Done:
        """Note which shard a rank has put into its reserved slot."""
        return cast(Done, self._driver.ask(message))

    def protect(self, message: Protect) -> Done:
        """Start to protect a shard; ``watch`` reports the progress."""
        return cast(Done, self._driver.ask(message))

    def prefetch(self, message: Prefetch) -> Done:
        """Perhaps pull a fragment that this node will be asked to hold."""
        return cast(Done, self._driver.ask(message))

    def hold(self, message: Hold) -> Done:
        """Queue the pull of a fragment; ``held`` goes to its home when that has ended."""
        return cast(Done, self._driver.ask(message))

    def held(self, message: Held) -> Done:
        """Take a holder's answer to a ``hold`` of this home."""
        return cast(Done, self._driver.ask(message))

    def note(self, message: Commit | Fence | Retain | Revoke) -> Done:
        """Note what changes which generations may go, and drop those."""
        return cast(Done, self._driver.ask(message))

    commit = fence = retain = revoke = note

    def begin(self, message: Begin) -> Inventory:
        """Begin a timeline, and return the inventory of the run."""
        return cast(Inventory, self._driver.ask(message))

    def forget(self, message: Forget) -> Done:
        """Drop everything that is here of a run, in memory and on disk."""
        if self._driver.reading:
            raise RequestRefused(self.info.node, 503, "the disk is still being read")
        return cast(Done, self._driver.ask(message))

    def fetch(self, message: Fetch) -> Fetched:
        """Bring a shard to this node; the answer comes when it is here."""
        return cast(Fetched, self._driver.ask(message))

    def assign(self, message: Assign) -> Slot:
        """Assign a sealed home copy to the process that asks: its region is never written again."""
        return cast(Slot, self._driver.ask(message))

    def guard(self, message: Guard) -> Done:
        """Watch the home copies on this node, and repair what their holders lose."""
        return cast(Done, self._driver.ask(message))

    def repair(self, message: Repair) -> Done:
        """Fetch the shard if it is not here, then have the targets hold what they lack.

        The answer comes when the shard is here; the protection goes on.
        """
        header, run = message.header, message.header.shard.run
        with self._changed:
            home = self.core.records.get(run).find(header.shard, HOME)
        if home is None or home.table is None:
            self.fetch(
                Fetch(
                    header=header,
                    writer=message.writer,
                    sources=message.sources,
                    memory_bytes=message.memory_bytes,
                    timeout_s=message.timeout_s,
                )
            )
        if not message.targets:
            return Done()
        return self.protect(
            Protect(
                shard=header.shard,
                writer=message.writer,
                targets=message.targets,
                min_fragments=0,
                every_living=False,
                memory_bytes=message.memory_bytes,
                timeout_s=message.timeout_s,
                discard=(),
            )
        )

    def store(self, message: Store) -> Stored:
        """Write a generation to disk in the background, or answer how far it is."""
        return cast(Stored, self._driver.ask(message))

    # -- requests that only look ------------------------------------------------------------------

    def watch(self, message: Watch) -> Progress:
        """How far a shard is; waits for news for ``wait_s``, at most ``WATCH_LIMIT_S``."""
        deadline_s = time.monotonic() + min(message.wait_s, deadlines.WATCH_LIMIT_S)
        with self._changed:
            while True:
                now = self.core.progress(message.shard)
                if now.state != message.known_state or time.monotonic() >= deadline_s:
                    return now
                self._changed.wait(max(0.0, deadline_s - time.monotonic()))

    def probe(self, message: Probe) -> Presence:
        """Which fragments of these shards are here, and which are about to be."""
        with self._changed:
            self._driver.notice_removed_files()
            return self.core.presence(message)

    def verify(self, message: Verify) -> Verified:
        """Verify every block of a file of this node."""
        if not self._verifying.acquire(blocking=False):
            raise RequestRefused(self.info.node, 503, f"{_VERIFYING} files are being verified")
        try:
            rate = message.bytes_per_s and max(message.bytes_per_s, _LEAST_BYTES_PER_S)
            pace = pace_of(rate)
            return self._verify_file(message, pace) if message.disk else self._verify(message, pace)
        finally:
            self._verifying.release()

    def _verify(self, message: Verify, pace: Pace) -> Verified:
        with self._driver.pinned(message.shard, message.index) as entry:
            verified = _verified(lambda: check_entry(entry, pace))
            with self._changed:
                entry.damage = _damage(verified)
        return verified

    def _verify_file(self, message: Verify, pace: Pace) -> Verified:
        with self._changed:
            file = self.core.records.find_file(message.shard, message.index)
        verified = _verified(lambda: check_file(file, pace))
        if damage := _damage(verified):
            with self._changed:  # a file that this agent dropped meanwhile is not damaged
                self.core.records.find_file(message.shard, message.index)
                self._driver.note_damage(file, damage)
        return verified

    def slot(self, shard: ShardId) -> Slot:
        """How to map the sealed home copy of a shard."""
        with self._changed:
            self._driver.notice_removed_files()
            home = self.core.home(shard)
            return slot_of(home.header, home.region)

    def inventory(self, run: str) -> Inventory:
        """Everything complete that this node has of a run."""
        with self._changed:
            self._driver.notice_removed_files()
            return self.core.records.get(run).inventory(self.info.node)

    def identities(self, run: str) -> Identities:
        """Which runs of this name the node knows."""
        with self._changed:
            return Identities(self.core.records.identities(run), self.core.records.awaits_disk)

    def table(self, shard: ShardId) -> bytes:
        """The packed checksum table of a shard of which any complete file is here."""
        with self._changed:
            return self.core.records.table(self._in_full(shard))

    def locate(
        self, shard: ShardId, index: int, *, last: bool = False, early: bool = False
    ) -> tuple[Path, int, int]:
        """File, offset and length of a fragment's payload, alone or within a home copy.

        ``last`` prefers the disk to memory; ``early`` includes data of a home copy that is being
        encoded.
        """
        with self._changed:
            where, offset, size_bytes = self.core.records.locate(
                self._in_full(shard), index, last=last, early=early
            )
        return where.path, offset, size_bytes

    def locate_shard(self, shard: ShardId) -> tuple[Path, int, int]:
        """File, offset and length of the safetensors file within a home copy."""
        with self._changed:
            where, offset, size_bytes = self.core.records.locate_shard(self._in_full(shard))
        return where.path, offset, size_bytes

    def _in_full(self, shard: ShardId) -> ShardId:
        """The shard with the run's full name, which people leave out; removed files are noticed."""
        self._driver.notice_removed_files()
        return replace(shard, run=self.core.records.full_name(shard.run))

    def trace(self, run: str) -> Trace:
        """The spans of this agent and of the ranks of its node."""
        with self._changed:
            run = self.core.records.full_name(run)
        return Trace(self.info.node, self._ranks_tracer.spans_of(run), self._tracer.spans_of(run))

    def spans(self, message: Spans) -> Done:
        """Keep the spans of a rank of this node."""
        self._ranks_tracer.add_spans(message.spans)
        return Done()

    def status(self) -> dict[str, Any]:
        """The status for people and tools, as plain JSON values."""
        with self._changed:
            runs = self.core.records.runs()
            problem = self.core.records.rejected.get(UNREADABLE_DISK, "")
        return {
            "node": self.info.node,
            "domain": self.info.domain,
            "address": self.info.address,
            "pid": self.info.pid,
            "disk": {"folder": self._disk_folder, "problem": problem},
            "runs": {run: self._run_status(run) for run in runs},
        }

    def _run_status(self, run: str) -> dict[str, Any]:
        inventory = self.inventory(run)
        homes = inventory.headers.indices.count(HOME)
        with self._changed:
            storing = self.core.archiver.stored(run)
            guard = self.core.repairer.guard_status(run)
            record = self.core.records.get(run)
            damaged = {record.files[key].path.name: why for key, why in record.damaged.items()}
            for entry in record.entries.values():
                if entry.damage:
                    damaged[f"{entry.region.path.name} in memory"] = entry.damage
        return {
            "committed": str(inventory.committed or ""),
            "timeline": inventory.fence,
            "home_copies": homes,
            "fragments": len(inventory.headers) - homes,
            "generations": sorted(
                {str(header.shard.generation) for header in inventory.headers.shards}
            ),
            "guard": _guard_fields(guard) if guard else None,
            "saved_unix_s": max((header.created_unix_s for header in inventory.headers), default=0),
            "used_bytes": self.region_store.tier.used_bytes(run),
            "stored": [str(generation) for generation in inventory.stored],
            "disk_files": len(inventory.disk),
            "disk_bytes": sum(header.file_bytes for header in inventory.disk),
            "disk_waiting_bytes": storing.waiting_bytes,
            "disk_problems": list(storing.problems),
            "damaged": damaged,
            "rejected": dict(inventory.rejected),
        }


def _verified(check: Callable[[], Blocks]) -> Verified:
    try:
        return Verified(tuple(Block(*each) for each in check()), "")
    except (CorruptFragment, OSError) as error:
        return Verified((), str(error))


def _damage(verified: Verified) -> str:
    """What is wrong, in one line; empty if nothing is."""
    if verified.bad:
        return f"{len(verified.bad)} blocks fail their CRC32C"
    return verified.problem


def _guard_fields(guard: GuardStatus) -> dict[str, Any]:
    return {
        "generation": str(guard.generation),
        "margin": guard.margin,
        "missing": guard.missing,
        "lost": list(guard.lost),
        "repairing": str(guard.repairing or ""),
        "repaired": guard.repaired,
        "problem": guard.problem,
    }
