"""The memory tier on real tmpfs: reserved up front, bounded, recycled, never a SIGBUS."""

import gc
import os
import re
import resource
import tempfile
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.agent.storage.memory_tier import MemoryTier
from ecckpt.agent.storage.regions import TmpfsFiles, void
from ecckpt.errors import InvalidConfig, MemoryBudgetTooSmall, NotMapped, TmpfsFull
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.memory.mapping import HUGE_PAGE_BYTES, make_huge
from ecckpt.memory.private_folder import private_folder
from tests.support.media import small_tmpfs
from tests.unit.agent.storage.tier_suite import TierSuite, content_of

PAGE = 4096
MIB = 1 << 20
BUDGET = 64 * MIB


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(prefix="ecckpt-tier-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def tier(root):
    return MemoryTier(root, node="n1")


@pytest.fixture
def small_root(tmp_path):
    """A tmpfs of 16 MiB."""
    with small_tmpfs(tmp_path) as folder:
        yield folder


def take(tier, size_bytes, *, run="test", budget_bytes=BUDGET):
    return tier.allocate(run, size_bytes, budget_bytes=budget_bytes, what="a slot")


def files(root):
    return sorted(path.name for path in (root / "regions").iterdir())


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings():
    gc.collect()  # what earlier tests left in cycles
    return Path("/proc/self/maps").read_text().count(".region")


class TestContract(TierSuite):
    too_small, full = MemoryBudgetTooSmall, TmpfsFull

    def start(self, root):
        return MemoryTier(root, node="n1")

    def keep(self, tier, shard, *, budget_bytes=BUDGET):
        run = shard.shard.run
        region = take(tier, shard.file_bytes, run=run, budget_bytes=budget_bytes)
        region.view[: shard.file_bytes] = content_of(shard)
        return region

    def let_go(self, tier, kept, shard):
        tier.discard(shard.shard.run, kept)

    def read(self, kept, shard):
        return kept.path.read_bytes()[: shard.file_bytes]

    def take_over(self, tier, path, shard):
        return tier.adopt(shard.shard.run, path)


# -- reserving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [1, PAGE - 1, PAGE, PAGE + 1, MIB, 3 * MIB + 5])
def test_a_region_is_whole_pages_of_real_memory(tier, size_bytes):
    region = take(tier, size_bytes)
    whole = -(-size_bytes // PAGE) * PAGE
    stat = region.path.stat()
    assert region.size_bytes == len(region.view) == stat.st_size == whole
    assert stat.st_blocks * 512 >= whole  # reserved, not sparse
    assert tier.used_bytes("test") == whole
    assert stat.st_mode & 0o777 == 0o600


def test_a_new_region_is_void(tier):
    assert bytes(take(tier, MIB).view[:SUPERBLOCK_BYTES]) == bytes(SUPERBLOCK_BYTES)


def test_writing_a_new_region_faults_no_page_in(tier):
    region = take(tier, 16 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    region.view[:] = bytes(1) * len(region.view)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    source_pages = 16 * MIB // PAGE
    assert faults < source_pages + 500  # the source's own pages; the region's would be as many


def test_what_is_written_is_in_the_file(tier):
    region = take(tier, 2 * PAGE)
    region.view[5000:5003] = b"abc"
    assert region.path.read_bytes()[5000:5003] == b"abc"


# -- full -----------------------------------------------------------------------------------------


def test_a_full_tmpfs_is_an_error_with_both_numbers(small_root):
    tier = MemoryTier(small_root, node="n1")
    kept = take(tier, 10 * MIB)
    with pytest.raises(TmpfsFull, match="8,388,608 bytes wanted") as caught:
        take(tier, 8 * MIB)
    assert caught.value.need_bytes == 8 * MIB
    assert 5 * MIB < caught.value.free_bytes <= 6 * MIB
    assert "--shm-size" in str(caught.value)
    assert files(small_root) == [kept.path.name]
    assert tier.used_bytes("test") == 10 * MIB
    kept.view[:] = b"\1" * len(kept.view)
    take(tier, 5 * MIB).view[:] = b"\2" * (5 * MIB)


def test_a_tmpfs_filled_by_somebody_else_costs_nobody_anything(small_root):
    tier = MemoryTier(small_root, node="n1")
    kept = take(tier, 4 * MIB)
    with pytest.raises(OSError, match="No space left"):
        (small_root / "stranger").write_bytes(bytes(16 * MIB))
    with pytest.raises(TmpfsFull) as caught:
        take(tier, MIB)
    assert (caught.value.need_bytes, caught.value.free_bytes) == (MIB, 0)
    kept.view[:] = b"\1" * len(kept.view)  # would be a SIGBUS in a sparse file
    tier.recycle("test", kept)
    assert take(tier, 4 * MIB) is kept


def test_what_was_begun_when_the_room_ran_out_is_room_again(small_root, monkeypatch):
    tier = MemoryTier(small_root, node="n1")
    kept = take(tier, 10 * MIB)
    # As if somebody else had been quicker.
    monkeypatch.setattr(TmpfsFiles, "room", lambda *_: (1 << 40, 1 << 40))
    with pytest.raises(TmpfsFull) as caught:
        take(tier, 8 * MIB)
    assert caught.value.__traceback__ is not None  # and with it all that was mapped
    size = os.statvfs(small_root)
    assert size.f_bavail * size.f_frsize >= 5 * MIB
    assert files(small_root) == [kept.path.name]


def test_spare_regions_of_any_run_go_before_a_tmpfs_is_called_full(small_root):
    tier = MemoryTier(small_root, node="n1")
    for run in ("a", "b"):
        tier.recycle(run, take(tier, 5 * MIB, run=run))
    kept = take(tier, 12 * MIB)
    assert files(small_root) == [kept.path.name]
    assert [tier.used_bytes(run) for run in ("a", "b", "test")] == [0, 0, 12 * MIB]


def mapped_bytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmSize:\s+(\d+)", status)[1]) << 10


def test_what_cannot_be_mapped_is_an_error_with_both_numbers_once_spare_regions_are_gone(
    tier, root
):
    gc.collect()  # what earlier tests have left shall not become free in between
    tier.recycle("a", take(tier, 32 * MIB, run="a"))
    kept = take(tier, MIB)
    free = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes(), free[1]))
    try:
        fits = take(tier, 24 * MIB)
        limit_bytes = mapped_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, free[1]))
        with pytest.raises(NotMapped, match="ulimit -v") as caught:
            take(tier, 32 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, free)
    assert caught.value.need_bytes >= 32 * MIB
    assert caught.value.limit_bytes == limit_bytes
    assert files(root) == sorted([kept.path.name, fits.path.name])
    assert [tier.used_bytes(run) for run in ("a", "test")] == [0, 25 * MIB]


