"""Copies of every size and alignment, with the native module and without it."""

import mmap
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecckpt.errors import InvalidBuffer, InvalidConfig
from ecckpt.memory import buffers as copying
from ecckpt.memory.buffers import address_of, byte_view, copy_bytes, copy_many
from tests.support.buffers import guarded, runs_meanwhile

LARGE = (4 << 20) + 12_345  # past the caches from 4 MiB on


@pytest.fixture(params=[True, False], ids=["native", "fallback"])
def native(request, monkeypatch):
    if request.param and not copying.HAVE_NATIVE:
        pytest.skip("no native module")
    monkeypatch.setattr(copying, "HAVE_NATIVE", request.param)
    return request.param


def noise(length, seed=1):
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8)


def ranges_of(pairs):
    rows = [(address_of(source), address_of(target), source.size) for source, target in pairs]
    return np.array(rows, np.int64).reshape(-1, 3)


# -- one range ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000, 4096, 100_000, LARGE])
@pytest.mark.parametrize("threads", [1, 3])
def test_copy_bytes(native, length, threads):
    source, room = noise(length), np.full(length + 80, 0xAA, np.uint8)
    for offset in (0, 1, 37):
        target = room[offset : offset + length]
        copy_bytes(source, target, threads=threads)
        assert np.array_equal(source, target)
        assert (room[offset + length :] == 0xAA).all()
        room[:] = 0xAA


def test_copy_bytes_of_other_buffers(native):
    target = mmap.mmap(-1, 4096)
    copy_bytes(b"x" * 4096, target)
    assert target[:] == b"x" * 4096
    matrix = np.zeros((32, 16), np.float64)
    copy_bytes(memoryview(target), matrix)
    assert matrix.tobytes() == b"x" * 4096


def test_nothing_outside_the_buffers_is_touched():
    room = 5 << 20
    source, target = guarded(2, room, at_end=False)
    source[:] = noise(room)
    for cut in (0, 1, 63, 64, 200):
        for piece in (slice(cut, None), slice(0, room - cut)):
            target[:] = 0
            copy_bytes(source[piece], target[piece])
            assert np.array_equal(source[piece], target[piece])


@pytest.mark.skipif(not copying.HAVE_NATIVE, reason="no native module")
def test_other_threads_run_meanwhile():
    source, target = np.ones(32 << 20, np.uint8), np.empty(32 << 20, np.uint8)
    assert runs_meanwhile(target, lambda: copy_bytes(source, target))
    ranges = ranges_of([(source, target)])
    assert runs_meanwhile(target, lambda: copy_many(ranges))


# -- many ranges ----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [700, 20_000])
def test_copy_many(native, threads, size):
    source, target = noise(LARGE), np.zeros(LARGE, np.uint8)
    cuts = [0, 0, *range(1, LARGE, size), LARGE]
    pieces = [slice(start, end) for start, end in pairwise(cuts)]
    pieces.reverse()
    copy_many(ranges_of([(source[p], target[p]) for p in pieces]), threads=threads)
    assert np.array_equal(source, target)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 130)), max_size=30))
def test_copy_many_leaves_gaps_alone(sizes):
    # Gaps between the targets, and sources from anywhere: they may be shared.
    source = noise(400_000)
    target = np.zeros(sum(length + gap for length, gap in sizes) + 1, np.uint8)
    expected, pairs, at = target.copy(), [], 0
    for length, gap in sizes:
        at += gap
        piece = source[gap : gap + length]
        pairs.append((piece, target[at : at + length]))
        expected[at : at + length] = piece
        at += length
    copy_many(ranges_of(pairs), threads=2)
    assert np.array_equal(target, expected)


def test_copy_many_of_nothing(native):
    copy_many(np.empty((0, 3), np.int64))
    copy_many(np.zeros((4, 3), np.int64), threads=4)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"abc", bytearray(2), "source has 3 bytes, target 2"),
        (b"abc", b"xyz", r"target \(3 bytes\) is read-only"),
        ("abc", bytearray(3), "source is a str"),
        (b"abc", np.zeros(6, np.uint8)[::2], "target is not a contiguous"),
        (b"abc", None, "target is a NoneType"),
    ],
)
def test_wrong_buffers(native, source, target, message):
    with pytest.raises(InvalidBuffer, match=message):
        copy_bytes(source, target)


def test_overlap(native):
    memory = np.arange(100, dtype=np.uint8)
    for source, target in ((memory[:60], memory[40:]), (memory, memory)):
        with pytest.raises(InvalidBuffer, match="overlap by"):
            copy_bytes(source, target)
    assert np.array_equal(memory, np.arange(100))
    copy_bytes(memory[:50], memory[50:])


@pytest.mark.parametrize("threads", [0, -1])
def test_wrong_threads(native, threads):
    target = bytearray(1)
    with pytest.raises(InvalidConfig, match=f"{threads} threads"):
        copy_bytes(b"x", target, threads=threads)
    with pytest.raises(InvalidConfig, match=f"{threads} threads"):
        copy_many(np.empty((0, 3), np.int64), threads=threads)
    assert target == b"\0"


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (np.zeros((2, 3), np.int32), r"not int32 of \(2, 3\)"),
        (np.zeros((3, 2), np.int64), r"not int64 of \(3, 2\)"),
        (np.zeros(3, np.int64), r"not int64 of \(3,\)"),
        (np.zeros((2, 6), np.int64)[:, ::2], "are not C-contiguous"),
        (np.array([[1, 1, 0], [1, 1, -5]]), "range 1 copies -5 bytes"),
        (np.array([[0, 1, 7]]), "range 0 copies 7 bytes from 0x0 to 0x1"),
        (np.array([[1, -1, 7]]), "range 0 copies 7 bytes from 0x1 to -0x1"),
    ],
)
def test_wrong_ranges(native, ranges, message):
    with pytest.raises(InvalidBuffer, match=message):
        copy_many(ranges)


def test_views_share_memory():
    buffer = bytearray(b"abc")
    view = byte_view(buffer, "it", writable=True)
    view[0] = ord("x")
    assert buffer == b"xbc"
    assert byte_view(b"", "it").size == 0
