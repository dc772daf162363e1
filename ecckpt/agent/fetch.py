"""Bringing a shard home: pull what is left straight into place, rebuild the rest there, verify.

Losses are counted block by block: a row of blocks decodes as soon as any k of its n blocks are
good, wherever they come from, so fragments that are partly damaged still help.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ecckpt import wire
from ecckpt.agent.ledger import Entry
from ecckpt.agent.protect import data_views, parity_region_bytes, parity_views
from ecckpt.agent.shelf import Shelf
from ecckpt.blocks import like_rows, span_of, spans
from ecckpt.client import peer_client
from ecckpt.codec import Codec
from ecckpt.errors import CorruptFragment, EcckptError, TooFewFragments
from ecckpt.fragment import SUPERBLOCK_BYTES, Header
from ecckpt.tiers.memory import Region

_PARALLEL_PULLS = 8


@dataclass(eq=False, slots=True)
class _Gathering:
    """Fragments on their way into place: ``good[i, row]`` says which blocks are proven."""

    header: Header
    table: np.ndarray
    views: list[memoryview]
    good: np.ndarray
    untried: dict[int, list[str]]
    deadline_s: float
    pulled_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def undecodable(self) -> np.ndarray:
        """Rows, as bools, that can be neither taken as they are nor rebuilt."""
        k = self.header.k
        lacking: np.ndarray = ~self.good[:k].all(axis=0) & (self.good.sum(axis=0) < k)
        return lacking


def fetch_shard(shelf: Shelf, message: wire.Fetch, *, token: str) -> wire.Fetched:
    """Make this node the shard's home: a sealed, verified copy in a slot.

    Raises ``TooFewFragments`` when what can be reached does not suffice.
    """
    header = message.header
    run = header.shard.run
    shelf.admit(run, message.writer)
    deadline_s = time.monotonic() + message.timeout_s
    table = _find_table(message, token)
    region = _allocate(shelf, message, header.file_bytes)
    try:
        gathering, rebuilt = _fill(
            shelf, message, region, table, deadline_s=deadline_s, token=token
        )
    except BaseException:
        shelf.tier.recycle(run, region)
        raise
    entry = Entry(header, region, None)
    shelf.seal(entry, table)
    shelf.put(entry)
    return wire.Fetched(
        slot_of(header, region), gathering.pulled_bytes, rebuilt, tuple(gathering.problems)
    )


def _fill(
    shelf: Shelf,
    message: wire.Fetch,
    region: Region,
    table: np.ndarray,
    *,
    deadline_s: float,
    token: str,
) -> tuple[_Gathering, int]:
    """Gather and rebuild the shard in its region, with parity in one of its own meanwhile."""
    header = message.header
    parity = _allocate(shelf, message, parity_region_bytes(header)) if header.m else None
    gathering = _Gathering(
        header,
        table,
        data_views(header, region) + parity_views(header, parity),
        np.zeros((header.n, header.rows), dtype=bool),
        {sources.index: list(sources.addresses) for sources in message.sources},
        deadline_s,
    )
    try:
        _gather(gathering, token)
        return gathering, _rebuild(gathering)
    finally:
        if parity is not None:
            shelf.tier.recycle(header.shard.run, parity)


def slot_of(header: Header, region: Region) -> wire.Slot:
    """How a trainer on this node reaches a home copy, or the place for one."""
    return wire.Slot(str(region.path), region.name, region.size_bytes, SUPERBLOCK_BYTES, header)


def _allocate(shelf: Shelf, message: wire.Fetch, size_bytes: int) -> Region:
    return shelf.allocate(
        message.header.shard.run,
        size_bytes,
        budget_bytes=message.memory_bytes,
        what=f"restoring {message.header.shard}",
    )


def _find_table(message: wire.Fetch, token: str) -> np.ndarray:
    problems: list[str] = []
    addresses = dict.fromkeys(a for sources in message.sources for a in sources.addresses)
    for address in addresses:
        try:
            return peer_client(address, token).table(message.header)
        except (EcckptError, OSError) as error:
            problems.append(str(error))
    raise TooFewFragments(
        f"checksums of {message.header.shard}", have=0, need=1, reasons=problems[:8]
    )


def _gather(gathering: _Gathering, token: str) -> None:
    """Pull data fragments first, then as many others as some row still lacks."""
    header = gathering.header
    wanted = [index for index in range(header.k) if index in gathering.untried]
    with ThreadPoolExecutor(_PARALLEL_PULLS, thread_name_prefix="fetch") as pool:
        while True:
            list(pool.map(lambda index: _pull_fragment(gathering, index, token), wanted))
            lacking = gathering.undecodable
            if not lacking.any():
                return
            short = header.k - int(gathering.good[:, lacking].sum(axis=0).min())
            wanted = [index for index, left in gathering.untried.items() if left][:short]
            if not wanted:
                have = int(gathering.good[:, lacking].sum(axis=0).min())
                raise TooFewFragments(
                    str(header.shard), have=have, need=header.k, reasons=gathering.problems[:8]
                )


def _pull_fragment(gathering: _Gathering, index: int, token: str) -> None:
    """Try one more source of a fragment, for those of its blocks that are not proven yet."""
    header = gathering.header
    address = gathering.untried[index].pop(0)
    client = peer_client(address, token)
    try:
        for rows in spans(~gathering.good[index]):
            span = span_of(header, rows)
            target = gathering.views[index][span]
            timeout_s = max(0.001, gathering.deadline_s - time.monotonic())
            client.pull_fragment(
                header.shard, index, target, offset=span.start, timeout_s=timeout_s
            )
            gathering.pulled_bytes += len(target)
            _prove(gathering, index, rows)
    except (EcckptError, OSError) as error:
        gathering.problems.append(f"fragment {index}: {error}")
    bad = int((~gathering.good[index]).sum())
    if bad:
        gathering.problems.append(
            f"fragment {index} from {address}: {bad} of {header.rows} blocks not proven"
        )
    elif not gathering.untried[index]:
        del gathering.untried[index]


def _prove(gathering: _Gathering, index: int, rows: slice) -> None:
    header = gathering.header
    span = span_of(header, rows)
    view = gathering.views[index][span]
    codec = Codec(header.k, header.m)
    bad = codec.verify({index: view}, gathering.table[:, rows], header.block_bytes)
    gathering.good[index, rows] = True
    for _, row in bad:
        gathering.good[index, rows.start + row] = False


def _rebuild(gathering: _Gathering) -> int:
    """Compute every data block that is not proven; returns how many fragments that touched."""
    header, good = gathering.header, gathering.good
    touched: set[int] = set()
    for rows in like_rows(good):
        missing = [index for index in range(header.k) if not good[index, rows.start]]
        if not missing:
            continue
        span = span_of(header, rows)
        present = [index for index in range(header.n) if good[index, rows.start]]
        sums = Codec(header.k, header.m).rebuild(
            _cut(gathering.views, present, span),
            _cut(gathering.views, missing, span),
            header.block_bytes,
        )
        if not np.array_equal(sums[missing], gathering.table[missing, rows]):
            raise CorruptFragment(f"{header.shard}: rebuilt blocks fail their CRC32C")
        touched.update(missing)
    return len(touched)


def _cut(views: list[memoryview], indices: list[int], span: slice) -> Mapping[int, memoryview]:
    return {index: views[index][span] for index in indices}
