"""Control messages: what is sent arrives, and nothing else is taken for a message."""

import os
import pickle
import typing
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.errors import InvalidMessage
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation, RunWriter, ShardId
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.encoding import (
    MESSAGE_LIMIT_BYTES,
    pack_message,
    run_of,
    unpack_message,
    version_of,
)
from ecckpt.protocol.messages.node import Done, NodeInfo, Refusal
from ecckpt.protocol.messages.restore import Fence, Fetched
from ecckpt.protocol.messages.save import Commit, Held, Hold, Progress, Protect, Reserve
from tests.support.builders import generations, header, headers, message_classes

SCALARS = {
    bool: st.booleans(),
    int: st.integers(-(1 << 63), (1 << 64) - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    Generation: generations,
    RunWriter: generations.map(lambda each: each.writer),
    Header: headers(),
    Headers: st.lists(headers(), max_size=3).map(Headers.from_headers),
}
# A value of the wrong type for each annotation; composed ones are told apart by what they hold.
WRONG = {
    bool: [0, 1, None, "true", []],
    int: [True, 1.0, None, "1", b"1", []],
    float: [True, None, "1.0", [], float("nan"), float("inf")],
    str: [1, None, b"x", ["x"]],
    bytes: [1, None, "x", [1]],
    Generation: [1, None, "x", "1.2.3", {}],
    RunWriter: [1, None, "x", "1.2", "-1.", {}],
    Header: [1, None, "x", [], {}, {"run": "x"}],
}
NESTED = [5, True, 1.5, "x", b"x", [5.5], {"x": None}, {1: []}]


def values(hint):
    """A strategy for what may stand where a field is annotated like that."""
    if hint in SCALARS:
        return SCALARS[hint]
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return st.lists(values(inner[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is Mapping:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    if isinstance(hint, UnionType):
        return st.none() | values(inner[0])
    return messages(hint)


def messages(kind):
    if kind in SCALARS:  # by itself as well
        return SCALARS[kind]
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values(hint) for name, hint in hints.items()})


def plain(message):
    return msgpack.unpackb(pack_message(message))


KINDS = message_classes()
KINDS += [ShardId, RollBack, Inventory, Headers]
FIELDS = [(kind, field.name) for kind in KINDS for field in fields(kind)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
every_field = pytest.mark.parametrize(
    ("kind", "name"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name in FIELDS]
)


def test_all_messages_are_here():
    assert {Reserve, Fetched, Done, Refusal, ShardId, Inventory} <= set(KINDS)


# -- round trip -----------------------------------------------------------------------------------


@every_kind
def test_a_message_arrives_as_it_was_sent(kind):
    @settings(max_examples=15)
    @given(messages(kind))
    def arrives(message):
        again = unpack_message(kind, pack_message(message))
        assert again == message
        assert pack_message(again) == pack_message(message)

    arrives()


def test_a_whole_number_will_do_for_a_float():
    body = msgpack.packb(EXAMPLES[Progress] | {"encode_s": 2})
    found = unpack_message(Progress, body).encode_s
    assert (found, type(found)) == (2.0, float)


# -- fields ---------------------------------------------------------------------------------------


def example(kind):
    """One message of the kind as a plain map, the same every time."""
    found = []

    @settings(max_examples=1)
    @given(messages(kind))
    def take(message):
        found.append(plain(message))

    take()
    return found[0]


EXAMPLES = {kind: example(kind) for kind in KINDS}


@every_field
def test_a_missing_field_is_refused_by_name(kind, name):
    body = {key: value for key, value in EXAMPLES[kind].items() if key != name}
    with pytest.raises(InvalidMessage, match=f"{kind.__name__}: missing or unknown fields: {name}"):
        unpack_message(kind, msgpack.packb(body))


@every_field
def test_a_field_of_the_wrong_type_is_refused_by_name(kind, name):
    hint = typing.get_type_hints(kind)[name]
    for value in WRONG.get(hint, NESTED):
        with pytest.raises(
            InvalidMessage, match=rf"{kind.__name__}\.{name}|is no (generation|writer)"
        ):
            unpack_message(kind, msgpack.packb(EXAMPLES[kind] | {name: value}))


@every_kind
@pytest.mark.parametrize("name", ["extra", "__class__", "", 7, None, b"x", 1.5])
def test_an_unknown_field_is_refused(kind, name):
    with pytest.raises(InvalidMessage, match="missing or unknown fields"):
        unpack_message(kind, msgpack.packb(EXAMPLES[kind] | {name: 1}))


@every_kind
@pytest.mark.parametrize("value", [None, True, 1, 1.5, "x", b"x", [], ["x"], msgpack.Timestamp(0)])
def test_what_is_no_map_is_refused(kind, value):
    with pytest.raises(InvalidMessage, match=kind.__name__):
        unpack_message(kind, msgpack.packb(value))


def test_numbers_of_a_header_are_checked_in_messages_too():
    body = EXAMPLES[Hold]
    body = body | {"header": body["header"] | {"k": 300}}
    with pytest.raises(InvalidMessage, match=r"Hold\.header: header contradicts itself: k=300"):
        unpack_message(Hold, msgpack.packb(body))


# -- headers in columns ----------------------------------------------------------------------------


def columns(*files, **changed):
    """Packed ``Headers`` of these files, and what they are once something is changed in that."""
    body = plain(Headers.from_headers(files))
    return msgpack.packb(body | changed)


def packed(**changed):
    return msgpack.packb(header().to_wire() | changed)


def test_files_of_a_shard_share_what_they_have_in_common():
    bodies = [columns(header(HOME), header(2, rank=1)), columns(header(3), header(0, rank=2))]
    first, second = (unpack_message(Headers, body) for body in bodies)
    assert [each.index for each in (*first, *second)] == [HOME, 2, 3, 0]
    assert first.shards[0] is second.shards[0]
    assert list(second) == [header(3), header(0, rank=2)]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"indices": [0, 1]}, "1 shards, 2 indices"),
        ({"indices": []}, "1 shards, 0 indices"),
        ({"indices": [5]}, "indices: no such fragment"),
        ({"indices": [-2]}, "indices: no such fragment"),
        ({"indices": [True]}, "indices: bool where int belongs"),
        ({"shards": [header().to_wire()]}, "shards: dict where bytes belongs"),
        ({"shards": [packed(index=0)]}, "shards: header with index 0 where -1 belongs"),
        ({"shards": [packed(k=300)]}, "shards: one of them: .* contradicts itself: k=300"),
        ({"shards": [packed(rank=8)]}, "shards: one of them: .* contradicts itself: rank 8 of 8"),
        ({"shards": [packed(generation="1")]}, "shards: one of them: .* is no generation"),
        ({"shards": [packed(parent=7)]}, "shards: one of them: .* cannot be read"),
        ({"shards": [packed(world_size="8")]}, "shards: one of them: .*world_size is str"),
        ({"shards": [packed()[:-1]]}, "shards: header is not msgpack"),
        ({"shards": [packed() + b"\0"]}, "shards: header is not msgpack"),
        ({"shards": [b""]}, "shards: header is not msgpack"),
        ({"shards": [b"\x91" * 4000 + b"\xc0"]}, "shards: header is not msgpack"),
        ({"shards": [packed(more="x" * SUPERBLOCK_BYTES)]}, "shards: header of 4... bytes"),
    ],
)
def test_columns_that_are_no_headers_are_refused(changed, why):
    for _ in range(2):  # nothing of the first time is kept
        with pytest.raises(InvalidMessage, match=rf"Headers[:.] ?{why}"):
            unpack_message(Headers, columns(header(3), **changed))


