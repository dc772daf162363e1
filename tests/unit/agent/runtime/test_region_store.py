"""An agent's files: what it was given it still has after a kill; what it cannot trust it leaves."""

import errno
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import MagicMock

import msgpack
import pytest

from ecckpt.agent.core.actions import Remember
from ecckpt.agent.runtime.service import AgentService
from ecckpt.agent.runtime.shard_bytes import encode_home
from ecckpt.agent.storage.regions import TmpfsFiles, whole_pages
from ecckpt.coding.crc32c import crc32c
from ecckpt.errors import CorruptFragment, Fenced, InvalidConfig, MemoryBudgetTooSmall, NotHeld
from ecckpt.format.fragment_file import (
    FORMAT_VERSION,
    HOME,
    SUPERBLOCK_BYTES,
    pack_superblock,
    parse_table,
)
from ecckpt.format.ids import RunWriter
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.sizing import parity_region_bytes, steady_bytes
from ecckpt.protocol.messages.disk import Verify
from ecckpt.protocol.messages.repair import Probe
from ecckpt.protocol.messages.restore import Begin
from ecckpt.protocol.messages.save import Reserve, Stage
from tests.support.builders import generation, header, table_of
from tests.support.media import fill, small_tmpfs
from tests.unit.agent.runtime.services import (
    BUDGET,
    NEW,
    OLD,
    again,
    commit,
    content,
    fence,
    held,
    keep,
    ledger,
    room,
    seal,
    settle,
    stage,
    start,
)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(prefix="ecckpt-shelf-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def agent(root):
    return AgentService(root, node="n1", domain="n1", address="127.0.0.1:1", token="")


def used_bytes(agent, run="test"):
    return agent.region_store.tier.used_bytes(run)


def give_up(agent, rank, gens, run="test"):
    settle(agent, agent.core.records.discard(run, rank, gens))


def let_unfinished_go(agent, rank, run="test"):
    settle(agent, agent.core.records.retire(ledger(agent, run).unfinished(rank)))


def rejected(agent):
    return dict(agent.inventory("test").rejected)


def find(agent, shard, index):
    return agent.core.records.find(shard, index)


def region_files(agent):
    return sorted(path.name for path in agent.region_store.tier._folder.iterdir())


def damage(path, offset, mask=0xFF):
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


# -- put, find, commit ----------------------------------------------------------------------------


def test_only_what_is_sealed_is_held(agent):
    entry = stage(agent)
    assert held(agent) == []
    seal(agent, entry, table_of(entry.header))
    assert held(agent) == [(NEW, 0, HOME)]


def test_a_commit_recycles_what_is_older(agent):
    old, fragment, new = keep(agent, gen=OLD), keep(agent, 2, gen=OLD), keep(agent)
    commit(agent, NEW)
    assert held(agent) == [(NEW, 0, HOME)]
    assert bytes(old.region.view[:SUPERBLOCK_BYTES]) == bytes(SUPERBLOCK_BYTES)
    assert stage(agent, gen=generation(1, 11)).region is old.region
    assert stage(agent, 2, gen=generation(1, 11)).region is fragment.region
    assert new.region.path.exists()


def test_what_replaces_a_file_recycles_it(agent):
    first = keep(agent, 1)
    second = keep(agent, 1)
    assert held(agent) == [(NEW, 0, 1)]
    assert ledger(agent).find(second.header.shard, 1) is second
    assert stage(agent, 4).region is first.region


def test_what_is_in_use_is_recycled_afterwards(agent):
    old = keep(agent, gen=OLD)
    before = content(old)
    old.pins += 1  # as a protection job does
    keep(agent, rank=1)
    commit(agent, NEW)
    assert held(agent) == [(NEW, 1, HOME)]
    assert content(old) == before
    assert stage(agent).region is not old.region
    settle(agent, agent.core.records.unpin(old))
    assert stage(agent, rank=1).region is old.region


def test_a_staged_slot_that_goes_is_not_recycled(agent):
    slot = stage(agent)
    let_unfinished_go(agent, 0, "test")
    assert not slot.region.path.exists()  # its trainer may still be writing
    assert stage(agent).region is not slot.region


def test_a_discard_takes_only_what_its_own_writer_gave_up(agent):
    keep(agent, gen=OLD)
    keep(agent)
    keep(agent, rank=1)
    commit(agent, OLD)
    give_up(agent, 0, [OLD, NEW], "test")
    assert held(agent) == [(OLD, 0, HOME), (NEW, 1, HOME)]


def test_nothing_held_is_an_error_that_says_what(agent):
    shard = keep(agent, 2).header.shard
    assert held(agent) == [(NEW, 0, 2)]
    with pytest.raises(NotHeld, match=r"node n1 has no fragment 3 of test/1\.10"):
        agent.locate(shard, 3)
    with pytest.raises(NotHeld, match="no home copy"):
        agent.slot(shard)
    with pytest.raises(NotHeld, match="nothing of"):
        agent.table(header(rank=5).shard)


def test_fragments_lie_in_their_own_file_or_in_the_home_copy(agent):
    home, fragment = keep(agent, rank=0), keep(agent, 1, rank=1)
    size_bytes = home.header.fragment_bytes
    for index in range(3):
        assert agent.locate(home.header.shard, index) == (
            home.region.path,
            SUPERBLOCK_BYTES + index * size_bytes,
            size_bytes,
        )
    assert agent.locate(fragment.header.shard, 1) == (
        fragment.region.path,
        SUPERBLOCK_BYTES,
        size_bytes,
    )
    with pytest.raises(NotHeld):
        agent.locate(home.header.shard, 3)
    home.parity = room(agent, "test", parity_region_bytes(home.header))
    assert agent.locate(home.header.shard, 4) == (
        home.parity.path,
        SUPERBLOCK_BYTES + size_bytes,
        size_bytes,
    )
    with pytest.raises(NotHeld):
        agent.locate(home.header.shard, 5)


def test_a_table_comes_from_any_sealed_piece(agent):
    entry = keep(agent, 2)
    found = parse_table(agent.table(entry.header.shard), entry.header, "here")
    assert (found == entry.table).all()


def test_run_names_that_cannot_be_paths_are_refused(agent):
    with pytest.raises(InvalidConfig):
        fence(agent, 1, run="../elsewhere")
    assert agent.core.records.runs() == []


# -- budget ---------------------------------------------------------------------------------------


def test_an_abandoned_timeline_goes_when_the_budget_leaves_no_other_way(agent):
    keep(agent, gen=generation(1, 300), shard_bytes=100_000)
    keep(agent, gen=generation(1, 5000), shard_bytes=100_000)
    budget_bytes = used_bytes(agent, "test") + 60_000
    with pytest.raises(MemoryBudgetTooSmall):
        stage(agent, gen=generation(2, 301), shard_bytes=100_000, budget_bytes=budget_bytes)
    fence(agent, 2, generation(1, 300))
    stage(agent, gen=generation(2, 301), shard_bytes=100_000, budget_bytes=budget_bytes)
    assert held(agent) == [(generation(1, 300), 0, HOME)]
    with pytest.raises(MemoryBudgetTooSmall):
        stage(agent, gen=generation(2, 302), shard_bytes=100_000, budget_bytes=budget_bytes)
    assert held(agent) == [(generation(1, 300), 0, HOME)]


def test_the_steady_need_is_two_generations_and_parity():
    shard = header(shard_bytes=100_000)
    home, parity, fragment = map(
        whole_pages, (shard.file_bytes, parity_region_bytes(shard), shard.at(0).file_bytes)
    )
    assert steady_bytes(shard, local_ranks=2, holders=5) == 2 * (2 * home + parity + 10 * fragment)


def test_a_budget_of_the_steady_need_is_enough(agent):
    # Regions are whole pages: without counting that, small shards failed at their second save.
    budget_bytes = steady_bytes(header(), local_ranks=1, holders=1)
    tier = agent.region_store.tier
    for step in (1, 2, 3):
        which = generation(1, step)
        keep(agent, gen=which, budget_bytes=budget_bytes)
        size_bytes = parity_region_bytes(header())
        parity = tier.allocate("test", size_bytes, budget_bytes=budget_bytes, what="parity")
        tier.recycle("test", parity)
        keep(agent, 0, gen=which, budget_bytes=budget_bytes)
        commit(agent, which)


# -- timelines ------------------------------------------------------------------------------------


def test_a_newer_timeline_lets_unfinished_slots_go_and_nothing_else(agent):
    slot, kept = stage(agent, gen=generation(1, 11)), keep(agent)
    fence(agent, 2)
    assert not slot.region.path.exists()
    assert kept.region.path.exists()
    with pytest.raises(Fenced, match=r"timeline 1 .* timeline 2"):
        fence(agent, 1)


def test_as_many_roll_backs_as_are_remembered_fit_into_the_run_state(agent):
    huge = 10**18 - 100
    each = [RollBack(huge + at + 1, generation(huge + at)) for at in range(64)]
    fence(agent, huge + 65, roll_backs=each)
    assert len(ledger(again(agent)).roll_backs) == 64


def test_a_fence_that_could_not_be_written_down_is_made_up_for(agent, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TmpfsFiles, "draft", full)
        with pytest.raises(OSError, match="No space"):
            fence(agent, 2)
    with pytest.raises(Fenced):
        fence(agent, 1)
    fence(agent, 2)
    with pytest.raises(Fenced):
        fence(again(agent), 1)


def test_a_state_that_cannot_be_read_now_is_no_reason_to_forget_it(agent, monkeypatch):
    # The fence and what was committed were forgotten, and the file was written anew without them.
    fence(agent, 2)
    file_open = Path.open

    def no_more_files(path, *arguments, **options):
        if path.suffix == ".state":
            raise OSError(errno.EMFILE, "Too many open files")
        return file_open(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", no_more_files)
        with pytest.raises(OSError, match="Too many open files"):
            again(agent)
    with pytest.raises(Fenced):
        fence(again(agent), 1)


def test_run_state_outlives_the_process(agent):
    keep(agent)
    commit(agent, NEW)
    fence(agent, 4, NEW, roll_backs=[RollBack(3, OLD)])
    later = again(agent)
    found = ledger(later)
    assert (found.fence, found.committed, found.restored) == (4, NEW, NEW)
    assert found.roll_backs == (RollBack(3, OLD),)
    with pytest.raises(Fenced):
        commit(later, generation(3, 99))


# -- after a kill ---------------------------------------------------------------------------------


def test_sealed_files_come_back_byte_for_byte(agent):
    entries = [keep(agent, rank=0), keep(agent, 2, rank=1), keep(agent, 4, rank=2, gen=OLD)]
    before = {entry.key: content(entry) for entry in entries}
    later = again(agent)
    assert held(later) == held(agent)
    assert rejected(later) == {}
    for entry in entries:
        found = find(later, *entry.key)
        assert found.header == entry.header
        assert (found.table == entry.table).all()
        assert content(found) == before[entry.key]
        assert found.region.name == entry.region.name
        assert later.locate(*entry.key) == agent.locate(*entry.key)
    assert used_bytes(later, "test") == used_bytes(agent, "test")


def test_unfinished_files_and_spare_ones_are_gone(agent):
    stage(agent)
    spare = keep(agent, gen=OLD)
    kept = keep(agent, 1)
    commit(agent, NEW)
    later = again(agent)
    assert region_files(later) == [kept.region.path.name]
    assert not spare.region.path.exists()
    assert rejected(later) == {}
    assert used_bytes(later, "test") == kept.region.size_bytes


def test_a_kill_before_the_superblock_leaves_nothing_to_believe(agent):
    entry = keep(agent)
    block = bytes(entry.region.view[:SUPERBLOCK_BYTES])
    entry.region.view[:SUPERBLOCK_BYTES] = bytes(SUPERBLOCK_BYTES)
    assert held(again(agent)) == []
    assert not entry.region.path.exists()
    torn = keep(agent, 1)
    torn.region.view[:SUPERBLOCK_BYTES] = block[:100].ljust(SUPERBLOCK_BYTES, b"\0")
    later = again(agent)
    assert held(later) == []
    assert "CRC32C" in rejected(later)[torn.region.path.name]


@pytest.mark.parametrize(
    ("offset_of", "words"),
    [
        (lambda shard: 16, "superblock fails its CRC32C"),
        (lambda shard: 500, "superblock fails its CRC32C"),
        (lambda shard: SUPERBLOCK_BYTES - 1, "superblock fails its CRC32C"),
        (lambda shard: 8, f"format version {FORMAT_VERSION ^ 0xFF}, this ecckpt knows"),
        (lambda shard: shard.trailer_offset, "checksum table fails its CRC32C"),
        (lambda shard: shard.file_bytes - 9, "checksum table fails its CRC32C"),
        (lambda shard: shard.file_bytes - 1, "no end mark"),
    ],
)
def test_a_damaged_file_is_left_in_place_and_named(agent, offset_of, words):
    bad, good = keep(agent), keep(agent, 1)
    damage(bad.region.path, offset_of(bad.header))
    before = bad.region.path.read_bytes()
    later = again(agent)
    assert held(later) == [(NEW, 0, 1)]
    assert words in rejected(later)[bad.region.path.name]
    assert list(rejected(later)) == [bad.region.path.name]
    assert bad.region.path.read_bytes() == before
    commit(later, generation(1, 11))
    assert bad.region.path.exists()
    assert good.header.shard == bad.header.shard


@pytest.mark.parametrize("left", [8, 100, SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + 1, 9000, -4097])
def test_a_truncated_file_is_left_in_place_and_named(agent, left):
    bad = keep(agent)
    os.truncate(bad.region.path, left if left > 0 else bad.region.size_bytes + left)
    later = again(agent)
    assert held(later) == []
    assert "cut off" in rejected(later)[bad.region.path.name]
    assert bad.region.path.exists()


def test_a_claim_of_absurd_size_is_not_believed(agent):
    entry = stage(agent)
    keep(agent, 1)
    huge = header(HOME, k=200, m=56, shard_bytes=(1 << 48) - 1, block_bytes=4096)
    entry.region.view[:SUPERBLOCK_BYTES] = pack_superblock(huge)
    later = again(agent)
    assert held(later) == [(NEW, 0, 1)]
    assert f"{huge.file_bytes} bytes expected" in rejected(later)[entry.region.path.name]


def test_a_file_sealed_twice_comes_back_once(agent):
    first = keep(agent, 1)
    ledger(agent).entries.pop(first.key)  # a kill before it was recycled
    keep(agent, 1)
    later = again(agent)
    assert held(later) == [(NEW, 0, 1)]
    stage(later, 2)  # takes the other one
    assert len(region_files(later)) == 2


# -- what does not belong there -------------------------------------------------------------------


def litter(folder, suffix):
    """Files of every unwelcome kind."""
    (folder / f"empty{suffix}").write_bytes(b"")
    (folder / f"random{suffix}").write_bytes(os.urandom(10_000))
    (folder / f"zeros{suffix}").write_bytes(bytes(10_000))
    (folder / f"text{suffix}").write_text("hello\n" * 100)
    (folder / f"folder{suffix}").mkdir()
    (folder / f"loop{suffix}").symlink_to(f"loop{suffix}")
    (folder / f"dangling{suffix}").symlink_to("nowhere")
    (folder / f"locked{suffix}").write_bytes(b"\x89ecckpt\n" + b"x" * 100)
    (folder / f"locked{suffix}").chmod(0)
    os.mkfifo(folder / f"pipe{suffix}")
    with (folder / f"huge{suffix}").open("wb") as file:
        file.write(b"\x89ecckpt\n")
        file.truncate(1 << 36)


@pytest.mark.parametrize("suffix", [".region", ".state", ".draft", "", ".region.tmp"])
@pytest.mark.parametrize("folder", ["regions", "runs", "."])
def test_litter_stops_nobody_and_the_rest_is_served(agent, root, folder, suffix):
    entry = keep(agent)
    commit(agent, NEW)
    litter(root / folder, suffix)
    later = again(agent)
    assert held(later) == [(NEW, 0, HOME)]
    assert ledger(later).committed == NEW
    assert content(find(later, *entry.key)) == content(entry)
    mine = {"regions": ".region", "runs": ".state"}.get(folder) == suffix
    stems = ("folder", "loop", "dangling", "locked", "pipe", "huge")
    # A state file concerns the run that it is named after; a region without a run, all of them.
    runs = stems if suffix == ".state" else ["test"] * len(stems)
    for stem, run in zip(stems, runs, strict=True):
        assert (f"{stem}{suffix}" in later.inventory(run).rejected) == mine
    assert mine or rejected(later) == {}
    stage(later, 1, gen=generation(1, 11))


def state_of(fields):
    body = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    return crc32c(body).to_bytes(4, "little") + body


GOOD_STATE = {"fence": 3, "committed": str(NEW), "restored": ""}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0\0\0\0",
        b"garbage",
        state_of(GOOD_STATE)[:-1],
        state_of(GOOD_STATE) + b"\0",
        state_of(b"\xc1"),
        state_of([]),
        state_of(None),
        state_of({}),
        state_of({"fence": 3}),
        state_of(GOOD_STATE | {"fence": "3"}),
        state_of(GOOD_STATE | {"fence": True}),
        state_of(GOOD_STATE | {"committed": 5}),
        state_of(GOOD_STATE | {"committed": "newest"}),
        state_of(GOOD_STATE | {"restored": b"x"}),
        state_of(GOOD_STATE | {"roll_backs": [[2]]}),
        state_of(GOOD_STATE | {"roll_backs": [["x", str(NEW)]]}),
    ],
)
def test_a_damaged_run_state_stops_nobody(agent, root, raw):
    keep(agent)
    (root / "runs" / "test.state").write_bytes(raw)
    later = again(agent)
    assert held(later) == [(NEW, 0, HOME)]
    assert ledger(later).fence >= NEW.timeline
    assert "test.state" in rejected(later)
    assert (root / "runs" / "test.state").read_bytes() == raw


