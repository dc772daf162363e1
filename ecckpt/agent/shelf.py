"""Regions and runs on this node: who takes them, gives them up, and finds them again after a kill.

The shelf is the one place that changes a ledger: under its lock, with the files to match.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from ecckpt.agent.ledger import Entry, Ledger
from ecckpt.errors import (
    CorruptFragment,
    InvalidMessage,
    MemoryBudgetTooSmall,
    NotHeld,
    TmpfsFull,
)
from ecckpt.fragment import (
    HOME,
    SUPERBLOCK_BYTES,
    Header,
    crc32c,
    pack_superblock,
    pack_table,
    parse_superblock,
    parse_table,
)
from ecckpt.generation import Generation, ShardId, check_name
from ecckpt.tiers.memory import MemoryTier, Region, whole_pages

_log = logging.getLogger(__name__)

_STATE_LIMIT_BYTES = 4096


class Shelf:
    """All runs of one agent. Thread-safe; ``changed`` is its lock and wakes who waits for news."""

    def __init__(self, root: Path, *, node: str) -> None:
        self.node = node
        self.tier = MemoryTier(root, node=node)
        self.changed = threading.Condition()
        self._states = root / "runs"
        self._states.mkdir(mode=0o700, exist_ok=True)
        self._ledgers: dict[str, Ledger] = {}
        self._rejected: dict[str, str] = {}
        self._noted: dict[str, int] = {}  # the fences that are on file
        self._adopt()

    def runs(self) -> list[str]:
        """Names of all runs this node knows."""
        with self.changed:
            return sorted(self._ledgers)

    def ledger(self, run: str) -> Ledger:
        """The run's ledger; use it only while holding ``changed``."""
        if run not in self._ledgers:
            check_name("run", run)
            self._ledgers[run] = Ledger(run, rejected=self._rejected)
        return self._ledgers[run]

    def look(self, run: str) -> Ledger:
        """The run's ledger to read, under ``changed``: an empty one if the run is not known."""
        return self._ledgers.get(run) or Ledger(run, rejected=self._rejected)

    def admit(self, run: str, writer: int) -> None:
        """Let a writer of that timeline in, or raise ``Fenced``; remembers the newest one."""
        with self.changed:
            ledger = self.ledger(run)
            # Unlike in memory, writing it down may have failed before, and has to be made up for.
            if ledger.admit(writer) or self._noted.get(run) != ledger.fence:
                self._remember(run)
                self._retire(ledger.unfinished())

    def fence(self, run: str, timeline: int, restored: Generation | None) -> None:
        """``admit``, and note what the new timeline continues."""
        self.admit(run, timeline)
        with self.changed:
            if restored is not None:
                self.ledger(run).restored = restored
                self._remember(run)

    def commit(self, run: str, generation: Generation) -> None:
        """Note a committed generation and let older ones go."""
        with self.changed:
            gone = self.ledger(run).commit(generation)
            # First the note, then the bytes: after a kill in between, nothing is missed.
            self._remember(run)
            self._retire(gone)
            self.changed.notify_all()

    def discard(self, run: str, rank: int, generations: Iterable[Generation]) -> None:
        """Let go what a rank's writer gave up."""
        with self.changed:
            ledger = self.ledger(run)
            self._retire(ledger.given_up(rank, set(generations)))

    def discard_unfinished(self, run: str, rank: int) -> None:
        """Let go the slots that the rank reserved and never sealed."""
        with self.changed:
            self._retire(self.ledger(run).unfinished(rank))

    def allocate(self, run: str, size_bytes: int, *, budget_bytes: int, what: str) -> Region:
        """A region for the run, evicting an abandoned timeline if there is no other way."""
        budget_bytes = budget_bytes or self.tier.default_budget_bytes()
        try:
            return self.tier.allocate(run, size_bytes, budget_bytes=budget_bytes, what=what)
        except (MemoryBudgetTooSmall, TmpfsFull):
            with self.changed:
                abandoned = self.ledger(run).abandoned()
                self._retire(abandoned)
            if not abandoned:
                raise
            _log.warning("run %s: dropped %d files of an abandoned timeline", run, len(abandoned))
            return self.tier.allocate(run, size_bytes, budget_bytes=budget_bytes, what=what)

    def put(self, entry: Entry) -> None:
        """Enter a file, sealed or staged; one it replaces is given up."""
        with self.changed:
            ledger = self.ledger(entry.header.shard.run)
            older = ledger.entries.pop(entry.key, None)
            ledger.entries[entry.key] = entry
            if older is not None:
                self._give_up(older)
            self.changed.notify_all()

    def seal(self, entry: Entry, table: np.ndarray) -> None:
        """Complete a file: table and end mark first, superblock last."""
        header, view = entry.header, entry.region.view
        trailer = pack_table(table)
        view[header.trailer_offset : header.trailer_offset + len(trailer)] = trailer
        view[:SUPERBLOCK_BYTES] = pack_superblock(header)
        with self.changed:
            entry.table = table
            self.changed.notify_all()

    @contextmanager
    def pinned(self, shard: ShardId, index: int) -> Iterator[Entry]:
        """The entry, kept from being recycled while in use; ``NotHeld`` if there is none."""
        with self.changed:
            entry = self.look(shard.run).find(shard, index)
            if entry is None:
                raise NotHeld(f"node {self.node} has no {_name(index)} of {shard}")
            entry.pins += 1
        try:
            yield entry
        finally:
            with self.changed:
                entry.pins -= 1
                if entry.doomed and not entry.pins:
                    self._free(entry)

    def table(self, shard: ShardId) -> bytes:
        """The packed checksum table of a shard of which anything sealed is here."""
        with self.changed:
            for (found, _), entry in self.look(shard.run).entries.items():
                if found == shard and entry.table is not None:
                    return pack_table(entry.table)
        raise NotHeld(f"node {self.node} has nothing of {shard}")

    def locate(self, shard: ShardId, index: int) -> tuple[Path, int, int]:
        """File, offset and length of a fragment's payload, also where it is part of a home copy."""
        with self.changed:
            ledger = self.look(shard.run)
            entry = ledger.find(shard, index)
            if entry is not None and entry.table is not None:
                return entry.region.path, SUPERBLOCK_BYTES, entry.header.fragment_bytes
            home = ledger.find(shard, HOME)
            if home is not None and home.table is not None and index >= 0:
                size_bytes, k = home.header.fragment_bytes, home.header.k
                if index < k:
                    return home.region.path, SUPERBLOCK_BYTES + index * size_bytes, size_bytes
                if home.parity is not None and index < home.header.n:
                    offset = SUPERBLOCK_BYTES + (index - k) * size_bytes
                    return home.parity.path, offset, size_bytes
        raise NotHeld(f"node {self.node} has no {_name(index)} of {shard}")

    def _retire(self, entries: Iterable[Entry]) -> None:
        for entry in list(entries):
            self._ledgers[entry.header.shard.run].entries.pop(entry.key, None)
            self._give_up(entry)

    def _give_up(self, entry: Entry) -> None:
        entry.doomed = True
        if not entry.pins:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        run = entry.header.shard.run
        if entry.table is None:
            self.tier.discard(run, entry.region)  # its trainer may still be writing
        else:
            self.tier.recycle(run, entry.region)

    # -- what outlives the process ----------------------------------------------------------------

    def _remember(self, run: str) -> None:
        ledger = self._ledgers[run]
        fields = {
            "fence": ledger.fence,
            "committed": str(ledger.committed or ""),
            "restored": str(ledger.restored or ""),
        }
        body = msgpack.packb(fields)
        path = self._states / f"{run}.state"
        draft = path.with_suffix(".draft")
        draft.write_bytes(crc32c(body).to_bytes(4, "little") + body)
        draft.replace(path)
        self._noted[run] = ledger.fence

    def _adopt(self) -> None:
        for path in sorted(self._states.glob("*.state")):
            # Without the fence that is on file, older writers would be let in: better not begin.
            self._guarded(path, self._adopt_state, fatal=(OSError,))
        for path in self.tier.found():
            self._guarded(path, self._adopt_region)

    def _guarded(
        self, path: Path, adopt: Callable[[Path], None], *, fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        """What cannot be adopted is left where it is and named, never deleted."""
        try:
            if not path.is_file():
                raise InvalidMessage(f"{path.name} is no regular file")
            adopt(path)
        except fatal:
            raise
        except Exception as error:
            self._rejected[path.name] = str(error)
            _log.warning("not adopted: %s: %s", path, error)

    def _adopt_state(self, path: Path) -> None:
        with path.open("rb") as file:
            raw = file.read(_STATE_LIMIT_BYTES)
        if int.from_bytes(raw[:4], "little") != crc32c(raw[4:]):
            raise CorruptFragment(f"{path}: run state fails its CRC32C")
        fields: dict[str, Any] = msgpack.unpackb(raw[4:])
        ledger = self.ledger(path.stem)
        if type(fields.get("fence")) is not int:
            raise InvalidMessage(f"{path}: no fence in it")
        ledger.fence = self._noted[ledger.run] = fields["fence"]
        ledger.committed = Generation.parse(fields["committed"]) if fields["committed"] else None
        ledger.restored = Generation.parse(fields["restored"]) if fields["restored"] else None

    def _adopt_region(self, path: Path) -> None:
        with path.open("rb") as file:
            superblock = file.read(SUPERBLOCK_BYTES)
            header = parse_superblock(superblock, path.name)
            if header is None and not any(superblock):
                # Spare, or never finished: and then its writer may still have it mapped.
                path.unlink()
                return
            if header is None:
                raise CorruptFragment(f"{path.name}: begins like no file of ours")
            if path.stat().st_size < header.file_bytes:  # before believing its numbers
                raise CorruptFragment(f"{path.name}: cut off, {header.file_bytes} bytes expected")
            file.seek(header.trailer_offset)
            table = parse_table(file.read(header.trailer_bytes), header, path.name)
        ledger = self.ledger(header.shard.run)
        entry = Entry(header, self.tier.adopt(ledger.run, path), table)
        ledger.fence = max(ledger.fence, header.shard.generation.timeline)
        if ledger.committed is not None and header.shard.generation < ledger.committed:
            self._free(entry)
        else:
            self.put(entry)


def steady_bytes(header: Header, *, local_ranks: int, holders: int) -> int:
    """Bytes that a node needs for saves like this one, as home and as holder.

    Two generations of home copies and of as many peers' fragments as it sends out, and the parity
    of the save in progress.
    """
    fragments_bytes = holders * whole_pages(header.at(0).file_bytes)
    parity_bytes = whole_pages(SUPERBLOCK_BYTES + header.m * header.fragment_bytes)
    home_bytes = whole_pages(header.at(HOME).file_bytes)
    return local_ranks * (2 * home_bytes + parity_bytes + 2 * fragments_bytes)


def _name(index: int) -> str:
    return "home copy" if index == HOME else f"fragment {index}"
