"""The shelf: what it was given it still has after a kill, and what it cannot trust it leaves."""

import errno
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest
from builders import generation, header, table_of

from ecckpt.agent.ledger import Entry
from ecckpt.agent.protect import parity_region_bytes
from ecckpt.agent.shelf import Shelf, steady_bytes
from ecckpt.errors import Fenced, InvalidConfig, MemoryBudgetTooSmall, NotHeld
from ecckpt.fragment import (
    FORMAT_VERSION,
    HOME,
    SUPERBLOCK_BYTES,
    crc32c,
    pack_superblock,
    parse_table,
)
from ecckpt.tiers.memory import whole_pages

BUDGET = 64 << 20
OLD, NEW = generation(1, 9), generation(1, 10)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(prefix="ecckpt-shelf-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def shelf(root):
    return Shelf(root, node="n1")


def again(shelf):
    """The shelf as it is after its process was killed and started anew."""
    return Shelf(shelf.tier._folder.parent, node="n1")


def stage(shelf, index=HOME, *, budget_bytes=BUDGET, **fields):
    shard = header(index, **{"gen": NEW} | fields)
    region = shelf.allocate(
        shard.shard.run, shard.file_bytes, budget_bytes=budget_bytes, what="a slot"
    )
    entry = Entry(shard, region, None)
    shelf.put(entry)
    return entry


def keep(shelf, index=HOME, **fields):
    """A sealed file with some bytes in it."""
    entry = stage(shelf, index, **fields)
    shard = entry.header
    noise = bytes((7 * at + index + shard.shard.rank) % 251 for at in range(shard.payload_bytes))
    entry.region.view[SUPERBLOCK_BYTES : shard.trailer_offset] = noise
    shelf.seal(entry, table_of(shard, shard.shard.rank))
    return entry


def content(entry):
    return entry.region.path.read_bytes()[: entry.header.file_bytes]


def held(shelf, run="test"):
    """(generation, rank, index) of everything sealed."""
    with shelf.changed:
        headers = shelf.ledger(run).inventory("n1").headers
    return sorted((each.shard.generation, each.shard.rank, each.index) for each in headers)


def rejected(shelf):
    with shelf.changed:
        return dict(shelf.ledger("test").inventory("n1").rejected)


def region_files(shelf):
    return sorted(path.name for path in shelf.tier._folder.iterdir())


def damage(path, offset, mask=0xFF):
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


# -- put, find, commit ----------------------------------------------------------------------------


def test_only_what_is_sealed_is_held(shelf):
    entry = stage(shelf)
    assert held(shelf) == []
    shelf.seal(entry, table_of(entry.header))
    assert held(shelf) == [(NEW, 0, HOME)]


def test_a_commit_recycles_what_is_older(shelf):
    old, fragment, new = keep(shelf, gen=OLD), keep(shelf, 2, gen=OLD), keep(shelf)
    shelf.commit("test", NEW)
    assert held(shelf) == [(NEW, 0, HOME)]
    assert bytes(old.region.view[:SUPERBLOCK_BYTES]) == bytes(SUPERBLOCK_BYTES)
    assert stage(shelf, gen=generation(1, 11)).region is old.region
    assert stage(shelf, 2, gen=generation(1, 11)).region is fragment.region
    assert new.region.path.exists()


def test_what_replaces_a_file_recycles_it(shelf):
    first = keep(shelf, 1)
    second = keep(shelf, 1)
    assert held(shelf) == [(NEW, 0, 1)]
    assert shelf.ledger("test").find(second.header.shard, 1) is second
    assert stage(shelf, 4).region is first.region


def test_what_is_in_use_is_recycled_afterwards(shelf):
    old = keep(shelf, gen=OLD)
    before = content(old)
    with shelf.pinned(old.header.shard, HOME) as entry:
        shelf.commit("test", NEW)
        assert held(shelf) == []
        assert content(entry) == before
        assert stage(shelf).region is not old.region
    assert stage(shelf, rank=1).region is old.region


def test_a_staged_slot_that_goes_is_not_recycled(shelf):
    slot = stage(shelf)
    shelf.discard_unfinished("test", 0)
    assert not slot.region.path.exists()  # its trainer may still be writing
    assert stage(shelf).region is not slot.region


def test_a_discard_takes_only_what_its_own_writer_gave_up(shelf):
    keep(shelf, gen=OLD)
    keep(shelf)
    keep(shelf, rank=1)
    shelf.commit("test", OLD)
    shelf.discard("test", 0, [OLD, NEW])
    assert held(shelf) == [(OLD, 0, HOME), (NEW, 1, HOME)]


def test_nothing_held_is_an_error_that_says_what(shelf):
    shard = keep(shelf, 2).header.shard
    assert held(shelf) == [(NEW, 0, 2)]
    with pytest.raises(NotHeld, match=r"node n1 has no fragment 3 of test/1\.10"):
        shelf.locate(shard, 3)
    with pytest.raises(NotHeld, match="no home copy"), shelf.pinned(shard, HOME):
        pass
    with pytest.raises(NotHeld, match="nothing of"):
        shelf.table(header(rank=5).shard)


def test_fragments_lie_in_their_own_file_or_in_the_home_copy(shelf):
    home, fragment = keep(shelf, rank=0), keep(shelf, 1, rank=1)
    size_bytes = home.header.fragment_bytes
    for index in range(3):
        assert shelf.locate(home.header.shard, index) == (
            home.region.path,
            SUPERBLOCK_BYTES + index * size_bytes,
            size_bytes,
        )
    assert shelf.locate(fragment.header.shard, 1) == (
        fragment.region.path,
        SUPERBLOCK_BYTES,
        size_bytes,
    )
    with pytest.raises(NotHeld):
        shelf.locate(home.header.shard, 3)
    home.parity = shelf.allocate(
        "test", parity_region_bytes(home.header), budget_bytes=BUDGET, what="parity"
    )
    assert shelf.locate(home.header.shard, 4) == (
        home.parity.path,
        SUPERBLOCK_BYTES + size_bytes,
        size_bytes,
    )
    with pytest.raises(NotHeld):
        shelf.locate(home.header.shard, 5)


def test_a_table_comes_from_any_sealed_piece(shelf):
    entry = keep(shelf, 2)
    found = parse_table(shelf.table(entry.header.shard), entry.header, "here")
    assert (found == entry.table).all()


def test_run_names_that_cannot_be_paths_are_refused(shelf):
    with pytest.raises(InvalidConfig), shelf.changed:
        shelf.ledger("../elsewhere")
    assert shelf.runs() == []


# -- budget ---------------------------------------------------------------------------------------


def test_an_abandoned_timeline_goes_when_the_budget_leaves_no_other_way(shelf):
    keep(shelf, gen=generation(1, 300), shard_bytes=100_000)
    keep(shelf, gen=generation(1, 5000), shard_bytes=100_000)
    budget_bytes = shelf.tier.used_bytes("test") + 60_000
    with pytest.raises(MemoryBudgetTooSmall):
        stage(shelf, gen=generation(2, 301), shard_bytes=100_000, budget_bytes=budget_bytes)
    shelf.fence("test", 2, generation(1, 300))
    stage(shelf, gen=generation(2, 301), shard_bytes=100_000, budget_bytes=budget_bytes)
    assert held(shelf) == [(generation(1, 300), 0, HOME)]
    with pytest.raises(MemoryBudgetTooSmall):
        stage(shelf, gen=generation(2, 302), shard_bytes=100_000, budget_bytes=budget_bytes)
    assert held(shelf) == [(generation(1, 300), 0, HOME)]


def test_the_steady_need_is_two_generations_and_parity():
    shard = header(shard_bytes=100_000)
    home, parity, fragment = map(
        whole_pages, (shard.file_bytes, parity_region_bytes(shard), shard.at(0).file_bytes)
    )
    assert steady_bytes(shard, local_ranks=2, holders=5) == 2 * (2 * home + parity + 10 * fragment)


def test_a_budget_of_the_steady_need_is_enough(shelf):
    # Regions are whole pages: without counting that, small shards failed at their second save.
    budget_bytes = steady_bytes(header(), local_ranks=1, holders=1)
    for step in (1, 2, 3):
        which = generation(1, step)
        keep(shelf, gen=which, budget_bytes=budget_bytes)
        parity = shelf.allocate(
            "test", parity_region_bytes(header()), budget_bytes=budget_bytes, what="parity"
        )
        shelf.tier.recycle("test", parity)
        keep(shelf, 0, gen=which, budget_bytes=budget_bytes)
        shelf.commit("test", which)


# -- timelines ------------------------------------------------------------------------------------


def test_a_newer_timeline_lets_unfinished_slots_go_and_nothing_else(shelf):
    slot, kept = stage(shelf, gen=generation(1, 11)), keep(shelf)
    shelf.admit("test", 2)
    assert not slot.region.path.exists()
    assert kept.region.path.exists()
    with pytest.raises(Fenced, match=r"timeline 1 .* timeline 2"):
        shelf.admit("test", 1)


def test_a_fence_that_could_not_be_written_down_is_made_up_for(shelf, monkeypatch):
    # It was in force until the next restart only: the second request found it in memory.
    keep(shelf)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            shelf.fence("test", 2, None)
    with pytest.raises(Fenced):
        shelf.admit("test", 1)
    shelf.admit("test", 2)
    with pytest.raises(Fenced):
        again(shelf).admit("test", 1)


def test_a_state_that_cannot_be_read_now_is_no_reason_to_forget_it(shelf, monkeypatch):
    # The fence and what was committed were forgotten, and the file was written anew without them.
    shelf.fence("test", 2, None)
    file_open = Path.open

    def no_more_files(path, *arguments, **options):
        if path.suffix == ".state":
            raise OSError(errno.EMFILE, "Too many open files")
        return file_open(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", no_more_files)
        with pytest.raises(OSError, match="Too many open files"):
            again(shelf)
    with pytest.raises(Fenced):
        again(shelf).admit("test", 1)


def test_run_state_outlives_the_process(shelf):
    keep(shelf)
    shelf.commit("test", NEW)
    shelf.fence("test", 4, NEW)
    later = again(shelf)
    ledger = later.ledger("test")
    assert (ledger.fence, ledger.committed, ledger.restored) == (4, NEW, NEW)
    with pytest.raises(Fenced):
        later.commit("test", generation(3, 99))


# -- after a kill ---------------------------------------------------------------------------------


def test_sealed_files_come_back_byte_for_byte(shelf):
    entries = [keep(shelf, rank=0), keep(shelf, 2, rank=1), keep(shelf, 4, rank=2, gen=OLD)]
    before = {entry.key: content(entry) for entry in entries}
    later = again(shelf)
    assert held(later) == held(shelf)
    assert rejected(later) == {}
    for entry in entries:
        with later.pinned(*entry.key) as found:
            assert found.header == entry.header
            assert (found.table == entry.table).all()
            assert content(found) == before[entry.key]
            assert found.region.name == entry.region.name
        assert later.locate(*entry.key) == shelf.locate(*entry.key)
    assert later.tier.used_bytes("test") == shelf.tier.used_bytes("test")


def test_unfinished_files_and_spare_ones_are_gone(shelf):
    stage(shelf)
    spare = keep(shelf, gen=OLD)
    kept = keep(shelf, 1)
    shelf.commit("test", NEW)
    later = again(shelf)
    assert region_files(later) == [kept.region.path.name]
    assert not spare.region.path.exists()
    assert rejected(later) == {}
    assert later.tier.used_bytes("test") == kept.region.size_bytes


def test_a_kill_before_the_superblock_leaves_nothing_to_believe(shelf):
    entry = keep(shelf)
    block = bytes(entry.region.view[:SUPERBLOCK_BYTES])
    entry.region.view[:SUPERBLOCK_BYTES] = bytes(SUPERBLOCK_BYTES)
    assert held(again(shelf)) == []
    assert not entry.region.path.exists()
    torn = keep(shelf, 1)
    torn.region.view[:SUPERBLOCK_BYTES] = block[:100].ljust(SUPERBLOCK_BYTES, b"\0")
    later = again(shelf)
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
def test_a_damaged_file_is_left_in_place_and_named(shelf, offset_of, words):
    bad, good = keep(shelf), keep(shelf, 1)
    damage(bad.region.path, offset_of(bad.header))
    before = bad.region.path.read_bytes()
    later = again(shelf)
    assert held(later) == [(NEW, 0, 1)]
    assert words in rejected(later)[bad.region.path.name]
    assert list(rejected(later)) == [bad.region.path.name]
    assert bad.region.path.read_bytes() == before
    later.commit("test", generation(1, 11))
    assert bad.region.path.exists()
    assert good.header.shard == bad.header.shard


@pytest.mark.parametrize("left", [8, 100, SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + 1, 9000, -4097])
def test_a_truncated_file_is_left_in_place_and_named(shelf, left):
    bad = keep(shelf)
    os.truncate(bad.region.path, left if left > 0 else bad.region.size_bytes + left)
    later = again(shelf)
    assert held(later) == []
    assert "cut off" in rejected(later)[bad.region.path.name]
    assert bad.region.path.exists()


def test_a_claim_of_absurd_size_is_not_believed(shelf):
    entry = stage(shelf)
    keep(shelf, 1)
    huge = header(HOME, k=200, m=56, shard_bytes=(1 << 48) - 1, block_bytes=4096)
    entry.region.view[:SUPERBLOCK_BYTES] = pack_superblock(huge)
    later = again(shelf)
    assert held(later) == [(NEW, 0, 1)]
    assert f"{huge.file_bytes} bytes expected" in rejected(later)[entry.region.path.name]


def test_a_file_sealed_twice_comes_back_once(shelf):
    first = keep(shelf, 1)
    with shelf.changed:
        shelf.ledger("test").entries.pop(first.key)  # a kill between sealing and entering
    keep(shelf, 1)
    later = again(shelf)
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
def test_litter_stops_nobody_and_the_rest_is_served(shelf, root, folder, suffix):
    entry = keep(shelf)
    shelf.commit("test", NEW)
    litter(root / folder, suffix)
    later = again(shelf)
    assert held(later) == [(NEW, 0, HOME)]
    assert later.ledger("test").committed == NEW
    with later.pinned(*entry.key) as found:
        assert content(found) == content(entry)
    mine = {"regions": ".region", "runs": ".state"}.get(folder) == suffix
    names = {f"{name}{suffix}" for name in ("folder", "loop", "dangling", "locked", "pipe", "huge")}
    assert names <= rejected(later).keys() if mine else rejected(later) == {}
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
    ],
)
def test_a_damaged_run_state_stops_nobody(shelf, root, raw):
    keep(shelf)
    (root / "runs" / "test.state").write_bytes(raw)
    later = again(shelf)
    assert held(later) == [(NEW, 0, HOME)]
    assert later.ledger("test").fence >= NEW.timeline
    assert "test.state" in rejected(later)
    assert (root / "runs" / "test.state").read_bytes() == raw