def test_a_good_run_state_is_taken(agent, root):
    (root / "runs" / "test.state").write_bytes(state_of(GOOD_STATE))
    found = ledger(again(agent))
    assert (found.fence, found.committed, found.restored) == (3, NEW, None)


def test_a_draft_that_was_left_is_not_read(agent, root):
    fence(agent, 2, None)
    (root / "runs" / "test.draft").write_bytes(state_of(GOOD_STATE | {"fence": 9}))
    later = again(agent)
    assert ledger(later).fence == 2
    fence(later, 3, None)
    assert ledger(again(later)).fence == 3


# -- kills in the middle --------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("survived", range(6))
def test_a_kill_within_a_commit_loses_nothing_committed(agent, monkeypatch, survived):
    keep(agent, gen=generation(1, 8))
    commit(agent, generation(1, 8))
    for index in (HOME, 1, 2):
        keep(agent, index, gen=OLD)
        keep(agent, index)
    before = {
        (NEW, index): content(find(agent, header(gen=NEW).shard, index)) for index in (HOME, 1, 2)
    }
    done = iter(range(100))

    def until_the_kill(act):
        def wrapped(action):
            if next(done) >= survived:
                raise Killed
            return act(action)

        return wrapped

    for name in ("_result", "_settle"):
        monkeypatch.setattr(agent._driver, name, until_the_kill(getattr(agent._driver, name)))
    with suppress(Killed):
        commit(agent, NEW)
    assert next(done) == survived + (survived < 5)  # the note, and four files that go
    later = again(agent)
    assert {(NEW, 0, index) for index in (HOME, 1, 2)} <= set(held(later))
    for (gen, index), whole in before.items():
        assert content(find(later, header(gen=gen).shard, index)) == whole
    if ledger(later).committed == generation(1, 8):
        assert len(held(later)) == 7  # nothing went before the commit was noted
    else:
        assert {each[0] for each in held(later)} == {NEW}


