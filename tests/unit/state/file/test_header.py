"""Headers: whatever the bytes are, a shard is read or called corrupt; nothing else happens."""

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.errors import CorruptFragment, VersionMismatch
from ecckpt.state.file.shard import read_shard
from ecckpt.state.paths import VALUES_NAME
from ecckpt.state.snapshot.plan import plan_shard


def saved(state):
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return bytes(target)


TIED = torch.arange(4.0)
STATE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "a": TIED,
    "b": {"tied": TIED},
    "z": torch.ones(2, dtype=torch.complex128),
    "empty": torch.empty(0, 3),
    "step": 3,
    "rest": [1, (2, {3: "x"})],
}
SHARD = saved(STATE)
HEADER_BYTES = int.from_bytes(SHARD[:8], "little")
HEADER = json.loads(SHARD[8 : 8 + HEADER_BYTES])
DATA = SHARD[8 + HEADER_BYTES :]


def read(data):
    try:
        return read_shard(memoryview(data))
    except (CorruptFragment, VersionMismatch):
        return None


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(SHARD) - 1), st.integers(1, 255)), min_size=1, max_size=4)
)
def test_flipped_bytes_never_crash(flips):
    data = bytearray(SHARD)
    for place, mask in flips:
        data[place] ^= mask
    read(bytes(data))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, HEADER_BYTES - 1), st.sampled_from(b'0123456789-"[]{},:.eEtn '))
def test_changed_characters_of_the_header_never_crash(place, character):
    data = bytearray(SHARD)
    data[8 + place] = character
    read(bytes(data))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(SHARD) - 1))
def test_truncated_shards_are_corrupt(length):
    with pytest.raises(CorruptFragment):
        read_shard(memoryview(SHARD[:length]))


@pytest.mark.parametrize("length", range(0, 9))
def test_a_few_bytes_are_no_shard(length):
    with pytest.raises(CorruptFragment):
        read_shard(memoryview(b"\xff" * length))


def with_header(text):
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text + DATA


def changed(name, **fields):
    return json.dumps(HEADER | {name: HEADER[name] | fields}).encode()


def without(name):
    return json.dumps({key: value for key, value in HEADER.items() if key != name}).encode()


def with_note(key, value):
    return changed("__metadata__", **{key: value})


