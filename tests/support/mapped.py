"""A file in tmpfs, to be mapped."""

import mmap
import os
from contextlib import contextmanager
from pathlib import Path

from ecckpt.memory.mapping import HUGE_PAGE_BYTES

SIZE = 3 * HUGE_PAGE_BYTES + 5 * mmap.PAGESIZE


@contextmanager
def tmpfs_file(size=SIZE, *, reserve=True):
    """An open file in tmpfs, all of it there, or nothing."""
    path = Path("/dev/shm") / f"ecckpt-test-mapping-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, size)
        if reserve:
            os.posix_fallocate(descriptor, 0, size)
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink()


def mapped_here():
    return f"ecckpt-test-mapping-{os.getpid()}" in Path("/proc/self/maps").read_text()