def test_what_cannot_be_written_down_is_refused_and_lets_nothing_go(agent, monkeypatch):
    keep(agent, gen=OLD)
    keep(agent)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(agent.region_store, "remember", MagicMock(side_effect=full))
        with pytest.raises(OSError, match="No space"):
            commit(agent, NEW)
        with pytest.raises(OSError, match="No space"):
            fence(agent, 2)
        assert len(held(agent)) == 2
    fence(agent, 2)  # as before, but now it is written down, with what was missed
    assert len(held(agent)) == 2  # which of them the restart takes is not known yet
    fence(agent, 2, NEW)
    assert held(agent) == [(NEW, 0, HOME)]
    later = ledger(again(agent))
    assert (later.fence, later.committed) == (2, NEW)


@pytest.mark.parametrize("written", [0, 3, 20])
def test_a_kill_while_writing_the_run_state_keeps_the_old_one(agent, root, written):
    keep(agent)
    commit(agent, NEW)
    (root / "runs" / "test.draft").write_bytes(state_of(GOOD_STATE)[:written])
    assert ledger(again(agent)).committed == NEW


# -- two runs -------------------------------------------------------------------------------------


def test_two_runs_side_by_side_never_touch_each_other(agent):
    for run in ("a", "b"):
        for gen in (OLD, NEW):
            keep(agent, run=run, gen=gen)
            keep(agent, 2, run=run, gen=gen)
    whole = held(agent, "b")
    before_bytes = used_bytes(agent, "b")
    commit(agent, NEW, "a")
    give_up(agent, 0, [OLD, NEW], "a")
    fence(agent, 7, NEW, run="a")
    stage(agent, run="a", gen=generation(7, 11))
    let_unfinished_go(agent, 0, "a")
    for each in (agent, again(agent)):
        assert held(each, "b") == whole
        assert used_bytes(each, "b") == before_bytes
        assert ledger(each, "b").fence < 2
        assert ledger(each, "b").committed is None
        assert held(each, "a") == [(NEW, 0, HOME), (NEW, 0, 2)]
    assert agent.core.records.runs() == ["a", "b"]


