"""Which blocks of a coded shard hold given bytes, and runs of equal blocks. Pure.

Used by readers of parts of a shard, and wherever damaged blocks are pulled or rebuilt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ecckpt.format.fragment_file import Header

Flags = NDArray[np.bool_]
Offsets = NDArray[np.int64]


def covering(header: Header, starts: Offsets, ends: Offsets) -> Flags:
    """Flags of shape (k, rows): the data blocks that hold the byte ranges [start, end) of a shard.

    Ranges may overlap and come in any order; an empty range needs no block. Raises ``ValueError``
    for a range that is not within the shard.
    """
    if ((starts < 0) | (ends < starts) | (ends > header.shard_bytes)).any():
        raise ValueError(f"a range is not within the {header.shard_bytes} bytes of {header.shard}")
    filled = ends > starts
    # Blocks are numbered in the order of their bytes, so a range covers neighbours. ``changes``
    # counts ranges that begin (+1) or have ended (-1) at a block; its running sum is the cover.
    changes = np.zeros(header.k * header.rows + 1, np.int64)
    np.add.at(changes, _block_at(header, starts[filled]), 1)
    np.add.at(changes, _block_at(header, ends[filled] - 1) + 1, -1)
    wanted: Flags = np.cumsum(changes[:-1]) > 0
    return wanted.reshape(header.k, header.rows)


def _block_at(header: Header, offsets: Offsets) -> Offsets:
    index, within = np.divmod(offsets, header.fragment_bytes)
    numbers: Offsets = index * header.rows + within // header.block_bytes
    return numbers


def span_of(header: Header, rows: slice) -> slice:
    """Where neighbouring rows (at least one) lie within a fragment, in bytes."""
    return slice(header.block(rows.start).start, header.block(rows.stop - 1).stop)


def spans(wanted: Flags) -> Iterator[slice]:
    """The runs of True in a row of bools, as slices."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False]))))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        yield slice(int(start), int(stop))


def like_rows(flags: Flags) -> Iterator[slice]:
    """The runs of neighbouring columns of ``flags`` that are equal, as slices."""
    changes = np.flatnonzero((flags[:, 1:] != flags[:, :-1]).any(axis=0)) + 1
    edges = [0, *changes.tolist(), flags.shape[1]]
    for start, stop in itertools.pairwise(edges):
        yield slice(start, stop)
