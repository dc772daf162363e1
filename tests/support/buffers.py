"""Buffers that show who touched them, and what the oracle makes of their content."""

import ctypes
import hashlib
import mmap
import sys
import threading
import time

import numpy as np

from ecckpt.coding import gf256


def noise(length, seed=1):
    """Return deterministic bytes that do not depend on the version of any library."""
    stream = hashlib.shake_128(f"ecckpt {seed}".encode()).digest(length)
    return np.frombuffer(stream, np.uint8)


def parts(k, length, seed=1):
    return list(noise(k * length, seed).reshape(k, length))


def empty(count, length, offset=0):
    """Return writable buffers that start `offset` bytes after a multiple of 64, between marks."""
    made = []
    for _ in range(count):
        room = np.full(length + offset + 192, 0xAA, np.uint8)
        start = -room.ctypes.data % 64 + 64 + offset
        made.append(room[start : start + length])
    return made


def marks_intact(view):
    room = view.base
    start = view.ctypes.data - room.ctypes.data
    return bool((room[:start] == 0xAA).all() and (room[start + view.size :] == 0xAA).all())


def oracle_table(fragments, block_bytes):
    rows = [
        [gf256.crc32c(bytes(f[at : at + block_bytes])) for at in range(0, len(f), block_bytes)]
        for f in fragments
    ]
    return np.array(rows, np.uint32)


def guarded(count, length, *, at_end):
    """Return buffers that touch a page which nobody may read or write."""
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page, room = mmap.PAGESIZE, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    buffers = []
    for _ in range(count):
        memory = np.frombuffer(mmap.mmap(-1, room + 2 * page), np.uint8)
        for guard in (0, page + room):
            assert protect(memory.ctypes.data + guard, page, 0) == 0
        start = page + room - length if at_end else page
        buffers.append(memory[start : start + length])
    return buffers


def runs_meanwhile(target, work):
    """Whether another thread sees the target half-written while `work` fills it with ones."""
    seen, done = threading.Event(), threading.Event()

    def watch():
        while not done.is_set():
            if target[0] and not target[-1]:
                seen.set()
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=watch)
    sys.setswitchinterval(60)  # from here on a thread gets the GIL only when another drops it
    try:
        thread.start()
        deadline = time.monotonic() + 20
        while not seen.is_set() and time.monotonic() < deadline:
            target[:] = 0
            work()
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    return seen.is_set()