# -- files that another process removes under the agent -------------------------------------------


def presence(agent, shard):
    return agent.probe(Probe("test", (shard,))).held[0]


def test_a_file_without_a_name_is_lost_in_every_answer(agent):
    home, fragment = keep(agent), keep(agent, 2)
    shard = home.header.shard
    assert presence(agent, shard) == (HOME, 2)
    fragment.region.path.unlink()
    assert presence(agent, shard) == (HOME,)
    assert held(agent) == [(NEW, 0, HOME)]
    home.region.path.unlink()
    assert not agent.inventory("test").headers
    for ask in (agent.table, agent.slot, agent.locate_shard, lambda each: agent.locate(each, 2)):
        with pytest.raises(NotHeld):
            ask(shard)
    with pytest.raises(NotHeld):
        agent.verify(Verify(shard, HOME, False, 0))
    assert used_bytes(agent) == 0


def test_a_removed_file_is_noticed_by_the_next_event_of_any_kind(agent):
    entry = keep(agent)
    entry.region.path.unlink()
    commit(agent, OLD)
    assert not ledger(agent).entries


def test_a_removed_file_in_use_is_not_recycled_afterwards(agent):
    entry = keep(agent)
    with agent._driver.pinned(entry.header.shard, HOME):
        entry.region.path.unlink()
        assert held(agent) == []
        assert used_bytes(agent) > 0  # it is still mapped
    assert used_bytes(agent) == 0
    assert stage(agent, gen=generation(1, 11)).region.path.exists()