def test_a_packed_header_may_have_further_fields_too():
    body = columns(header(3), shards=[packed(later="x" * 3000)])
    assert unpack_message(Headers, body) == Headers.from_headers([header(3)])


# -- what is read without the type -----------------------------------------------------------------


def test_the_version_is_found_in_a_message_of_any_version():
    assert version_of(msgpack.packb(EXAMPLES[NodeInfo] | {"protocol_version": 3})) == 3
    assert version_of(msgpack.packb({"protocol_version": 99, "other": [1]})) == 99


@pytest.mark.parametrize(
    "value",
    [None, 5, "x", [], [1], {}, {"protocol_version": None}, {"protocol_version": "new"}]
    + [{"protocol_version": float(odd)} for odd in ("nan", "inf")],
)
def test_a_message_without_a_version_is_refused(value):
    with pytest.raises(InvalidMessage, match="no protocol version"):
        version_of(msgpack.packb(value))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"<html>"]
)
def test_bytes_without_a_version_are_refused(body):
    with pytest.raises(InvalidMessage, match="no protocol version"):
        version_of(body)


@pytest.mark.parametrize("kind", [Reserve, Protect, Held, Commit, Fence])
def test_every_request_says_which_run_it_is_about(kind):
    body = EXAMPLES[kind]
    inner = body.get("header") or body.get("shard") or body
    assert run_of(unpack_message(kind, msgpack.packb(body))) == inner["run"]


