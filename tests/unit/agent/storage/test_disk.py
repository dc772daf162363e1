"""The disk tier: whatever stops a write, a file that has its name is whole, or is not there."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from ecckpt.agent.storage import disk
from ecckpt.agent.storage.disk import DiskTier, write_small
from ecckpt.agent.storage.volume import FileSystem
from ecckpt.errors import CorruptFragment, DiskBudgetTooSmall, DiskFull, VersionMismatch
from ecckpt.format.fragment_file import FORMAT_VERSION, HOME, SUPERBLOCK_BYTES
from tests.support.builders import generation, header, table_of
from tests.support.media import small_ext4
from tests.unit.agent.storage.tier_suite import BUDGET, TierSuite, content_of, payload_of


@pytest.fixture
def root(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def small_root(tmp_path):
    with small_ext4(tmp_path) as folder:
        yield folder


@pytest.fixture
def tier(root):
    return DiskTier(root, node="n1")


def keep(tier, shard, *, budget_bytes=BUDGET, piece_bytes=1 << 20):
    payload = memoryview(payload_of(shard))[: shard.payload_bytes]
    pieces = (payload[at : at + piece_bytes] for at in range(0, len(payload), piece_bytes))
    return tier.write(shard, pieces, table_of(shard), budget_bytes=budget_bytes)


class TestContract(TierSuite):
    too_small, full = DiskBudgetTooSmall, DiskFull

    def start(self, root):
        return DiskTier(root, node="n1")

    def keep(self, tier, shard, *, budget_bytes=BUDGET):
        return keep(tier, shard, budget_bytes=budget_bytes)

    def let_go(self, tier, kept, shard):
        tier.discard(kept)

    def read(self, kept, shard):
        return kept.path.read_bytes()

    def take_over(self, tier, path, shard):
        found = tier.adopt(path)
        assert found.header == shard
        assert (found.table == table_of(shard)).all()
        return found


# -- the order of things --------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


def steps_of(monkeypatch, *, until=None):
    """Record what happens to files, in order; end the process before step ``until``."""
    seen = []

    def watch(owner, name, label):
        real = getattr(owner, name)

        def act(*arguments, **options):
            if len(seen) == until:
                os._exit(9)
            seen.append(label(*arguments))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, act)

    def is_folder(descriptor):
        return "folder" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file"

    watch(os, "open", lambda *_: "open")
    watch(os, "posix_fallocate", lambda *_: "reserve")
    watch(os, "write", lambda *_: "write")
    watch(os, "fsync", lambda descriptor: f"flush {is_folder(descriptor)}")
    watch(Path, "rename", lambda *_: "rename")
    return seen


def test_flushed_then_named_then_flushed_again(tier, monkeypatch):
    seen = steps_of(monkeypatch)
    keep(tier, header())
    assert seen == [
        "open",
        "reserve",
        *["write"] * 3,
        "flush file",
        "rename",
        "open",
        "flush folder",
    ]


def test_a_kill_before_any_step_leaves_all_or_nothing(tier, root, monkeypatch):
    older = keep(tier, header(gen=generation(1, 9)))
    shard = header()
    for until in range(9):
        child = os.fork()
        if not child:
            steps_of(monkeypatch, until=until)
            keep(tier, shard)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        later = DiskTier(root, node="n1")
        names = [path.name for path in later.folder.iterdir()]
        whole = [path for path in later.found() if path != older.path]
        assert len(names) == 1 + len(whole)  # drafts are gone
        assert bool(whole) == (until > 6)
        for path in whole:
            assert path.read_bytes() == content_of(shard)
            later.discard(later.adopt(path))
        assert older.path.read_bytes() == content_of(older.header)


def test_dirty_pages_are_bounded(tier, monkeypatch):
    flushes = []
    real = os.fdatasync
    monkeypatch.setattr(disk, "_FLUSH_BYTES", 1 << 20)
    monkeypatch.setattr(os, "fdatasync", lambda file: flushes.append(1) or real(file))
    keep(tier, header(shard_bytes=5 << 20), piece_bytes=256 << 10)
    assert len(flushes) == 5


# -- a disk that fails ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "number", "raised"),
    [
        ("posix_fallocate", errno.ENOSPC, DiskFull),
        ("write", errno.ENOSPC, DiskFull),
        ("write", errno.EDQUOT, DiskFull),
        ("write", errno.EIO, OSError),
        ("fsync", errno.EIO, OSError),
        ("open", errno.EROFS, OSError),
    ],
)
def test_an_error_leaves_nothing_and_the_next_write_may_go_well(
    tier, monkeypatch, call, number, raised
):
    older = keep(tier, header(gen=generation(1, 9)))

    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(raised):
            keep(tier, header())
    assert [path.name for path in tier.folder.iterdir()] == [older.path.name]
    assert tier.used_bytes("test") == older.size_bytes
    assert keep(tier, header()).path.read_bytes() == content_of(header())


def test_a_name_that_may_not_survive_is_taken_back(tier, monkeypatch):
    def fail():
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(FileSystem, "flush_names", lambda *_: fail())
    with pytest.raises(OSError, match="input/output"):
        keep(tier, header())
    assert list(tier.folder.iterdir()) == []
    assert tier.used_bytes("test") == 0


def test_a_source_that_ends_early_leaves_nothing(tier):
    def pieces():
        yield b"x" * 1000
        raise Killed

    with pytest.raises(Killed):
        tier.write(header(), pieces(), table_of(header()), budget_bytes=BUDGET)
    assert list(tier.folder.iterdir()) == []


def test_short_writes_are_finished_and_a_size_limit_is_an_error(tier):
    shard = header(shard_bytes=3 << 20)
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (shard.file_bytes - 100, old_limit[1]))
        with pytest.raises(OSError, match="File too large"):
            keep(tier, shard)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert list(tier.folder.iterdir()) == []


def test_a_write_that_takes_little_at_a_time_writes_all(tier, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:1000]))
    assert keep(tier, header()).path.read_bytes() == content_of(header())


# -- what lies there ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "error", "words"),
    [
        (0, CorruptFragment, "does not begin like an ecckpt file"),
        (8, VersionMismatch, f"format version {FORMAT_VERSION ^ 0xFF}"),
        (100, CorruptFragment, "superblock fails its CRC32C"),
        (SUPERBLOCK_BYTES - 1, CorruptFragment, "superblock fails its CRC32C"),
        (header().trailer_offset, CorruptFragment, "table fails its CRC32C"),
        (-1, CorruptFragment, "no end mark"),
    ],
)
def test_a_damaged_file_is_refused_and_stays(tier, root, offset, error, words):
    path = keep(tier, header()).path
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0xFF
    path.write_bytes(raw)
    later = DiskTier(root, node="n1")
    with pytest.raises(error, match=words):
        later.adopt(path)
    assert path.read_bytes() == raw
    assert later.used_bytes("test") == 0


@pytest.mark.parametrize("left", [0, 1, SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + 5, -1])
def test_a_file_cut_short_is_refused_and_stays(tier, left):
    path = keep(tier, header()).path
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    with pytest.raises(CorruptFragment):
        tier.adopt(path)
    assert path.exists()


def test_files_are_known_by_their_content_whatever_their_name(tier):
    kept = keep(tier, header(2))
    copy = kept.path.with_name("from-another-node.ecckpt")
    kept.path.rename(copy)
    assert [tier.adopt(path).header for path in tier.found()] == [header(2)]


def test_names_say_what_is_inside(tier):
    shard = header(HOME, run="llama-70b", rank=3)
    assert keep(tier, shard).path.name == f"llama-70b@{shard.shard.generation}@3@home.ecckpt"
    assert keep(tier, shard.at(4)).path.name == f"llama-70b@{shard.shard.generation}@3@4.ecckpt"


def test_strangers_are_let_alone(tier, root):
    (tier.folder / "notes.txt").write_text("mine")
    (tier.folder / "old.draft").write_bytes(b"half a file")
    later = DiskTier(root, node="n1")
    assert [path.name for path in later.folder.iterdir()] == ["notes.txt"]


def test_a_small_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.state"
    write_small(path, b"old")
    seen = steps_of(monkeypatch)
    write_small(path, b"new")
    assert seen == ["open", "write", "flush file", "rename", "open", "flush folder"]
    assert path.read_bytes() == b"new"