@pytest.mark.parametrize("size_bytes", [1 << 40, 1 << 62])
def test_absurd_sizes_are_refused(tier, size_bytes):
    with pytest.raises(TmpfsFull) as caught:
        take(tier, size_bytes, budget_bytes=1 << 63)
    assert caught.value.need_bytes == size_bytes
    assert tier.used_bytes("test") == 0


# -- budget ---------------------------------------------------------------------------------------


def test_a_budget_is_kept_with_both_numbers(tier, root):
    kept = take(tier, 3 * MIB, budget_bytes=4 * MIB)
    with pytest.raises(MemoryBudgetTooSmall, match="node n1: a slot needs 5,242,880") as caught:
        take(tier, 2 * MIB, budget_bytes=4 * MIB)
    assert (caught.value.need_bytes, caught.value.have_bytes) == (5 * MIB, 4 * MIB)
    assert files(root) == [kept.path.name]
    assert tier.used_bytes("test") == 3 * MIB
    take(tier, MIB, budget_bytes=4 * MIB)


def test_budgets_are_per_run(tier):
    take(tier, 3 * MIB, run="a", budget_bytes=4 * MIB)
    take(tier, 3 * MIB, run="b", budget_bytes=4 * MIB)
    assert tier.used_bytes("a") == tier.used_bytes("b") == 3 * MIB


def test_spare_regions_go_when_the_budget_needs_them(tier, root):
    first, second = take(tier, MIB), take(tier, 2 * MIB)
    tier.recycle("test", first)
    tier.recycle("test", second)
    assert tier.used_bytes("test") == 3 * MIB
    big = take(tier, 6 * MIB, budget_bytes=8 * MIB)
    assert files(root) == sorted([second.path.name, big.path.name])
    assert tier.used_bytes("test") == 8 * MIB
    bigger = take(tier, 2 * MIB + PAGE, budget_bytes=9 * MIB)
    assert files(root) == sorted([big.path.name, bigger.path.name])


def test_the_default_budget_is_half_of_the_tmpfs(small_root):
    assert MemoryTier(small_root, node="n1").default_budget_bytes() == 8 * MIB


