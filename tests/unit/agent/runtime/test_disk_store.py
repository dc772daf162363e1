"""An agent's disk: what it wrote it still has, and memory and saves never wait for it."""

import logging
import os
import threading
import time
from pathlib import Path

import pytest

from ecckpt.agent import deadlines
from ecckpt.agent.core.actions import Write
from ecckpt.agent.runtime import disk_store as agent_disk
from ecckpt.agent.runtime.shard_bytes import fragment_view
from ecckpt.agent.storage import disk as disk_tier
from ecckpt.errors import InvalidConfig, MemoryBudgetTooSmall, NotHeld
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, pack_superblock
from ecckpt.policy.rollbacks import RollBack
from ecckpt.protocol.messages.disk import Piece, Retain, Store
from tests.support.builders import generation, header, writer_of
from tests.unit.agent.runtime.services import (
    NEW,
    OLD,
    again,
    commit,
    content,
    fence,
    held,
    keep,
    ledger,
    on_disk,
    stage,
    start,
    store,
)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def agent(tmp_path):
    return start(tmp_path / "memory", tmp_path / "disk")


def restarted(agent):
    """The agent after a kill: memory and disk are still there."""
    return start(Path(agent.info.root), agent._disk.folder)


def after_power_loss(agent, tmp_path):
    return start(tmp_path / f"memory{time.monotonic_ns()}", agent._disk.folder)


def settle(agent):
    """Wait until the disk's thread has done what it was given."""
    while True:
        agent._driver._pools[Write].submit(int).result(10)
        if not ledger(agent).recording:
            break


def read(agent, shard, index):
    path, offset, size_bytes = agent.locate(shard, index)
    return path.read_bytes()[offset : offset + size_bytes]


def test_all_comes_back_without_memory(agent, tmp_path):
    entries = [keep(agent), keep(agent, 2, rank=1), keep(agent, 4, rank=2)]
    wholes = [content(entry) for entry in entries]
    assert store(agent).problems == ()
    agent.retain(Retain("test", writer_of(1), (NEW,)))
    fence(agent, 4, NEW, roll_backs=[RollBack(3, OLD)])
    settle(agent)
    later = after_power_loss(agent, tmp_path)
    assert held(later) == []
    assert on_disk(later) == [(NEW, 0, HOME), (NEW, 1, 2), (NEW, 2, 4)]
    for entry, whole in zip(entries, wholes, strict=True):
        shard, index = entry.header.shard, max(0, entry.header.index)
        size_bytes = entry.header.fragment_bytes
        assert read(later, shard, index) == whole[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + size_bytes]
        assert later.table(shard) == agent.table(shard)
    path, offset, size_bytes = later.locate_shard(entries[0].header.shard)
    assert (
        path.read_bytes()[offset : offset + size_bytes]
        == wholes[0][SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + size_bytes]
    )
    known = ledger(later)
    assert (known.fence, known.stored, known.restored) == (4, (NEW,), NEW)
    assert known.roll_backs == (RollBack(3, OLD),)
    assert known.committed is None  # that was said of memory
    with pytest.raises(NotHeld):
        later.slot(entries[0].header.shard)


def test_what_has_rotted_in_memory_is_had_from_disk(agent):
    entry = keep(agent, 2, rank=1)
    right = bytes(fragment_view(entry.header, entry.region))
    store(agent)
    fragment_view(entry.header, entry.region)[:3] = b"rot"
    shard = entry.header.shard
    assert read(agent, shard, 2)[:3] == b"rot"
    path, offset, size_bytes = agent.locate(shard, 2, last=True)
    assert path.read_bytes()[offset : offset + size_bytes] == right


def test_an_agent_that_was_killed_has_both(agent):
    keep(agent)
    store(agent)
    later = restarted(agent)
    assert held(later) == on_disk(later) == [(NEW, 0, HOME)]
    assert store(later).pieces == (Piece(0, HOME),)


@pytest.mark.parametrize("index", [HOME, 2])
def test_what_has_rotted_in_memory_is_not_stored(agent, index):
    entry = keep(agent, index)
    entry.region.view[SUPERBLOCK_BYTES + entry.header.payload_bytes - 1] ^= 1
    answer = store(agent)
    assert answer.pieces == ()
    assert "1 blocks of fragment" in answer.problems[0]
    assert "fail their CRC32C in memory" in answer.problems[0]
    assert list((agent._disk.folder / "files").iterdir()) == []


def test_a_commit_in_memory_leaves_the_disk_alone(agent):
    keep(agent, gen=OLD)
    store(agent, OLD)
    keep(agent)
    commit(agent, NEW)
    settle(agent)
    assert held(agent) == [(NEW, 0, HOME)]
    assert on_disk(agent) == [(OLD, 0, HOME)]
    store(agent)
    agent.retain(Retain("test", writer_of(1), (NEW,)))
    settle(agent)
    assert on_disk(agent) == [(NEW, 0, HOME)]
    assert [path.name.split(".")[1] for path in agent._disk.tier.found()] == ["10"]


