"""What one pass may do besides: copy its inputs, skip the checksums, share the work by threads."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.coding import gf256
from ecckpt.coding.reed_solomon import Codec, engines
from ecckpt.errors import InvalidBuffer, InvalidConfig
from tests.support.buffers import empty, guarded, marks_intact, oracle_table, parts

every_engine = pytest.mark.parametrize("engine", engines())


@pytest.fixture
def many_cpus(monkeypatch):
    """Threads are not held back by this machine's number of CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))


# -- copies ---------------------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 300, 1000, (1 << 19) + 7])
def test_encode_copies_its_data(engine, length):
    coder = Codec(5, 2, engine=engine)
    for offset in (0, 1, 37):
        data, parity = parts(5, length), empty(2, length, offset)
        copies = empty(5, length, offset)
        table = coder.encode(data, parity, 4096, copies=copies)
        assert all(bytes(c) == bytes(d) for c, d in zip(copies, data, strict=True))
        assert all(map(marks_intact, (*copies, *parity)))
        plain = empty(2, length)
        assert np.array_equal(coder.encode(data, plain, 4096), table)
        assert [bytes(p) for p in plain] == [bytes(p) for p in parity]


@every_engine
@pytest.mark.parametrize("lost", [(), (1,), (0, 4), (3, 6)])
def test_restore_is_rebuilding_and_copying(engine, lost):
    coder = Codec(5, 3, engine=engine)
    data, parity = parts(5, 3000), empty(3, 3000)
    table = coder.encode(data, parity, 1000)
    fragments = {i: f for i, f in enumerate([*data, *parity]) if i not in lost}
    place = empty(5, 3000)
    missing = {i: place[i] for i in range(5) if i not in fragments}
    copies = {i: place[i] for i in range(5) if i in fragments}
    restored = coder.rebuild(fragments, missing, 1000, copies=copies)
    assert [bytes(view) for view in place] == [bytes(view) for view in data]
    known = [i for i in range(8) if i < 5 or i in fragments]
    assert np.array_equal(restored[known], table[known])
    assert all(map(marks_intact, place))


@every_engine
@pytest.mark.parametrize("at_end", [True, False])
def test_copies_stay_inside_their_buffers(engine, at_end):
    coder = Codec(3, 2, engine=engine)
    for length in (1, 63, 65, 127, 200, 5000, 1 << 19):
        buffers = guarded(8, length, at_end=at_end)
        for view, content in zip(buffers, parts(3, length), strict=False):
            view[:] = content
        coder.encode(buffers[:3], buffers[3:5], 4096, copies=buffers[5:])
        assert all(bytes(c) == bytes(d) for c, d in zip(buffers[5:], buffers[:3], strict=True))


@every_engine
def test_wrong_copies(engine):
    coder = Codec(2, 1, engine=engine)
    data, parity, copy = [bytes(9)] * 2, bytearray(9), bytearray(b"\xaa" * 9)
    refusals = {
        r"1 parity buffers and 1 copies": [copy],
        r"the copy of fragment 1 has 8 bytes": [copy, bytearray(8)],
        r"the copy of fragment 0 .* is read-only": [bytes(9), copy],
        r"the copy of fragment 1 and fragment 2 overlap|fragment 2 and the copy": [copy, parity],
        r"the copy of fragment \d and the copy of fragment \d overlap": [copy, copy],
    }
    for message, copies in refusals.items():
        with pytest.raises(InvalidBuffer, match=message):
            coder.encode(data, [parity], 4, copies=copies)
    with pytest.raises(InvalidBuffer, match=r"fragments \[2\] have a copy buffer but are not"):
        coder.rebuild({0: data[0], 1: data[1]}, {}, 4, copies={2: copy})
    assert copy == b"\xaa" * 9