# -- recycling ------------------------------------------------------------------------------------


def test_a_recycled_region_comes_back_as_it_is_but_void(tier):
    region = take(tier, 4 * MIB)
    inode, name = region.path.stat().st_ino, region.name
    region.view[:] = b"x" * len(region.view)
    tier.recycle("test", region)
    assert region.path.read_bytes()[:SUPERBLOCK_BYTES] == bytes(SUPERBLOCK_BYTES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    again = take(tier, 4 * MIB - 100)
    again.view[SUPERBLOCK_BYTES:] = again.view[SUPERBLOCK_BYTES:]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert again is region
    assert (again.path.stat().st_ino, again.name) == (inode, name)
    assert faults < 200
    assert tier.used_bytes("test") == 4 * MIB


def test_the_closest_fit_is_taken(tier):
    large, small = take(tier, 5 * MIB), take(tier, 4 * MIB)
    for region in (large, small):
        tier.recycle("test", region)
    assert take(tier, 4 * MIB) is small
    assert take(tier, 4 * MIB) is large


def test_a_region_is_not_wasted_on_something_much_smaller(tier):
    large = take(tier, 16 * MIB)
    tier.recycle("test", large)
    assert take(tier, MIB) is not large
    assert take(tier, 15 * MIB) is large


def test_a_recycled_region_stays_with_its_run(tier):
    region = take(tier, MIB, run="a")
    tier.recycle("a", region)
    assert take(tier, MIB, run="b") is not region
    assert take(tier, MIB, run="a") is region


def test_a_discarded_region_never_comes_back(tier, root):
    region = take(tier, MIB)
    tier.discard("test", region)
    assert files(root) == []
    assert tier.used_bytes("test") == 0
    region.view[:] = b"x" * MIB  # whoever still has it mapped may write to it
    assert take(tier, MIB) is not region


def test_who_takes_over_an_assigned_region_knows_it(tier, root):
    plain, assigned = take(tier, MIB), take(tier, MIB)
    tier.assign(assigned)
    assert (plain.assigned, assigned.assigned) == (False, True)
    assert assigned.path.stat().st_mode & 0o777 == 0o600
    later = MemoryTier(root, node="n1")
    assert [later.adopt("test", each.path).assigned for each in (plain, assigned)] == [False, True]
    with pytest.raises(AssertionError):
        tier.recycle("test", assigned)
    tier.discard("test", assigned)
    assert files(root) == [plain.path.name]


def test_void_leaves_no_superblock(tier):
    region = take(tier, 2 * PAGE)
    region.view[:] = b"x" * (2 * PAGE)
    void(region)
    assert bytes(region.view) == bytes(PAGE) + b"x" * PAGE


def test_two_hundred_rounds_grow_nothing(tier, root):
    def once():
        regions = [take(tier, size) for size in (MIB, MIB, 300_000)]
        for region in regions:
            tier.recycle("test", region)

    once()
    before = (open_files(), mappings(), files(root), tier.used_bytes("test"))
    for _ in range(200):
        once()
    assert (open_files(), mappings(), files(root), tier.used_bytes("test")) == before


def test_regions_given_back_leave_no_mapping(tier):
    before = (open_files(), mappings())
    for size in range(1, 101):
        region = take(tier, size * 3 * PAGE, budget_bytes=2 * MIB)
        tier.recycle("test", region)
        del region
    kept = len(tier._accounts._spare["test"])
    assert (open_files(), mappings()) == (before[0], before[1] + kept)


# -- what an earlier agent left -------------------------------------------------------------------


def test_regions_are_found_and_taken_over(tier, root):
    region = take(tier, MIB)
    region.view[:] = b"x" * MIB
    (root / "regions" / "notes.txt").write_text("not a region")
    later = MemoryTier(root, node="n1")
    assert list(later.found()) == [region.path]
    adopted = later.adopt("test", region.path)
    assert adopted.view == region.view
    assert (adopted.name, later.used_bytes("test")) == (region.name, MIB)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from("tfdr"), st.integers(1, 40), st.integers(0, 99)), max_size=25
    )
)
def test_whatever_happens_a_run_stays_within_its_budget(acts):
    with tempfile.TemporaryDirectory(prefix="ecckpt-tier-", dir="/dev/shm") as folder:
        root = Path(folder)
        tier, taken, budget_bytes = MemoryTier(root, node="n1"), [], 64 * PAGE
        for act, pages, which in acts:
            if act == "t":
                try:
                    taken.append(take(tier, pages * PAGE, budget_bytes=budget_bytes))
                except MemoryBudgetTooSmall:
                    in_use = sum(region.size_bytes for region in taken)
                    assert in_use + pages * PAGE > budget_bytes
            elif taken:
                region = taken.pop(which % len(taken))
                (tier.recycle if act == "r" else tier.discard)("test", region)
            sizes = [path.stat().st_size for path in (root / "regions").iterdir()]
            assert tier.used_bytes("test") == sum(sizes) <= budget_bytes
            assert len({region.path for region in taken}) == len(taken)