def test_a_good_run_state_is_taken(shelf, root):
    (root / "runs" / "test.state").write_bytes(state_of(GOOD_STATE))
    ledger = again(shelf).ledger("test")
    assert (ledger.fence, ledger.committed, ledger.restored) == (3, NEW, None)


def test_a_draft_that_was_left_is_not_read(shelf, root):
    shelf.fence("test", 2, None)
    (root / "runs" / "test.draft").write_bytes(state_of(GOOD_STATE | {"fence": 9}))
    later = again(shelf)
    assert later.ledger("test").fence == 2
    later.fence("test", 3, None)
    assert again(later).ledger("test").fence == 3


# -- kills in the middle --------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", ["_remember", "_retire", "_give_up", "_free"])
@pytest.mark.parametrize("survived", [0, 1, 2])
def test_a_kill_within_a_commit_loses_nothing_committed(shelf, monkeypatch, step, survived):
    keep(shelf, gen=generation(1, 8))
    shelf.commit("test", generation(1, 8))
    for index in (HOME, 1, 2):
        keep(shelf, index, gen=OLD)
        keep(shelf, index)
    before = {
        (NEW, index): content(shelf.ledger("test").find(header(gen=NEW).shard, index))
        for index in (HOME, 1, 2)
    }
    calls = iter(range(100))
    act = getattr(shelf, step)

    def until_the_kill(*arguments):
        if next(calls) >= survived:
            raise Killed
        return act(*arguments)

    monkeypatch.setattr(shelf, step, until_the_kill)
    with suppress(Killed):
        shelf.commit("test", NEW)
    later = again(shelf)
    assert {(NEW, 0, index) for index in (HOME, 1, 2)} <= set(held(later))
    for (gen, index), whole in before.items():
        with later.pinned(header(gen=gen).shard, index) as found:
            assert content(found) == whole
    if later.ledger("test").committed == generation(1, 8):
        assert len(held(later)) == 7  # nothing went before the commit was noted
    else:
        assert {each[0] for each in held(later)} == {NEW}


