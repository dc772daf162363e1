"""The memory of one host: regions of plain bytes, under the accounts of the memory tier."""

from __future__ import annotations

from pathlib import Path

from ecckpt.agent.core.actions import Action, Allocate, Borrow, Discard, Recycle
from ecckpt.agent.core.run_record import Entry, RunNotes
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.storage.budget import Accounts
from ecckpt.agent.storage.regions import Region, void
from ecckpt.errors import CorruptFragment, EcckptError, TmpfsFull
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES, parse_superblock, parse_table

_PAGE_BYTES = 4096


class Memory:
    """What lies in a host's tmpfs. It outlives the agent, and goes with the host."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.files: dict[str, Region] = {}
        self.assigned: set[str] = set()  # names of files that are marked
        self.notes: dict[str, RunNotes] = {}
        self.full = False
        self.used_bytes: dict[str, int] = {}
        self._made = 0
        self._accounts: Accounts[Region] = Accounts(node)

    def allocate(self, action: Allocate, default_bytes: int) -> Region:
        """A region, as the memory tier gives it."""
        run = action.run
        size_bytes = _whole_pages(action.size_bytes)
        region = self._accounts.take(run, size_bytes)
        if region is not None:
            return region
        budget_bytes = action.budget_bytes or default_bytes
        freed = self._accounts.reserve(run, size_bytes, budget_bytes=budget_bytes, what=action.what)
        for each in freed:
            self._remove(run, each)
        if self.full:
            self._accounts.release(run, size_bytes)
            raise TmpfsFull(self.node, need_bytes=size_bytes, free_bytes=0)
        self._made += 1
        name = f"{self._made}"
        region = Region(Path(name), size_bytes, memoryview(bytearray(size_bytes)))
        self.files[name] = region
        self.used_bytes[run] = self.used_bytes.get(run, 0) + size_bytes
        return region

    def borrow(self, action: Borrow) -> None:
        """A region that is spare, as the memory tier gives it."""
        header = action.taking.message.header
        size_bytes = _whole_pages(header.file_bytes)
        action.taking.region = self._accounts.take(header.shard.run, size_bytes)

    def let_go(self, action: Recycle | Discard) -> None:
        """Keep a region for the next taker, or forget it; a process that mapped it keeps its bytes."""
        if isinstance(action, Recycle):
            void(action.region)
            self._accounts.keep(action.run, action.region)
        else:
            self._accounts.release(action.run, action.region.size_bytes)
            self._remove(action.run, action.region)

    def adopt(self, ledgers: RunRecords) -> list[Action]:
        """Enter what an earlier agent left, as the shelf does; returns what follows."""
        actions: list[Action] = []
        self._accounts = Accounts(self.node)
        self.used_bytes.clear()
        for run, notes in self.notes.items():
            ledger = ledgers.of(run)
            ledger.believe(notes)
            ledger.noted = notes
        for name, region in list(self.files.items()):
            try:
                entry = self._read(name, region)
            except EcckptError as error:
                ledgers.rejected[name] = str(error)
                continue
            if entry is None:
                del self.files[name]
                continue
            run = entry.header.shard.run
            self._accounts.adopt(run, region)
            self.used_bytes[run] = self.used_bytes.get(run, 0) + region.size_bytes
            region.assigned = name in self.assigned
            actions += ledgers.adopt(entry)
        return actions

    def _read(self, name: str, region: Region) -> Entry | None:
        header = parse_superblock(region.view[:SUPERBLOCK_BYTES], name)
        if header is None:
            if any(region.view[:SUPERBLOCK_BYTES]):
                raise CorruptFragment(f"{name}: begins like no file of ours")
            return None
        start, size_bytes = header.trailer_offset, header.trailer_bytes
        return Entry(
            header, region, parse_table(region.view[start : start + size_bytes], header, name)
        )

    def _remove(self, run: str, region: Region) -> None:
        if self.files.pop(region.name, None) is not None:
            self.used_bytes[run] -= region.size_bytes


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
