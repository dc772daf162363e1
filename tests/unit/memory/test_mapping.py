"""Mapping files of tmpfs: alignment, life time, faults, huge pages."""

import ctypes
import errno
import gc
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from ecckpt.memory import mapping
from ecckpt.memory.mapping import (
    HUGE_PAGE_BYTES,
    before_unmapping,
    begin_huge,
    fault_in,
    make_huge,
    map_file,
    mapping_of,
)
from tests.support.media import SIZE, mapped_here, tmpfs_file


def huge_kib():
    """How much of this process's shared memory is mapped by huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped"))


def test_what_is_written_to_a_private_mapping_stays_in_it():
    with tmpfs_file() as descriptor:
        shared, private = map_file(descriptor, SIZE), map_file(descriptor, SIZE, private=True)
        private[:3] = b"own"
        assert os.pread(descriptor, 3, 0) == bytes(3)
        shared[:3] = b"all"
        assert bytes(private[:3]) == b"own"
        assert mapping_of(private)[0] % HUGE_PAGE_BYTES == 0
        part = private[-3:]
        del shared, private
        gc.collect()
        assert mapped_here()
        del part
        assert not mapped_here()


def test_shared_and_unmapped_with_the_last_view():
    with tmpfs_file() as descriptor:
        one, other = map_file(descriptor, SIZE), map_file(descriptor, SIZE)
        one[-3:] = b"end"
        part = other[-3:]
        assert bytes(part) == b"end"
        assert os.pread(descriptor, 3, SIZE - 3) == b"end"
        del one, other
        gc.collect()
        assert mapped_here()
        assert bytes(part) == b"end"
        del part
        gc.collect()
        assert not mapped_here()


@pytest.mark.parametrize("may_go", [True, False])
def test_what_has_to_end_before_a_mapping_does(may_go):
    seen = []

    def end():
        seen.append(mapped_here())
        return may_go

    with tmpfs_file() as descriptor:
        view = map_file(descriptor, SIZE)
        address, size = mapping_of(view[4096:].cast("B")[:10])
        assert size == SIZE
        before_unmapping(address, end)
        del view
        gc.collect()
        assert seen == [True]
        assert mapped_here() != may_go
        assert address not in mapping._mappings
        if not may_go:
            mapping._libc.munmap(address, SIZE)


def test_other_memory_is_no_mapping():
    assert mapping_of(memoryview(bytearray(10))) is None
    assert mapping_of(memoryview((ctypes.c_ubyte * 10)())) is None
    assert mapping_of(memoryview(mmap.mmap(-1, 4096))) is None


def test_a_file_that_cannot_be_mapped():
    descriptor = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        before = Path("/proc/self/maps").read_text().count("\n")
        with pytest.raises(OSError, match="cannot map"):
            map_file(descriptor, SIZE)
        assert Path("/proc/self/maps").read_text().count("\n") <= before + 1
    finally:
        os.close(descriptor)


def test_faulting_in():
    with tmpfs_file() as descriptor:
        view = map_file(descriptor, SIZE)
        fault_in(view[: mmap.PAGESIZE * 4])
        fault_in(view)
        view[:] = bytes(SIZE)


def test_huge_pages_keep_the_bytes():
    content = os.urandom(1 << 16) * (SIZE >> 16)
    with tmpfs_file() as descriptor:
        view = map_file(descriptor, SIZE)
        view[: len(content)] = content
        if not make_huge(view):
            pytest.skip("this kernel makes no huge pages of tmpfs files (MADV_COLLAPSE, Linux 6.1)")
        assert view[: len(content)] == content
        assert huge_kib() >= 3 * HUGE_PAGE_BYTES // 1024
        again = map_file(descriptor, SIZE)
        fault_in(again)
        assert again[: len(content)] == content
        assert huge_kib() >= 6 * HUGE_PAGE_BYTES // 1024  # a new mapping profits at once
        assert make_huge(again)


def test_a_page_that_a_device_may_write_to_is_not_moved():
    """A page in a pipe is held as a registered one is: by a reference that the kernel respects."""
    with tmpfs_file() as descriptor:
        view = map_file(descriptor, SIZE)
        view[:] = os.urandom(1 << 16) * (SIZE >> 16) + bytes(SIZE & 0xFFFF)
        reading, writing = os.pipe()
        try:
            address, _ = mapping_of(view)
            span = (ctypes.c_size_t * 2)(address + 8 * mmap.PAGESIZE, mmap.PAGESIZE)
            if mapping._libc.vmsplice(writing, span, 1, 0) != mmap.PAGESIZE:
                pytest.skip("no vmsplice")
            if not make_huge(view[HUGE_PAGE_BYTES : 2 * HUGE_PAGE_BYTES]):
                pytest.skip("this kernel makes no huge pages of tmpfs files")
            assert not make_huge(view[:HUGE_PAGE_BYTES])
            view[8 * mmap.PAGESIZE :][:4] = b"here"
            assert os.read(reading, 4) == b"here"  # still the file's own page
        finally:
            os.close(reading)
            os.close(writing)
        assert make_huge(view[:HUGE_PAGE_BYTES])


def test_an_empty_file_begins_on_huge_pages():
    with tmpfs_file(reserve=False) as descriptor:
        view = map_file(descriptor, SIZE)
        if not begin_huge(descriptor, view):
            pytest.skip("this kernel makes no huge pages of tmpfs files (MADV_COLLAPSE, Linux 6.1)")
        there = 512 * os.fstat(descriptor).st_blocks
        assert there == 3 * HUGE_PAGE_BYTES  # the tail is the caller's
        os.posix_fallocate(descriptor, 0, SIZE)
        fault_in(view)
        assert huge_kib() >= 3 * HUGE_PAGE_BYTES // 1024
        assert not any(view)


@pytest.mark.parametrize("hindered", ["", "no thread can start", "limited"])
def test_a_large_file_is_made_by_several_threads(monkeypatch, hindered):
    seen = set()

    def clear(view):
        seen.add(threading.current_thread().name)
        return make_huge(view)

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(mapping, "make_huge", clear)
    monkeypatch.setattr(mapping, "usable_threads", lambda threads: threads)
    monkeypatch.setattr(mapping, "address_space_is_limited", lambda: hindered == "limited")
    if hindered == "no thread can start":
        monkeypatch.setattr(threading.Thread, "start", start)
    size = 5 * mapping._PIECE_BYTES // 2 + 4096
    with tmpfs_file(reserve=False, size=size) as descriptor:
        view = map_file(descriptor, size)
        if not begin_huge(descriptor, view):
            pytest.skip("this kernel makes no huge pages of tmpfs files (MADV_COLLAPSE, Linux 6.1)")
        assert 512 * os.fstat(descriptor).st_blocks == size - 4096
        os.posix_fallocate(descriptor, 0, size)
        fault_in(view)
        assert not np.frombuffer(view, np.uint8).any()
    assert all((name == "MainThread") == bool(hindered) for name in seen)


def test_a_full_tmpfs_is_an_error_of_whichever_thread_meets_it(monkeypatch):
    monkeypatch.setattr(mapping, "usable_threads", lambda threads: threads)

    def write(descriptor, data, start):
        if start >= mapping._PIECE_BYTES:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", write)
    size = 3 * mapping._PIECE_BYTES
    full = pytest.raises(OSError, match="full")
    with tmpfs_file(reserve=False, size=size) as descriptor, full:
        begin_huge(descriptor, map_file(descriptor, size))


def test_memory_that_cannot_be_huge():
    view = memoryview(bytearray(3 * mmap.PAGESIZE))
    assert not make_huge(view[1 : mmap.PAGESIZE])