@pytest.mark.parametrize("written", [0, 3, 20])
def test_a_kill_while_writing_the_run_state_keeps_the_old_one(shelf, root, written):
    keep(shelf)
    shelf.commit("test", NEW)
    (root / "runs" / "test.draft").write_bytes(state_of(GOOD_STATE)[:written])
    assert again(shelf).ledger("test").committed == NEW


# -- two runs -------------------------------------------------------------------------------------


def test_two_runs_side_by_side_never_touch_each_other(shelf):
    for run in ("a", "b"):
        for gen in (OLD, NEW):
            keep(shelf, run=run, gen=gen)
            keep(shelf, 2, run=run, gen=gen)
    whole = held(shelf, "b")
    used_bytes = shelf.tier.used_bytes("b")
    shelf.commit("a", NEW)
    shelf.discard("a", 0, [OLD, NEW])
    shelf.fence("a", 7, NEW)
    stage(shelf, run="a", gen=generation(7, 11))
    shelf.discard_unfinished("a", 0)
    for each in (shelf, again(shelf)):
        assert held(each, "b") == whole
        assert each.tier.used_bytes("b") == used_bytes
        assert each.ledger("b").fence < 2
        assert each.ledger("b").committed is None
        assert held(each, "a") == [(NEW, 0, HOME), (NEW, 0, 2)]
    assert shelf.runs() == ["a", "b"]