# -- garbage --------------------------------------------------------------------------------------

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def refused(kind, body):
    """Whether it is; what is no garbage by chance must survive another round trip."""
    try:
        message = unpack_message(kind, body)
    except InvalidMessage:
        return True
    return unpack_message(kind, pack_message(message)) == message


@settings(max_examples=300)
@given(st.sampled_from(KINDS), st.binary(max_size=100))
def test_random_bytes_are_refused(kind, body):
    assert refused(kind, body)


@settings(max_examples=200)
@given(st.sampled_from(KINDS), anything)
def test_other_msgpack_is_refused(kind, value):
    assert refused(kind, msgpack.packb(value))


@settings(max_examples=200)
@given(st.sampled_from(FIELDS), anything)
def test_other_msgpack_in_a_field_is_refused(field, value):
    kind, name = field
    assert refused(kind, msgpack.packb(EXAMPLES[kind] | {name: value}))


@settings(max_examples=200)
@given(st.sampled_from(KINDS), st.data())
def test_truncated_messages_are_refused(kind, data):
    body = msgpack.packb(EXAMPLES[kind])
    with pytest.raises(InvalidMessage):
        unpack_message(kind, body[: data.draw(st.integers(0, len(body) - 1))])


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa1x" * 100_000 + b"\xc0",
        b"\x81" * 50_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x81\x90\x01",
        b"\x81\x80\x01",
        b"\xa2\xff\xfe",
        b"\xc1",
        b"\x80\x80",
        msgpack.packb({"x" * 1_000_000: 1}),
        msgpack.packb({"é" * 5000: 1}),
    ],
)
def test_bytes_made_to_hurt_are_refused(body):
    for kind in (Commit, Done, Inventory):
        with pytest.raises(InvalidMessage) as caught:
            unpack_message(kind, body)
        assert len(str(caught.value)) < 1000


def test_a_message_beyond_the_limit_is_not_even_read():
    with pytest.raises(InvalidMessage, match="67108865 bytes, limit 67108864"):
        unpack_message(Done, bytes(MESSAGE_LIMIT_BYTES + 1))


def test_nothing_is_ever_unpickled(tmp_path):
    trace = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(trace),)

    bomb = pickle.dumps(Trap())
    whole = [bomb, msgpack.packb(bomb), msgpack.packb(msgpack.ExtType(5, bomb))]
    bodies = [(kind, body) for kind in KINDS for body in whole]
    for kind, name in FIELDS:
        values = (bomb, [bomb], msgpack.ExtType(0, bomb), msgpack.ExtType(42, bomb))
        bodies += [(kind, msgpack.packb(EXAMPLES[kind] | {name: value})) for value in values]
    for kind, body in bodies:
        assert refused(kind, body)
    assert not trace.exists()
