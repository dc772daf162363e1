"""Parts of a shard out of peers' memory: its bytes, whoever is lost and whatever is damaged."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.client.read import shard_reader
from ecckpt.client.read.shard_reader import Peers, ShardReader
from ecckpt.errors import CorruptFragment, NotHeld, TooFewFragments
from ecckpt.format.block_ranges import covering
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES, Header, block_bytes_for
from ecckpt.policy.survival import ShardReport, ShardSources, plan_recovery
from ecckpt.protocol.agent_client import shard_path
from ecckpt.protocol.http import request
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.worlds import World

SHARD_BYTES = 10_000_000  # 51 rows of 3 blocks, the last ones short
BLOCK_BYTES = block_bytes_for(SHARD_BYTES)


@pytest.fixture(scope="module")
def saved():
    """A cluster where rank 0 on n0 saved a shard, its report, and the shard's bytes."""
    with LocalCluster(nodes=6) as cluster:
        state = {"noise": torch.randint(0, 256, (SHARD_BYTES,), dtype=torch.uint8)}
        with World(cluster, ranks=1, agents=cluster.addresses(), code=(3, 2)) as world:
            world.restore([state])
            assert world.save(1, [state])[0].wait(30)
        clients = [cluster.client(node) for node in cluster.nodes]
        plan = plan_recovery("test", [client.call(INVENTORY, "test") for client in clients])
        assert plan.chosen is not None
        (report,) = plan.chosen.shards
        assert report.header is not None
        status, shard = request(
            clients[0].address,
            "GET",
            f"{shard_path(report.header.shard)}/shard",
            timeout_s=10,
            limit_bytes=1 << 24,
        )
        assert status == 200
        yield cluster, report, shard


def reader_of(
    cluster: LocalCluster,
    report: ShardReport,
    *,
    lost: tuple[str, ...] = (),
    near: str = "",
    home: Callable[[Header], memoryview] | None = None,
) -> ShardReader:
    """A reader to which some nodes are lost."""
    assert report.header is not None
    clients = {node: cluster.client(node) for node in cluster.nodes if node not in lost}
    peers = Peers(clients=clients, near=near, home=home, spread=1, deadline_s=time.monotonic() + 10)
    return ShardReader(ShardSources(report.header, report.homes, report.fragments), peers)


def read(reader: ShardReader, ranges: list[tuple[int, int]]) -> list[bytes]:
    starts, ends = np.array(ranges, np.int64).reshape(-1, 2).T
    reader.require(starts, ends)
    return [bytes(reader.data[start:end]) for start, end in ranges]


places = st.integers(0, SHARD_BYTES).flatmap(
    lambda start: st.tuples(st.just(start), st.integers(start, min(start + 3_000_000, SHARD_BYTES)))
)


@settings(max_examples=12)
@given(st.lists(places, max_size=4), st.permutations(range(6)), st.integers(0, 3))
def test_ranges_are_those_of_the_whole_shard(saved, ranges, lost, count):
    """B33: several ranges, across borders of blocks and fragments, with any three nodes lost."""
    cluster, report, shard = saved
    gone = tuple(f"n{index}" for index in lost[:count])
    reader = reader_of(cluster, report, lost=gone)
    for _ in range(2):  # what is there already is not read again
        assert read(reader, ranges) == [shard[start:end] for start, end in ranges]
    pulled_bytes = reader.pulled_bytes
    reader.release()
    assert not any(bytes(reader.data[start:end]).strip(b"\0") for start, end in ranges)
    assert read(reader, ranges[:1]) == [shard[start:end] for start, end in ranges[:1]]
    starts, ends = np.array(ranges, np.int64).reshape(-1, 2).T
    assert report.header is not None
    wanted = covering(report.header, starts, ends)
    if "n0" not in gone:
        assert pulled_bytes <= int(wanted.sum()) * BLOCK_BYTES
    assert reader.rebuilt_fragments <= 2


def test_a_shard_is_proven_piece_by_piece_and_dropped(saved, monkeypatch):
    cluster, report, shard = saved
    monkeypatch.setattr(shard_reader, "_KEPT_BYTES", 3_000_000)
    reader = reader_of(cluster, report, lost=("n0", "n2", "n5"))
    reader.prove()
    assert reader.pulled_bytes >= len(shard)
    assert not any(reader.data)
    with pytest.raises(TooFewFragments) as raised:
        reader_of(cluster, report, lost=("n0", "n1", "n2", "n3")).prove()
    assert raised.value.rank == 0