# -- the folder -----------------------------------------------------------------------------------


def test_a_private_folder_is_made_once(root):
    folder = root / "private"
    assert private_folder(folder) == private_folder(folder) == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707, 0o1777])
def test_a_folder_open_to_others_is_refused(root, mode):
    folder = root / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InvalidConfig, match=f"is not private: .* mode {mode:o} .*chmod 700"):
        private_folder(folder)


def test_a_link_is_no_private_folder(root):
    (root / "real").mkdir(mode=0o700)
    (root / "link").symlink_to("real")
    with pytest.raises(InvalidConfig, match="is not private"):
        private_folder(root / "link")


# -- huge pages -----------------------------------------------------------------------------------


def await_(condition, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()


def on_huge_pages(region):
    """Whether all whole huge pages of a region are that, by asking for it once more."""
    lines = Path("/proc/self/smaps").read_text()
    part = lines[lines.index(region.path.name) :]
    found = re.search(r"ShmemPmdMapped:\s+(\d+) kB", part)
    return int(found[1]) >= region.size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES // 1024


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("ecckpt.agent.deadlines.HUGE_PAGES_DELAY_S", 0.0)


def test_new_regions_are_on_huge_pages(tier):
    region = take(tier, 2 * HUGE_PAGE_BYTES + PAGE, budget_bytes=64 * MIB)
    if not make_huge(region.view):
        pytest.skip("this kernel makes no huge pages of tmpfs files (MADV_COLLAPSE, Linux 6.1)")
    assert on_huge_pages(take(tier, 2 * HUGE_PAGE_BYTES + PAGE, budget_bytes=64 * MIB))


def test_no_memory_for_a_thread_costs_no_region(tier, monkeypatch):
    monkeypatch.setattr("ecckpt.agent.storage.regions.begin_huge", lambda descriptor, view: False)
    with monkeypatch.context() as short:
        short.setattr("threading.Thread.start", MagicMock(side_effect=RuntimeError))
        kept = take(tier, HUGE_PAGE_BYTES)
    assert tier._files._huge_pages._thread is None
    assert take(tier, HUGE_PAGE_BYTES) is not kept
    assert tier._files._huge_pages._thread.is_alive()


def test_regions_that_began_without_are_on_huge_pages_before_long(tier, impatient, monkeypatch):
    # As if the kernel had none at the moment.
    monkeypatch.setattr("ecckpt.agent.storage.regions.begin_huge", lambda descriptor, view: False)
    region = take(tier, 2 * HUGE_PAGE_BYTES + PAGE, budget_bytes=64 * MIB)
    if not make_huge(region.view):
        pytest.skip("this kernel makes no huge pages of tmpfs files (MADV_COLLAPSE, Linux 6.1)")
    region = take(tier, 2 * HUGE_PAGE_BYTES + PAGE, budget_bytes=64 * MIB)
    content = os.urandom(region.size_bytes)
    region.view[:] = content
    assert await_(lambda: on_huge_pages(region))
    assert bytes(region.view) == content


def test_a_region_given_back_is_not_kept_for_its_huge_pages(tier, impatient):
    region = take(tier, 4 * HUGE_PAGE_BYTES, budget_bytes=64 * MIB)
    before = mappings()
    tier.recycle("test", region)
    del region
    assert tier._drop_spares() == 1
    assert mappings() < before


def test_each_use_of_a_region_has_a_number_of_its_own(root, tier):
    first = take(tier, MIB)
    uses = [first.use]
    for _ in range(3):
        tier.recycle("test", first)
        assert take(tier, MIB) is first
        uses.append(first.use)
    tier.recycle("test", first)
    assert tier.take_spare("test", MIB) is first
    uses.append(first.use)
    after_a_kill = MemoryTier(root, node="n1").adopt("test", first.path)
    assert after_a_kill.name == first.name
    uses.append(after_a_kill.use)
    assert len(set(uses)) == 6
