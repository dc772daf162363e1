"""What every tier owes its agent, whatever it keeps bytes in: one suite, run over each.

A test file subclasses ``TierSuite`` and says how a file of its tier is written, found and let go.
"""

from abc import ABC, abstractmethod
from itertools import product

import pytest

from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, pack_superblock, pack_table
from tests.support.builders import generation, header, table_of

BUDGET = 64 << 20


def payload_of(shard):
    return bytes((7 * at + shard.index + shard.shard.rank) % 251 for at in range(4096)) * (
        shard.payload_bytes // 4096 + 1
    )


def content_of(shard):
    """The whole file, as FORMAT.md has it."""
    payload = payload_of(shard)[: shard.payload_bytes]
    return pack_superblock(shard) + payload + pack_table(table_of(shard))


class TierSuite(ABC):
    """The contract. ``root`` is an empty folder on the tier's medium."""

    too_small: type[Exception]
    full: type[Exception]

    @abstractmethod
    def start(self, root):
        """A tier over ``root``, as an agent makes it at its start."""

    @abstractmethod
    def keep(self, tier, shard, *, budget_bytes=BUDGET):
        """Write the file ``content_of(shard)``; whatever stands for it."""

    @abstractmethod
    def let_go(self, tier, kept, shard):
        """Remove it for good."""

    @abstractmethod
    def read(self, kept, shard):
        """Its bytes."""

    @abstractmethod
    def take_over(self, tier, path, shard):
        """Adopt what ``found`` found."""

    @pytest.fixture
    def tier(self, root):
        return self.start(root)

    @pytest.mark.parametrize("size", [0, 1, 10_000, 3_000_000])
    @pytest.mark.parametrize("index", [HOME, 0, 4])
    def test_what_is_kept_is_there_byte_for_byte(self, tier, size, index):
        shard = header(index, shard_bytes=size)
        kept = self.keep(tier, shard)
        assert self.read(kept, shard) == content_of(shard)

    def test_what_is_kept_is_found_by_the_next_agent(self, tier, root):
        shards = [header(index, rank=rank) for index, rank in product((HOME, 2), (0, 1))]
        kept = [self.keep(tier, shard) for shard in shards]
        assert sorted(tier.found()) == sorted(each.path for each in kept)
        later = self.start(root)
        assert sorted(later.found()) == sorted(tier.found())
        for each, shard in zip(kept, shards, strict=True):
            again = self.take_over(later, each.path, shard)
            assert self.read(again, shard) == content_of(shard)
        assert later.used_bytes("test") == tier.used_bytes("test") > 0

    def test_what_is_let_go_is_gone_and_counts_no_more(self, tier, root):
        gone, stays = header(1, gen=generation(1, 5)), header(1, gen=generation(1, 6))
        first, second = self.keep(tier, gone), self.keep(tier, stays)
        self.let_go(tier, first, gone)
        assert list(tier.found()) == list(self.start(root).found()) == [second.path]
        assert tier.used_bytes("test") == second.size_bytes

    def test_runs_count_apart(self, tier):
        one, other = header(1, run="a"), header(1, run="b")
        kept = self.keep(tier, one)
        self.keep(tier, other)
        used_bytes = tier.used_bytes("b")
        self.let_go(tier, kept, one)
        assert tier.used_bytes("a") == 0
        assert tier.used_bytes("b") == used_bytes > 0
        assert tier.used_bytes("c") == 0

    def test_a_budget_is_never_exceeded_and_says_its_numbers(self, tier):
        shard = header(HOME, shard_bytes=100_000)
        budget_bytes = shard.file_bytes + 8192
        kept = self.keep(tier, shard, budget_bytes=budget_bytes)
        before = list(tier.found())
        with pytest.raises(self.too_small, match=f"{budget_bytes:,}") as caught:
            self.keep(tier, header(HOME, rank=1, shard_bytes=100_000), budget_bytes=budget_bytes)
        assert caught.value.have_bytes == budget_bytes < caught.value.need_bytes
        assert list(tier.found()) == before
        assert tier.used_bytes("test") <= budget_bytes
        assert self.read(kept, shard) == content_of(shard)

    def test_a_full_medium_is_an_error_with_both_numbers(self, small_root):
        tier = self.start(small_root)
        shard = header(HOME, shard_bytes=6 << 20)
        kept = self.keep(tier, shard)
        before = list(tier.found())
        with pytest.raises(self.full) as caught:
            self.keep(tier, header(HOME, rank=1, shard_bytes=12 << 20))
        assert caught.value.need_bytes > 12 << 20 > caught.value.free_bytes
        assert list(tier.found()) == before
        assert tier.used_bytes("test") == kept.size_bytes
        assert self.read(kept, shard) == content_of(shard)
        self.keep(tier, header(HOME, rank=2, shard_bytes=1 << 20))

    def test_files_are_for_nobody_else(self, tier):
        kept = self.keep(tier, header())
        assert kept.path.stat().st_mode & 0o777 == 0o600
        assert kept.path.stat().st_size >= header().file_bytes > SUPERBLOCK_BYTES
