"""Damaged files, as a running cluster's agents find them: ``python tests/chaos/damage.py SEED``.

Superblocks and tables: an agent is stopped, thousands of copies of one of its files are put beside
it, each with one byte changed or cut off at another length, and the agent is started again. It must
take none of them, name each, and keep what is whole.

Payloads: bits flipped and blocks zeroed in the files of agents that run, any m blocks of every row
at a time; the shard must come back byte for byte, and with m + 1 of a row it must be refused.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.support.builders import writer_of

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest

from ecckpt import errors
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header, parse_superblock
from ecckpt.protocol.messages.restore import Fetch, Fetched, Sources
from ecckpt.protocol.verbs import FETCH, INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.stored import BLOCK_BYTES, files_of, store

K, M = 3, 2
RUN = "test"


def damaged(file: bytes, header: Header) -> Iterator[tuple[str, bytes]]:
    """Every byte of superblock and trailer changed, every length cut off; with what was done."""
    ends = range(header.trailer_offset, header.file_bytes)
    for at in (*range(SUPERBLOCK_BYTES), *ends):
        changed = bytearray(file)
        changed[at] ^= 1 << at % 8
        yield f"byte {at} changed", bytes(changed)
    for length in range(header.file_bytes):
        yield f"cut off at {length}", file[:length]


def superblocks_and_tables() -> Counter[str]:
    """One start of an agent beside them all; returns how much was tried."""
    tried: Counter[str] = Counter()
    with LocalCluster(nodes=6) as cluster:
        store(cluster, [b"a small shard"], code=(K, M))
        (path,) = files_of(cluster, "n2", 0).values()
        work = _Payloads(cluster, [b"a small shard"])
        whole = path.read_bytes()
        header = parse_superblock(whole, path.name)
        assert header is not None
        whole = whole[: header.file_bytes]
        cases = {}
        for number, (what, content) in enumerate(damaged(whole, header)):
            copy = path.with_name(f"{number:016x}.region")
            copy.write_bytes(content)
            cases[copy] = content
            tried[what.split()[0]] += 1
        started_s = time.monotonic()
        cluster.restart("n2")
        tried["milliseconds to start"] = int(1000 * (time.monotonic() - started_s))
        found = cluster.client("n2").call(INVENTORY, RUN)
        assert [each.index for each in found.headers] == [header.index]
        empty = {copy for copy, content in cases.items() if not content}
        assert {copy.name for copy in cases.keys() - empty} == found.rejected.keys()
        assert all(copy.read_bytes() == content for copy, content in cases.items() if content)
        assert path.read_bytes()[: header.file_bytes] == whole
        # What is left is still enough, and whole.
        work.expect_whole(home=False)
    return tried


def payloads(seed: int, rounds: int) -> Counter[str]:
    """Damage to payloads; returns how much was tried."""
    tried: Counter[str] = Counter()
    shard = hashlib.shake_128(b"payload").digest(50_000)
    with LocalCluster(nodes=6) as cluster:
        store(cluster, [shard], code=(K, M))
        work = _Payloads(cluster, [shard])
        for block in work.blocks():
            for how in ("flip", "zero"):
                with work.damaged({block}, how):
                    work.expect_whole(home=True)
                tried[f"a block: {how}"] += 1
        chance = random.Random(seed)
        for _ in range(rounds):
            how = chance.choice(("flip", "zero"))
            with work.damaged(work.some(chance, M), how):
                work.expect_whole(home=False)
                tried["any m of every row"] += 1
            with work.damaged(work.some(chance, M + 1, rows=1), "flip"):
                work.expect_refused()
                tried["m + 1 of a row"] += 1
        work.expect_whole(home=True)
    return tried


Block = tuple[int, int, int]  # HOME or the index of a fragment; fragment; row


class _Payloads:
    """The pieces of rank 0's shard on the six nodes of a cluster."""

    def __init__(self, cluster: LocalCluster, shards: list[bytes]) -> None:
        self._cluster = cluster
        self._shard = shards[0]
        self._files = {}
        self._at = {}
        for node in cluster.nodes:
            for index, path in files_of(cluster, node, 0).items():
                header = parse_superblock(path.read_bytes()[:SUPERBLOCK_BYTES], path.name)
                assert header is not None
                if header.block_bytes == BLOCK_BYTES:
                    self._files[index], self._at[index] = path, node
                    self._header = header

    def blocks(self) -> list[Block]:
        header = self._header
        homes = [(HOME, index, row) for index in range(K) for row in range(header.rows)]
        return homes + [
            (index, index, row) for index in range(header.n) for row in range(header.rows)
        ]

    def some(self, chance: random.Random, count: int, rows: int | None = None) -> set[Block]:
        """So many fragments of every row (or of so many rows), a row's own ones each."""
        header = self._header
        chosen = chance.sample(range(header.rows), rows or header.rows)
        return {
            (index, index, row) for row in chosen for index in chance.sample(range(header.n), count)
        }

    def damaged(self, blocks: set[Block], how: str) -> _Damage:
        return _Damage({block: self._place(block) for block in blocks}, how)

    def _place(self, block: Block) -> tuple[Path, int, int]:
        piece, index, row = block
        span = self._header.block(row)
        start = SUPERBLOCK_BYTES + span.start
        if piece == HOME:
            start += index * self._header.fragment_bytes
        return self._files[piece], start, span.stop - span.start

    def expect_whole(self, *, home: bool) -> None:
        fetched = self._fetch(home=home)
        with Path(fetched.slot.path).open("rb") as file:
            file.seek(fetched.slot.payload_offset)
            assert file.read(len(self._shard)) == self._shard

    def expect_refused(self) -> None:
        with pytest.raises((errors.TooFewFragments, errors.CorruptFragment), match="good fragment"):
            self._fetch(home=False)

    def _fetch(self, *, home: bool) -> Fetched:
        """To the last node, which is no home: from the fragments, or the home copy first."""
        address = {n: self._cluster.client(n).node().address for n in self._cluster.nodes}
        sources = []
        for index in range(self._header.n):
            at = [self._at[index]]
            if home and index < K:
                at.insert(0, self._at[HOME])
            sources.append(Sources(index, tuple(address[node] for node in at)))
        node = self._cluster.nodes[-1]
        header = replace(self._header.at(HOME), home=node)
        return self._cluster.client(node).call(
            FETCH,
            Fetch(
                header=header,
                writer=writer_of(1),
                sources=tuple(sources),
                memory_bytes=0,
                timeout_s=30.0,
            ),
        )


class _Damage:
    """Blocks that are damaged inside a ``with``, and as they were after it."""

    def __init__(self, places: dict[Block, tuple[Path, int, int]], how: str) -> None:
        self._places = places
        self._how = how
        self._before: dict[Block, bytes] = {}

    def __enter__(self) -> None:
        for number, (block, (path, start, length)) in enumerate(self._places.items()):
            with path.open("r+b") as file:
                file.seek(start)
                self._before[block] = file.read(length)
                changed = bytearray(length)
                if self._how == "flip":
                    changed[:] = self._before[block]
                    changed[(997 * number) % length] ^= 0x20
                file.seek(start)
                file.write(changed)

    def __exit__(self, *error: object) -> None:
        for block, (path, start, _) in self._places.items():
            with path.open("r+b") as file:
                file.seek(start)
                file.write(self._before[block])


if __name__ == "__main__":
    print(dict(superblocks_and_tables()))
    print(dict(payloads(int(sys.argv[1]), rounds=200)))
