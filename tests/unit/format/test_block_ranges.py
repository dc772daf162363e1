"""How much a rank of another world pulls, counted in whole blocks, for states of models."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ecckpt.format.block_ranges import covering
from ecckpt.format.fragment_file import block_bytes_for
from ecckpt.state.tensors.boxes import byte_runs, cut_of, in_common
from tests.support.builders import header

ITEM_BYTES = 4
MOMENTS = 3  # the weights are the first of them


def gpt(width: int, layers: int) -> list[tuple[int, ...]]:
    """Shapes of the parameters and moments of a GPT, as FSDP2 cuts them: along the first."""
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return (layer + [(width,)] * 4) * layers * MOMENTS


def cuts_of(shapes, ranks):
    return [
        [cut_of(shape, ("S(0)",), (ranks,), (rank,)) for shape in shapes] for rank in range(ranks)
    ]


def pulled_over_needed(shapes, saved: int, ranks: int) -> float:
    """Bytes of blocks that hold wanted bytes, over wanted bytes, of all ranks."""
    old, new = cuts_of(shapes, saved), cuts_of(shapes, ranks)
    pulled = needed = 0
    for parts in old:
        sizes = [ITEM_BYTES * int(np.prod(part.shape)) for part in parts]
        begins = [0, *itertools.accumulate(sizes)]
        shard = header(k=8, m=2, shard_bytes=begins[-1], block_bytes=block_bytes_for(begins[-1]))
        block_sizes = np.diff(
            [*range(0, shard.fragment_bytes, shard.block_bytes), shard.fragment_bytes]
        )
        for wishes in new:
            starts, ends = [], []
            for part, wish, begin in zip(parts, wishes, begins, strict=False):
                for common in in_common(part, wish):
                    runs, run_bytes = byte_runs(part.shape, common.source, common.shape, ITEM_BYTES)
                    starts.append(begin + runs)
                    ends.append(begin + runs + run_bytes)
            if starts:
                starts, ends = np.concatenate(starts), np.concatenate(ends)
                needed += int((ends - starts).sum())
                pulled += int((covering(shard, starts, ends) * block_sizes).sum())
    assert needed == ITEM_BYTES * sum(int(np.prod(shape)) for shape in shapes)
    return pulled / needed


@pytest.mark.parametrize(("saved", "ranks"), [(4, 3), (4, 2), (4, 6), (8, 6)])
@pytest.mark.parametrize(
    ("width", "layers"), [(768, 12), (1024, 24), (2048, 24), (4096, 32)], ids=str
)
def test_no_more_than_the_boxes_and_a_tenth(width, layers, saved, ranks):
    """Shards of 120 MiB to 18 GiB, of 288 to 768 tensors."""
    assert pulled_over_needed(gpt(width, layers), saved, ranks) <= 1.1


def test_whole_pieces_are_read_without_anything_else():
    assert pulled_over_needed(gpt(768, 12), 4, 2) < 1.001


@pytest.mark.parametrize(
    ("shard_bytes", "block_bytes"),
    [
        (0, 64 << 10),
        (1 << 29, 64 << 10),
        ((1 << 30) - 1, 64 << 10),
        (1 << 30, 128 << 10),
        (5 << 30, 512 << 10),
        (8 << 30, 1 << 20),
        (1 << 45, 1 << 20),
    ],
)
def test_length_of_blocks(shard_bytes, block_bytes):
    assert block_bytes_for(shard_bytes) == block_bytes
