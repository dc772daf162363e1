"""The bytes of fragment files: every header survives, and no damaged one is believed."""

import struct
from contextlib import suppress
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ecckpt.coding import gf256
from ecckpt.coding.crc32c import crc32c
from ecckpt.errors import CorruptFragment, VersionMismatch
from ecckpt.format.fragment_file import (
    FORMAT_VERSION,
    HOME,
    SUPERBLOCK_BYTES,
    Header,
    fragment_bytes_for,
    pack_superblock,
    pack_table,
    parse_superblock,
    parse_table,
)
from tests.support.builders import generation, header, headers, table_of

BLOCK = pack_superblock(header(parent=generation(1, 5)))
SMALL = header(1, k=2, m=1, shard_bytes=20_000, block_bytes=4096)
TRAILER = pack_table(table_of(SMALL))


def sealed(fields, version=FORMAT_VERSION):
    """A superblock with a right CRC around whatever fields."""
    body = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    block = struct.pack("<8sII", b"\x89ecckpt\n", version, len(body)) + body
    block = block.ljust(SUPERBLOCK_BYTES - 4, b"\0")
    return block + gf256.crc32c(block).to_bytes(4, "little")


# -- superblock -----------------------------------------------------------------------------------


@given(headers())
def test_a_superblock_brings_back_its_header(any_header):
    block = pack_superblock(any_header)
    assert len(block) == SUPERBLOCK_BYTES
    assert parse_superblock(block, "here") == any_header
    assert parse_superblock(memoryview(block + b"payload"), "here") == any_header


def test_superblocks_are_made_as_specified():
    assert sealed(header().to_wire()) == pack_superblock(header())


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_no_flip_in_a_superblock_is_believed(mask):
    for at in range(SUPERBLOCK_BYTES):
        damaged = bytearray(BLOCK)
        damaged[at] ^= mask
        try:
            found = parse_superblock(damaged, "here")
        except (CorruptFragment, VersionMismatch):
            assert at >= 8
        else:
            assert found is None
            assert at < 8


@settings(max_examples=200)
@given(st.binary(max_size=64), st.integers(0, SUPERBLOCK_BYTES))
def test_no_overwritten_superblock_is_believed(noise, at):
    damaged = BLOCK[:at] + noise + BLOCK[at + len(noise) :]
    assume(damaged[:SUPERBLOCK_BYTES] != BLOCK)
    with suppress(CorruptFragment, VersionMismatch):
        assert parse_superblock(damaged, "here") is None


def test_every_truncated_superblock_is_named_or_nothing():
    for length in range(SUPERBLOCK_BYTES):
        if length < 8:
            assert parse_superblock(BLOCK[:length], "here") is None
        else:
            with pytest.raises(CorruptFragment, match=f"cut off at {length} bytes"):
                parse_superblock(BLOCK[:length], "here")


@settings(max_examples=50)
@given(st.binary(max_size=5000))
def test_foreign_bytes_are_no_superblock(data):
    assume(not data.startswith(b"\x89ecckpt\n"))
    assert parse_superblock(data, "here") is None


@pytest.mark.parametrize("version", [0, 2, 7, 0xFFFFFFFF])
def test_another_version_is_named_with_both_numbers(version):
    with pytest.raises(VersionMismatch, match=f"here has format version {version}") as caught:
        parse_superblock(sealed({"anything": "else"}, version=version), "here")
    assert (caught.value.found, caught.value.known) == (version, FORMAT_VERSION)


def test_a_header_that_is_too_long_is_not_written():
    with pytest.raises(CorruptFragment, match="does not fit"):
        pack_superblock(header(home="n" * 4000))


# -- headers that no writer made ------------------------------------------------------------------

CONTRADICTIONS = [
    ({"k": 0}, "k=0"),
    ({"k": -1}, "k=-1"),
    ({"m": -1}, "m=-1"),
    ({"m": 254}, "m=254"),
    ({"index": 5}, "index 5 of 5"),
    ({"index": -2}, "index -2"),
    ({"rank": 8}, "rank 8 of 8"),
    ({"rank": -1}, "rank -1"),
    ({"world_size": 0}, "world_size=0"),
    ({"world_size": 1 << 25}, "world_size"),
    ({"shard_bytes": -1}, "shard_bytes=-1"),
    ({"shard_bytes": 1 << 48}, "shard_bytes"),
    ({"shard_bytes": 30_000}, "fragment_bytes=4928"),
    ({"shard_bytes": 2**64 - 1}, "shard_bytes"),
    ({"fragment_bytes": 4929}, "fragment_bytes=4929 for 10000 over 3"),
    ({"fragment_bytes": 2**63}, "fragment_bytes"),
    ({"block_bytes": 0}, "block_bytes=0"),
    ({"block_bytes": 4095}, "block_bytes=4095"),
    ({"block_bytes": (1 << 30) + 1}, "block_bytes"),
]


@pytest.mark.parametrize(("change", "words"), CONTRADICTIONS)
def test_numbers_that_contradict_each_other_are_refused(change, words):
    with pytest.raises(CorruptFragment, match=words):
        parse_superblock(sealed(header().to_wire() | change), "here")


@pytest.mark.parametrize("name", sorted(header().to_wire()))
@pytest.mark.parametrize("value", [True, 1.5, None, b"x", [], {}, "x", msgpack.Timestamp(1)])
def test_wrong_types_are_refused(name, value):
    if name == "parent" and value is None:
        return
    if name in ("run", "home") and value == "x":
        return
    with pytest.raises(CorruptFragment, match="header"):
        parse_superblock(sealed(header().to_wire() | {name: value}), "here")