def test_a_disk_that_hangs_keeps_nobody_waiting(agent, monkeypatch):
    hangs, free = threading.Event(), threading.Event()
    real, folder = os.write, str(agent._disk.tier.folder)

    def hang(descriptor, data):
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(folder):
            hangs.set()
            assert free.wait(20)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", hang)
    size = {"shard_bytes": 400_000}
    old = keep(agent, gen=OLD, **size)
    assert store(agent, OLD, wait=False).waiting_bytes == old.header.file_bytes
    assert hangs.wait(10)
    keep(agent, **size)
    commit(agent, NEW)  # the old one is only lent now
    budget_bytes = agent.region_store.tier.used_bytes("test")
    stage(agent, gen=generation(1, 11), budget_bytes=budget_bytes, **size)  # takes its memory
    with pytest.raises(MemoryBudgetTooSmall):  # there is no more to take back
        stage(agent, gen=generation(1, 11), budget_bytes=budget_bytes, rank=1, **size)
    fence(agent, 2, NEW)
    agent.retain(Retain("test", writer_of(2), (NEW,)))
    assert agent.status()["runs"]["test"]["disk_waiting_bytes"] == old.header.file_bytes
    free.set()
    settle(agent)
    assert on_disk(agent) == []  # what was half copied is nobody's
    assert list(agent._disk.tier.folder.iterdir()) == []


def test_a_large_file_on_its_way_is_seen_to_move(agent, monkeypatch):
    entry = keep(agent, shard_bytes=300_000, block_bytes=4096)
    monkeypatch.setattr(agent_disk, "_PIECE_BYTES", 32_768)
    seen = []
    real = os.write

    def look(descriptor, data):
        seen.append(agent.store(Store("test", NEW, 1 << 40, ())).waiting_bytes)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", look)
    store(agent)
    whole = entry.header.file_bytes
    assert seen[:4] == [whole, whole, whole - 32_768, whole - 65_536]
    assert seen == sorted(seen, reverse=True)
    assert store(agent).waiting_bytes == 0


def test_damaged_files_are_named_left_and_not_held(agent, tmp_path):
    for rank in range(3):
        keep(agent, rank=rank)
    store(agent)
    folder = agent._disk.folder
    bad, cut, _ = sorted((folder / "files").iterdir())
    raw = bytearray(bad.read_bytes())
    raw[50] ^= 1
    bad.write_bytes(raw)
    os.truncate(cut, 5000)
    (folder / "runs" / "other.state").write_bytes(b"garbage")
    (folder / "files" / "huge.ecckpt").symlink_to("/dev/zero")
    os.mkfifo(folder / "files" / "pipe.ecckpt")
    later = after_power_loss(agent, tmp_path)
    assert on_disk(later) == [(NEW, 2, HOME)]
    rejected = later.inventory("test").rejected
    assert rejected.keys() == {
        f"disk/{name}" for name in (bad.name, cut.name, "huge.ecckpt", "pipe.ecckpt")
    }
    others = later.inventory("other").rejected
    assert others.keys() == {"disk/other.state", "disk/huge.ecckpt", "disk/pipe.ecckpt"}
    assert bad.read_bytes() == raw
    assert cut.exists()


def test_a_disk_that_cannot_be_read_is_a_problem_and_no_more(tmp_path):
    (tmp_path / "disk").write_text("no folder")
    agent = start(tmp_path / "memory", tmp_path / "disk")
    keep(agent)
    assert "Not a directory" in agent.status()["disk"]["problem"]
    answer = store(agent)
    assert "could not be read when the agent started" in answer.problems[0]
    assert answer.pieces == ()
    commit(agent, NEW)
    assert held(agent) == [(NEW, 0, HOME)]


def test_a_disk_that_is_slow_to_read_is_no_proof_of_absence(agent, tmp_path, monkeypatch):
    keep(agent)
    store(agent)
    free = threading.Event()
    real = disk_tier.DiskTier.adopt

    def slow(tier, path):
        assert free.wait(20)
        return real(tier, path)

    monkeypatch.setattr(deadlines, "DISK_SCAN_PATIENCE_S", 0.01)
    monkeypatch.setattr(disk_tier.DiskTier, "adopt", slow)
    later = after_power_loss(agent, tmp_path)
    assert later.inventory("test").rejected == {"disk, for now": "still being read"}
    free.set()
    settle(later)
    assert later.inventory("test").rejected == {}
    assert on_disk(later) == [(NEW, 0, HOME)]


def test_runs_that_cannot_be_are_not_adopted(agent, tmp_path):
    keep(agent)
    store(agent)
    (path,) = agent._disk.tier.found()
    odd = header(gen=NEW, run="../x")
    path.write_bytes(pack_superblock(odd) + path.read_bytes()[SUPERBLOCK_BYTES:])
    later = after_power_loss(agent, tmp_path)
    assert on_disk(later) == []
    assert "usable name" in later.inventory("test").rejected[f"disk/{path.name}"]
    with pytest.raises(InvalidConfig):
        later.store(Store("../x", NEW, 0, ()))
    assert not again(agent).inventory("test").disk