def test_a_removed_spare_region_is_never_handed_out(agent):
    old = keep(agent, gen=OLD)
    keep(agent)
    commit(agent, NEW)
    old.region.path.unlink()
    used = used_bytes(agent)
    fresh = stage(agent, gen=generation(1, 11)).region
    assert fresh is not old.region
    assert fresh.path.exists()
    assert used_bytes(agent) == used


def test_a_removed_region_does_not_become_spare(agent):
    old = keep(agent, gen=OLD)
    keep(agent)
    old.region.path.unlink()
    agent.region_store.tier.recycle("test", old.region)
    assert used_bytes(agent) == whole_pages(old.header.file_bytes)


def test_a_reserved_slot_that_was_removed_is_given_up(agent):
    shard = header(gen=NEW)
    slot = agent.reserve(
        Reserve(header=shard, memory_bytes=BUDGET, local_ranks=1, holders=0, discard=())
    )
    Path(slot.path).unlink()
    with pytest.raises(NotHeld, match="no slot"):
        agent.stage(Stage(shard, slot.region))


def test_a_folder_of_regions_that_was_removed_is_made_again(agent):
    keep(agent)
    shutil.rmtree(agent.region_store.tier._folder)
    assert not agent.inventory("test").headers
    assert keep(agent).region.path.exists()