# -- without checksums ----------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("m", [0, 1, 4, 9])
@pytest.mark.parametrize("copied", [False, True])
def test_no_checksums(engine, m, copied):
    coder = Codec(4, m, engine=engine)
    for length in (0, 100, 1000, 1 << 17):
        data, parity = parts(4, length), empty(m, length)
        copies = empty(4, length) if copied else []
        table = coder.encode(data, parity, 64, copies=copies, checksums=False)
        assert table.shape == (4 + m, 0)
        expected = empty(m, length)
        coder.encode(data, expected, 4096)
        assert [bytes(p) for p in parity] == [bytes(p) for p in expected]
        assert all(bytes(c) == bytes(d) for c, d in zip(copies, data, strict=False))


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("many_cpus")
@every_engine
@pytest.mark.parametrize("block_bytes", [4096, 100_000, 1 << 30])
def test_any_number_of_threads_gives_the_same(engine, block_bytes):
    coder = Codec(8, 3, engine=engine)
    length = (1 << 20) + 832
    data, parity = parts(8, length), empty(3, length)
    table = coder.encode(data, parity, block_bytes)
    for threads in (2, 3, 7):
        shared, copies = empty(3, length, offset=threads % 2), empty(8, length)
        again = coder.encode(data, shared, block_bytes, copies=copies, threads=threads)
        assert np.array_equal(table, again)
        assert [bytes(p) for p in shared] == [bytes(p) for p in parity]
        assert [bytes(c) for c in copies] == [bytes(d) for d in data]
        missing = dict(enumerate(empty(3, length)))
        present = {i: f for i, f in enumerate([*data, *parity]) if i not in missing}
        rebuilt = coder.rebuild(present, missing, block_bytes, threads=threads)
        assert np.array_equal(table, rebuilt)
        assert coder.verify(present | missing, table, block_bytes, threads=threads) == []


@settings(max_examples=30, deadline=None)
@given(
    threads=st.integers(2, 9),
    length=st.integers(1 << 19, 1 << 20),
    block_bytes=st.integers(1 << 10, 1 << 20),
)
def test_checksums_of_blocks_that_threads_share(threads, length, block_bytes):
    (data,) = parts(1, length)
    alone = Codec(1, 3).encode([data], empty(3, length), block_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: range(64))
        shared = Codec(1, 3).encode([data], empty(3, length), block_bytes, threads=threads)
    assert np.array_equal(alone, shared)


def test_no_more_threads_than_cpus(monkeypatch):
    seen = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    coder = Codec(2, 1)
    monkeypatch.setattr(coder._engine, "execute", lambda work: seen.append(work.threads))
    for threads in (1, 2, 100):
        coder.encode([bytes(9)] * 2, [bytearray(9)], 4, threads=threads)
    assert seen == [1, 2, 2]


@every_engine
@pytest.mark.parametrize("threads", [0, -1])
def test_wrong_threads(engine, threads):
    coder = Codec(1, 1, engine=engine)
    with pytest.raises(InvalidConfig, match=f"{threads} threads"):
        coder.encode([bytes(9)], [bytearray(9)], 4, threads=threads)
    with pytest.raises(InvalidConfig, match=f"{threads} threads"):
        coder.verify({}, np.zeros((2, 0), np.uint32), 4, threads=threads)


# -- many streams ---------------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("k", [16, 17, 20, 24, 31, 33, 64])
@pytest.mark.parametrize("m", [4, 5, 8, 13])
def test_many_streams(engine, k, m):
    coder = Codec(k, m, engine=engine)
    for length in (511, 512, 1155):
        data, parity, copies = parts(k, length), empty(m, length), empty(k, length)
        table = coder.encode(data, parity, 600, copies=copies)
        assert [bytes(p) for p in parity] == gf256.encode(k, m, [bytes(d) for d in data])
        assert np.array_equal(table[k:], oracle_table(parity, 600))
        assert [bytes(c) for c in copies] == [bytes(d) for d in data]


@every_engine
def test_more_present_than_needed(engine):
    # Fragments beyond the k that are coded are checksummed in the same pass, however many.
    coder = Codec(20, 12, engine=engine)
    data, parity = parts(20, 1155), empty(12, 1155)
    table = coder.encode(data, parity, 600)
    fragments = dict(enumerate([*data, *parity]))
    for lost in ([7], [0, 30], list(range(0, 18, 2))):
        missing = dict(zip(lost, empty(len(lost), 1155), strict=True))
        present = {i: f for i, f in fragments.items() if i not in missing}
        assert np.array_equal(coder.rebuild(present, missing, 600), table)
        assert all(bytes(missing[i]) == bytes(fragments[i]) for i in lost)