def test_what_is_near_is_asked_first(saved):
    cluster, report, shard = saved
    holder = report.fragments[1][0]
    reader = reader_of(cluster, report, near=holder)
    assert not reader.is_near
    assert reader_of(cluster, report, near="n0").is_near
    assert read(reader, [(len(shard) // 2, len(shard) // 2 + 100)])
    assert reader.pulled_bytes == BLOCK_BYTES


def mapped(shard: bytes, report: ShardReport) -> bytearray:
    """A home copy as it lies on its node."""
    assert report.header is not None
    return bytearray(shard) + bytes(report.header.payload_bytes - len(shard))


def test_this_nodes_own_copy_is_read_where_it_lies(saved):
    cluster, report, shard = saved
    home = mapped(shard, report)
    others = tuple(node for node in cluster.nodes if node != "n0")
    reader = reader_of(cluster, report, lost=others, near="n0", home=lambda _: memoryview(home))
    home[5] ^= 1  # it is copied, and what was copied is proven; the node itself has it right
    assert read(reader, [(0, 10)]) == [shard[:10]]
    assert set(reader._problems) == {"block 0 of fragment 0 at n0 is bad"}
    assert read(reader, [(0, len(shard))]) == [shard]
    home[:] = bytes(len(home))  # as when its memory is taken for a newer save
    assert read(reader, [(0, len(shard))]) == [shard]


def test_a_copy_that_cannot_be_mapped_is_pulled(saved):
    def gone(_: object) -> memoryview:
        raise NotHeld("on disk only")

    cluster, report, shard = saved
    reader = reader_of(cluster, report, near="n0", home=gone)
    assert read(reader, [(0, len(shard))]) == [shard]


def test_too_much_lost_is_an_error(saved):
    cluster, report, _ = saved
    reader = reader_of(cluster, report, lost=("n0", "n1", "n2", "n3"))
    with pytest.raises(TooFewFragments, match="2 good fragments, 3 needed"):
        read(reader, [(0, 10)])
    with pytest.raises(TooFewFragments, match="checksums"):
        reader_of(cluster, report, lost=tuple(cluster.nodes))
    with pytest.raises(CorruptFragment, match="is not within"):
        read(reader, [(0, SHARD_BYTES * 2)])


def test_equal_digests_only_of_equal_bytes(saved):
    cluster, report, _ = saved
    one, other = reader_of(cluster, report), reader_of(cluster, report, lost=("n0",))
    assert one.digest(5, 2_000_000) == other.digest(5, 2_000_000)
    assert one.digest(5, 2_000_000) != other.digest(5, 2_000_001)
    assert one.digest(0, 5) != one.digest(4_000_000, 4_000_005)


def test_bad_blocks_are_decoded_and_never_seen(saved):
    """Last, because it damages: two fragments of one row, then a third."""
    cluster, report, shard = saved
    header = report.header
    whole = [(0, header.shard_bytes)]

    def damage(index: int) -> None:
        """Change a byte of block 1 of a fragment, at its holder."""
        (node,) = report.fragments[index]
        for path in (cluster.root(node) / "regions").iterdir():
            with path.open("r+b") as file:
                file.seek(SUPERBLOCK_BYTES + BLOCK_BYTES + 77)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 0x40]))

    damage(0)
    damage(2)
    assert read(reader_of(cluster, report), whole) == [shard]  # the home copy is good
    reader = reader_of(cluster, report, lost=("n0",))
    assert read(reader, whole) == [shard]
    assert reader.rebuilt_fragments == 2
    damage(3)
    reader = reader_of(cluster, report, lost=("n0",))
    with pytest.raises(TooFewFragments, match=r"block 1 of fragment .* is bad"):
        read(reader, whole)
    block = slice(BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert bytes(reader.data[block]) == bytes(BLOCK_BYTES)
    assert read(reader, [(0, 100)]) == [shard[:100]]
    tables = [reader.digest(0, SHARD_BYTES), reader_of(cluster, report).digest(0, SHARD_BYTES)]
    assert tables[0] == tables[1]