def test_a_removed_state_file_is_written_again(agent, root):
    commit(agent, NEW)
    fence(agent, 3)
    shutil.rmtree(root / "runs")
    agent._driver.start()  # any event
    agent._driver._pools[Remember].submit(bool).result()
    assert (root / "runs" / "test.state").exists()
    assert ledger(again(agent)).fence == 3
    (root / "runs" / "test.state").unlink()
    fence(agent, 4)
    assert ledger(again(agent)).fence == 4


def test_nothing_is_made_where_the_root_was_removed(agent, root):
    keep(agent)
    shutil.rmtree(root)
    with pytest.raises(FileNotFoundError):
        stage(agent, gen=generation(1, 11))
    root.mkdir()


# -- a tmpfs that another program fills -----------------------------------------------------------


@pytest.mark.parametrize("what", ["bytes", "files"])
def test_notes_have_room_in_a_tmpfs_that_is_full(tmp_path, what):
    with small_tmpfs(tmp_path, "16m,nr_inodes=100") as folder:
        agent = start(folder / "agent", None)
        home = keep(agent)
        fill(folder, what)
        for timeline in range(2, 12):
            agent.begin(Begin("test", RunWriter(timeline, f"{timeline:016x}"), 0.0))
            fill(folder, what)  # the other program takes all that is given back
        found = again(agent)
        assert ledger(found).fence == 11
        assert held(found) == [(NEW, 0, HOME)]
        assert found.slot(home.header.shard).region == home.region.name
        found.begin(Begin("test", RunWriter(12, "a" * 16), 0.0))
        assert ledger(again(found)).fence == 12