SHARDED = {"shape": [4], "stride": [1], "placements": ["S(0)"], "mesh_shape": [1]}
BAD_HEADERS = {
    "no JSON": b"{" * 50,
    "deeply nested": b'{"a":' * 100_000,
    "deeply nested lists": b"[" * 100_000,
    "a list": b"[]",
    "a text": b'"x"',
    "not UTF-8": b'{"\xff": 1}',
    "an endless number": b'{"w": ' + b"9" * 5000 + b"}",
    "empty": b"{}",
    "a name twice": json.dumps(HEADER).encode().replace(b'"w"', b'"a"'),
    "no values": without(VALUES_NAME),
    "a hole": without("w"),
    "no metadata": without("__metadata__"),
    "metadata of numbers": with_note("n", 1),
    "a negative size": changed("w", shape=[-2, -3]),
    "a size that is a bool": changed("a", shape=[4, True]),
    "a size that is a float": changed("w", shape=[2.0, 3]),
    "a shape too large": changed("empty", shape=[0, 2**62, 2**62]),
    "more bytes than it has": changed("w", shape=[2, 4]),
    "an unknown dtype": changed("w", dtype="F33"),
    "a dtype that is a list": changed("w", dtype=["F32"]),
    "another dtype": changed("w", dtype="F64"),
    "three offsets": changed("w", data_offsets=[0, 1, 2]),
    "no offsets": changed("w", data_offsets=None),
    "one field too many": changed("w", more=1),
    "a field twice": json.dumps(HEADER).encode().replace(b'"shape"', b'"dtype"', 1),
    "pairs for an object": json.dumps(HEADER | {"w": list(HEADER["w"].items())}).encode(),
    "a shape that is an object": changed("w", shape={"2": 3}),
    "a nested object": changed("w", data_offsets={"a": 1, "b": 2}),
    "overlapping": changed("w", data_offsets=HEADER["a"]["data_offsets"], shape=[4]),
    "beyond the end": changed("w", data_offsets=[10**15, 10**15 + 24]),
    "beyond 64 bits": changed("w", data_offsets=[2**70, 2**70 + 24]),
    "values as numbers": changed(VALUES_NAME, dtype="I8"),
    "no format": with_note("ecckpt.format", "one"),
    "an empty format": with_note("ecckpt.format", ""),
    "an alias to nothing": with_note("ecckpt.aliases", '{"b.tied":"nothing"}'),
    "an alias of a tensor": with_note("ecckpt.aliases", '{"w":"a"}'),
    "an alias too few": with_note("ecckpt.aliases", "{}"),
    "an alias to a number": with_note("ecckpt.aliases", '{"b.tied":3}'),
    "aliases that are a list": with_note("ecckpt.aliases", "[]"),
    "a layout that is no order": with_note("ecckpt.layouts", '{"w":[0,0]}'),
    "a layout of another rank": with_note("ecckpt.layouts", '{"w":[0]}'),
    "a layout with a negative dimension": with_note("ecckpt.layouts", '{"w":[1,-1]}'),
    "a layout of nothing": with_note("ecckpt.layouts", '{"x":[1,0]}'),
    "a layout that is a text": with_note("ecckpt.layouts", '{"w":"10"}'),
    "an unknown dtype name": with_note("ecckpt.dtypes", '{"z":"complex999"}'),
    "a dtype of another size": with_note("ecckpt.dtypes", '{"z":"complex32"}'),
    "bytes of a float tensor": with_note("ecckpt.dtypes", '{"w":"complex128","z":"complex128"}'),
    "deeply nested notes": with_note("ecckpt.dtypes", "[" * 100_000),
    "a sharding without fields": with_note("ecckpt.sharding", '{"a":{}}'),
    "a sharding of nothing": with_note(
        "ecckpt.sharding", json.dumps({"x": SHARDED | {"coordinate": [0], "offset": [0]}})
    ),
    "a sharding of another rank": with_note(
        "ecckpt.sharding", json.dumps({"w": SHARDED | {"coordinate": [0], "offset": [0]}})
    ),
    "a sharding with a negative size": with_note(
        "ecckpt.sharding", json.dumps({"a": SHARDED | {"coordinate": [-1], "offset": None}})
    ),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_malformed_headers_are_corrupt(name):
    with pytest.raises(CorruptFragment):
        read_shard(memoryview(with_header(BAD_HEADERS[name])))


def test_the_header_may_be_spelled_otherwise():
    entries = HEADER | {"w": dict(reversed(HEADER["w"].items()))}
    text = json.dumps(dict(reversed(entries.items())), indent=1).encode()
    shard = read_shard(memoryview(with_header(text)))
    assert torch.equal(shard.tensors["w"], STATE["w"])
    assert torch.equal(shard.tensors["z"], STATE["z"])
    assert shard.tree()["step"] == 3


def test_what_is_wrong_is_named():
    for header, words in {
        "more bytes than it has": "'w' at bytes 48 to 72: its length differs",
        "a hole": "'ecckpt%values' at bytes 72 to [0-9]+: it does not begin where the one before",
        "an unknown dtype": "'w' has the unknown dtype 'F33'",
        "a size that is a bool": "'a' is not described as a tensor",
        "a negative size": "'w' has a negative size",
        "a shape too large": "'empty' has a shape that is too large",
    }.items():
        with pytest.raises(CorruptFragment, match=words):
            read_shard(memoryview(with_header(BAD_HEADERS[header])))


def test_bytes_of_wide_elements_are_aligned_to_them():
    text = json.dumps(
        {
            "__metadata__": HEADER["__metadata__"] | {"ecckpt.dtypes": '{"z":"complex128"}'},
            "b": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
            "z": {"dtype": "U8", "shape": [1, 16], "data_offsets": [8, 24]},
            VALUES_NAME: {
                "dtype": "U8",
                "shape": [len(DATA) - 24],
                "data_offsets": [24, len(DATA)],
            },
        }
    ).encode()
    with pytest.raises(CorruptFragment, match=r"'z' does not hold elements of torch\.complex128"):
        read_shard(memoryview(with_header(text)))


def test_a_header_of_another_length_is_corrupt():
    text = json.dumps(HEADER).encode()
    text += b" " * (-(8 + len(text)) % 64 + 8)
    with pytest.raises(CorruptFragment, match="misaligns"):
        read_shard(memoryview(struct.pack("<Q", len(text)) + text + DATA))
    for length in (2**63, 2**64 - 1, 100_000_001, len(SHARD)):
        with pytest.raises(CorruptFragment, match="a header of"):
            read_shard(memoryview(struct.pack("<Q", length) + SHARD[8:]))


def test_another_format_is_named():
    with pytest.raises(VersionMismatch, match="format version 2, this ecckpt knows 1"):
        read_shard(memoryview(with_header(with_note("ecckpt.format", "2"))))


def test_trailing_bytes_are_corrupt():
    with pytest.raises(CorruptFragment):
        read_shard(memoryview(SHARD + b"\0" * 64))