@pytest.mark.parametrize("name", sorted(header().to_wire()))
def test_missing_fields_are_refused(name):
    fields = header().to_wire()
    del fields[name]
    with pytest.raises(CorruptFragment, match=name):
        parse_superblock(sealed(fields), "here")


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x93", b"\xde\xff\xff", msgpack.packb([1]), b"\xc0", b"\x91" * 4000]
)
def test_what_is_no_map_is_refused(body):
    with pytest.raises(CorruptFragment, match="here"):
        parse_superblock(sealed(body), "here")


def test_a_length_beyond_the_superblock_is_refused():
    block = bytearray(sealed({}))
    block[12:16] = (1 << 31).to_bytes(4, "little")
    block[-4:] = gf256.crc32c(bytes(block[:-4])).to_bytes(4, "little")
    with pytest.raises(CorruptFragment, match="header of 2147483648 bytes"):
        parse_superblock(block, "here")


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bodies_are_refused(body):
    with pytest.raises(CorruptFragment):
        parse_superblock(sealed(body), "here")


# -- table ----------------------------------------------------------------------------------------


@given(headers(max_shard_bytes=1 << 20), st.integers(0, 99))
def test_a_table_comes_back(any_header, seed):
    table = table_of(any_header, seed)
    trailer = pack_table(table)
    assert len(trailer) == any_header.trailer_bytes
    assert np.array_equal(parse_table(trailer, any_header, "here"), table)
    assert parse_table(trailer, any_header, "here").shape == (any_header.n, any_header.rows)


def test_no_flip_in_a_trailer_is_believed():
    for at in range(len(TRAILER)):
        for bit in range(8):
            damaged = bytearray(TRAILER)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptFragment, match="here"):
                parse_table(damaged, SMALL, "here")


def test_every_truncated_trailer_is_refused():
    for length in range(len(TRAILER)):
        with pytest.raises(CorruptFragment, match=f"{length} bytes, {len(TRAILER)} expected"):
            parse_table(TRAILER[:length], SMALL, "here")


def test_a_longer_trailer_is_refused():
    with pytest.raises(CorruptFragment, match="expected"):
        parse_table(TRAILER + b"\0", SMALL, "here")


def test_a_file_without_its_end_mark_was_never_completed():
    with pytest.raises(CorruptFragment, match="never completed"):
        parse_table(bytes(len(TRAILER)), SMALL, "here")


def test_the_table_of_another_shape_is_refused():
    with pytest.raises(CorruptFragment, match="expected"):
        parse_table(TRAILER, header(1, k=3, m=2), "here")


# -- sizes ----------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 48), st.integers(1, 256))
def test_fragments_hold_the_shard_at_the_stride(shard_bytes, k):
    size_bytes = fragment_bytes_for(shard_bytes, k)
    assert size_bytes * k >= shard_bytes
    assert size_bytes % 4096 == 832
    assert size_bytes - -(-shard_bytes // k) < 4096


@given(st.integers(0, 1 << 48), st.integers(0, 1 << 20), st.integers(1, 256))
def test_a_longer_shard_never_has_shorter_fragments(shard_bytes, more, k):
    assert fragment_bytes_for(shard_bytes, k) <= fragment_bytes_for(shard_bytes + more, k)


@pytest.mark.parametrize("shard_bytes", [2**31 - 1, 2**31, 2**32 - 1, 2**32 + 1, 2**47])
def test_sizes_beyond_32_bits(shard_bytes):
    big = header(HOME, k=3, m=2, shard_bytes=shard_bytes)
    again = parse_superblock(pack_superblock(big), "here")
    assert again == big
    assert again.payload_bytes == 3 * big.fragment_bytes >= shard_bytes
    assert again.trailer_offset == SUPERBLOCK_BYTES + again.payload_bytes
    assert again.file_bytes == again.trailer_offset + 4 * 5 * again.rows + 12


@given(headers(max_shard_bytes=1 << 30))
def test_blocks_cover_a_fragment_without_gap_or_overlap(any_header):
    any_header = replace(any_header, block_bytes=max(any_header.block_bytes, 1 << 20))
    at = 0
    for row in range(any_header.rows):
        block = any_header.block(row)
        assert block.start == at
        assert 0 < block.stop - at <= any_header.block_bytes
        at = block.stop
    assert at == any_header.fragment_bytes


# -- identity -------------------------------------------------------------------------------------


def test_fragments_and_home_copy_are_of_the_same_shard():
    assert header(HOME).same_shard(header(3, home="elsewhere"))
    assert header(3).at(HOME) == header(HOME)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 1},
        {"gen": generation(1, 11)},
        {"gen": generation(2, 10)},
        {"gen": generation(session="f" * 16)},
        {"run": "other"},
        {"shard_bytes": 10_001},
        {"k": 2},
        {"m": 1},
        {"block_bytes": 4096},
        {"parent": generation(1, 9)},
        {"created_unix_s": 5},
    ],
)
def test_any_other_difference_makes_another_shard(change):
    assert not header(1).same_shard(header(1, **change))


def test_checksums_are_castagnoli():
    for data in (b"", b"123456789", bytes(range(256)) * 17):
        assert crc32c(data) == gf256.crc32c(data)
    assert crc32c(b"123456789") == 0xE3069283


def test_a_header_from_a_message_is_checked_alike():
    assert Header.from_wire(header().to_wire(), "here") == header()
    for nonsense in (None, 5, [], "x", {}):
        with pytest.raises(CorruptFragment, match="here"):
            Header.from_wire(nonsense, "here")