# -- files that cannot be read block their own run only -------------------------------------------


def test_a_file_that_cannot_be_read_concerns_only_the_run_in_its_name(agent, root):
    entry = keep(agent, run="mine")
    keep(agent, run="other")
    damage(entry.region.path, 60)
    (root / "runs" / "third.state").write_bytes(b"torn")
    found = again(agent)
    assert set(found.inventory("mine").rejected) == {entry.region.path.name}
    assert set(found.inventory("third").rejected) == {"third.state"}
    for run in ("other", "new"):
        assert not found.inventory(run).rejected
    assert set(found.status()["runs"]) == {"mine", "other", "third"}
    found.begin(Begin("mine", RunWriter(2, "a" * 16), 0.0))
    assert found.inventory("mine").rejected  # also when the run has a record by now


def test_a_file_without_a_run_in_its_name_concerns_every_run(agent, root):
    for name in ("0123456789abcdef.region", "..@1.region"):
        (root / "regions" / name).write_bytes(b"x" * 5000)
    assert len(again(agent).inventory("new").rejected) == 2


def test_the_status_tells_when_the_newest_file_in_memory_was_made(agent):
    ledger(agent, "empty")
    entries = [keep(agent, gen=OLD), keep(agent)]
    runs = agent.status()["runs"]
    assert runs["empty"]["saved_unix_s"] == 0
    assert runs["test"]["saved_unix_s"] == max(each.header.created_unix_s for each in entries)


# -- padding --------------------------------------------------------------------------------------


def test_what_lies_behind_the_shard_must_be_zeros(agent):
    slot = agent.reserve(
        Reserve(
            header=header(world_size=1, k=1, m=0, shard_bytes=100),
            memory_bytes=0,
            local_ranks=1,
            holders=0,
            discard=(),
        )
    )
    agent.stage(Stage(slot.header, slot.region))
    entry = agent.core.records.find(slot.header.shard, HOME)
    entry.region.view[SUPERBLOCK_BYTES + 100] = 0xEE
    with pytest.raises(CorruptFragment, match="padding behind the shard is not zeros"):
        encode_home(slot.header, entry.region, None)
    entry.region.view[SUPERBLOCK_BYTES + 100] = 0
    encode_home(slot.header, entry.region, None)
