"""Every block on a node is checked, in memory and on disk, and what is bad is named."""

import json
import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from ecckpt.agent.core.actions import Due, Scrubbing, Seal
from ecckpt.agent.runtime import rate_limit as pace
from ecckpt.agent.runtime import verify
from ecckpt.agent.runtime.rate_limit import pace_of
from ecckpt.agent.runtime.service import AgentService
from ecckpt.agent.runtime.verify import check_entry, verdict_on
from ecckpt.cli import main
from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import CorruptFragment, NotHeld, RequestRefused
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES
from ecckpt.protocol.messages.disk import Block, Verified, Verify
from ecckpt.protocol.messages.repair import Probe
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import header
from tests.support.worlds import World, states_for
from tests.unit.agent.runtime.services import NEW, on_disk, stage, start, store

BLOCK = 4096


@pytest.fixture(autouse=True)
def _quiet(caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(verify, "_WINDOW_BYTES", 3 * BLOCK)


@pytest.fixture
def agent(tmp_path):
    return start(tmp_path / "memory", tmp_path / "disk")


def keep(agent, index=HOME, **fields):
    """A sealed file whose blocks are right: so many that they are checked in several pieces."""
    entry = stage(agent, index, shard_bytes=100_000, block_bytes=BLOCK, **fields)
    shard, view = entry.header, entry.region.view
    size_bytes, count = shard.fragment_bytes, shard.k if index == HOME else 1
    noise = np.random.default_rng(index + 1).bytes(size_bytes * count)
    view[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + len(noise)] = noise
    table = np.zeros((shard.n, shard.rows), np.uint32)
    for at in range(count):
        piece = noise[at * size_bytes : (at + 1) * size_bytes]
        table[max(index, at)] = Codec(1, 0).encode([memoryview(piece)], [], BLOCK)[0]
    entry.table = table
    agent._driver._settle(Seal(entry))
    return entry


def flip(path, *offsets):
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


def asked(agent, entry, *, disk, bytes_per_s=0):
    message = Verify(entry.header.shard, entry.header.index, disk, bytes_per_s)
    return agent.verify(message)


@pytest.mark.parametrize("index", [HOME, 0, 2, 4])
@pytest.mark.parametrize("disk", [False, True])
def test_what_is_right_is_right_and_every_bad_block_is_named(agent, index, disk):
    entry = keep(agent, index)
    store(agent)
    assert asked(agent, entry, disk=disk) == Verified((), "")
    shard = entry.header
    where = [
        (at, row)
        for at in (range(shard.k) if index == HOME else [index])
        for row in range(shard.rows)
    ]
    path = next(iter(agent._disk.tier.found())) if disk else entry.region.path
    for at, row in where:
        place = at if index == HOME else 0
        offset = SUPERBLOCK_BYTES + place * shard.fragment_bytes + shard.block(row).start
        flip(path, offset)
        assert asked(agent, entry, disk=disk).bad == (Block(at, row),)
        flip(path, offset)
    first, last = SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + shard.payload_bytes - 1
    flip(path, first, last)
    bad = [Block(*each) for each in (where[0], where[-1])]
    assert list(asked(agent, entry, disk=disk).bad) == bad


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("offset", [0, 50, SUPERBLOCK_BYTES - 1, -1, -20, -100])
def test_what_stands_around_the_blocks_is_checked_too(agent, offset, disk):
    entry = keep(agent, 2)
    store(agent)
    path = next(iter(agent._disk.tier.found())) if disk else entry.region.path
    flip(path, offset if offset >= 0 else entry.header.file_bytes + offset)
    found = asked(agent, entry, disk=disk)
    assert found.problem
    assert found.bad == ()
    (why,) = agent.status()["runs"]["test"]["damaged"].values()
    assert why == found.problem


def test_every_byte_around_the_blocks_in_memory_is_checked(agent):
    entry = keep(agent, 2)
    shard, view = entry.header, entry.region.view
    ends = range(shard.trailer_offset, shard.trailer_offset + shard.trailer_bytes)
    for at in (*range(SUPERBLOCK_BYTES), *ends):
        view[at] ^= 0x40
        with pytest.raises(CorruptFragment):
            check_entry(entry, pace_of(0))
        view[at] ^= 0x40
    assert check_entry(entry, pace_of(0)) == []


@pytest.mark.parametrize("disk", [False, True])
def test_what_was_found_damaged_does_not_count_as_held(agent, disk):
    entry = keep(agent, 2)
    if disk:
        store(agent)
        agent._driver.core.records.retire([entry])
    path = next(iter(agent._disk.tier.found())) if disk else entry.region.path
    flip(path, SUPERBLOCK_BYTES + 5)
    probe = Probe("test", (entry.header.shard,))
    assert agent.probe(probe).held == ((2,),)
    assert asked(agent, entry, disk=disk).bad
    assert agent.probe(probe).held == ((),)
    assert len(agent.inventory("test").disk if disk else agent.inventory("test").headers) == 1


def test_a_file_cut_short_or_that_cannot_be_read_is_a_problem(agent):
    entry = keep(agent, 2)
    store(agent)
    (path,) = agent._disk.tier.found()
    os.truncate(path, SUPERBLOCK_BYTES + 5000)
    assert asked(agent, entry, disk=True).problem
    path.unlink()
    path.mkdir()
    assert "directory" in asked(agent, entry, disk=True).problem


def test_what_is_not_here_is_not_held(agent):
    with pytest.raises(NotHeld, match="fragment 3"):
        agent.verify(Verify(header(gen=NEW).shard, 3, False, 0))
    with pytest.raises(NotHeld, match="on disk"):
        agent.verify(Verify(header(gen=NEW).shard, 3, True, 0))
    staged = stage(agent)
    with pytest.raises(NotHeld, match="staged"):
        asked(agent, staged, disk=False)


def test_no_more_than_some_at_a_time(agent):
    entry = keep(agent)
    for _ in range(4):
        assert agent._verifying.acquire(blocking=False)
    with pytest.raises(RequestRefused, match="503"):
        asked(agent, entry, disk=False)
    agent._verifying.release()
    assert asked(agent, entry, disk=False).bad == ()


def test_reading_keeps_to_its_rate(monkeypatch):
    slept, now = [], [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(pace.time, "sleep", sleep)
    wait = pace_of(1000.0)
    for _ in range(10):
        wait(500)
    assert sum(slept) == pytest.approx(5.0)
    wait = pace_of(0)
    wait(1 << 40)
    assert sum(slept) == pytest.approx(5.0)


def scrub(agent):
    """One round, by the agent's own threads."""
    scrubbing = Scrubbing()
    with agent._driver.changed:
        resting = len(agent._driver._alarm._pending)
    agent._driver._handle(Due(scrubbing))
    with agent._driver.changed:
        rests = agent._driver.changed.wait_for(
            lambda: len(agent._driver._alarm._pending) > resting, timeout=20
        )
    assert rests


def test_the_scrub_finds_what_rots_and_says_it_once(agent, caplog):
    for index in (HOME, 2):
        keep(agent, index)
    store(agent)
    scrub(agent)
    assert agent.status()["runs"]["test"]["damaged"] == {}
    fragment, home = sorted(agent._disk.tier.found())
    flip(fragment, SUPERBLOCK_BYTES + 5, SUPERBLOCK_BYTES + BLOCK)
    flip(home, 60)
    caplog.set_level(logging.WARNING)
    scrub(agent)
    scrub(agent)
    damaged = agent.status()["runs"]["test"]["damaged"]
    assert damaged.keys() == {fragment.name, home.name}
    assert damaged[fragment.name] == "2 of 9 blocks fail their CRC32C"
    assert caplog.text.count("damaged: ") == 2
    assert len(on_disk(agent)) == 2  # its good blocks still help


@pytest.mark.parametrize(("bytes_per_s", "rounds"), [(1e6, 1), (0.0, 0)])
def test_an_agent_begins_to_scrub_by_itself(tmp_path, bytes_per_s, rounds):
    agent = AgentService(
        tmp_path / "memory",
        node="n1",
        domain="n1",
        address="127.0.0.1:1",
        token="",
        disk=tmp_path / "disk",
        scrub_bytes_per_s=bytes_per_s,
    )
    pending = [due.task for _, _, due in agent._driver._alarm._pending]
    assert sum(isinstance(task, Scrubbing) for task in pending) == rounds


def test_a_file_that_the_agent_removes_meanwhile_is_no_fault(agent):
    entry = keep(agent, 2)
    store(agent)
    (file,) = agent.core.records.files()
    agent.core.records.remove("test", [file])
    file.path.unlink()
    assert not agent.core.records.note_damage(file, verdict_on(file, pace_of(0)))
    with pytest.raises(NotHeld):
        asked(agent, entry, disk=True)


def test_a_file_that_another_process_removes_is_a_fault(agent):
    entry = keep(agent, 2)
    store(agent)
    (file,) = agent.core.records.files()
    file.path.unlink()
    scrub(agent)
    damaged = {file.path.name: f"{file.path.name} is not there any more"}
    assert agent.status()["runs"]["test"]["damaged"] == damaged
    assert "No such file" in asked(agent, entry, disk=True).problem


def test_people_are_told_what_is_bad_and_where(tmp_path: Path, capsys) -> None:
    with LocalCluster(nodes=3, disk=tmp_path) as cluster:
        states = states_for(3, seed=1)
        with World(cluster, code=(1, 1)) as world:
            world.restore(states)
            assert all(each.wait(30) for each in world.save(1, states))
            deadline_s = time.monotonic() + 20
            while world.checkpointers[0].stored() is None:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
        addresses = cluster.addresses()
        assert main(["verify", "test", *addresses]) == 0
        assert "n1: 6 files" in capsys.readouterr().out
        assert main(["verify", "tset", *addresses]) == 2  # a name that nobody knows
        assert "nothing of run 'tset'" in capsys.readouterr().err
        assert main(["verify", "test", "--root", str(cluster.root("n0"))]) == 0
        (path,) = (tmp_path / "n1" / "files").glob("*@1@home.ecckpt")
        flip(path, SUPERBLOCK_BYTES)
        capsys.readouterr()
        assert main(["verify", "test", *addresses, "--json", "--max-mb-s", "1000"]) == 1
        found = {each["node"]: each for each in json.loads(capsys.readouterr().out)}
        (line,) = found["n1"]["bad"]
        assert "/1.1." in line
        assert "on disk: 1 blocks fail their CRC32C (fragment/row 0/0)" in line
        assert found["n0"]["bad"] == found["n2"]["bad"] == []
        cluster.kill("n2")
        assert main(["verify", "test", *addresses]) == 1
        assert "refused" in capsys.readouterr().out
        assert main(["verify", "test", addresses[2]]) == 2
