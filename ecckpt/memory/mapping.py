"""Memory mappings of tmpfs files, aligned for huge pages, and conversion of files to huge pages.

The agent (``agent/storage/regions.py``) allocates regions with it, the client
(``client/slot_mappings.py``) maps the slots that it saves into, and ``state/tensors/devices.py``
registers those mappings with CUDA.

A tmpfs allocates small pages (4 KiB) unless its mount options say otherwise. 1 GiB of small pages
takes half a second to allocate and 100 ms to map in each process, and TLB misses cost coding up to
a quarter of its speed. Linux 6.1 and later can collapse the pages of a file into huge pages
(MADV_COLLAPSE, see madvise(2)), independent of the mount options. The kernel copies the pages that
exist already, so it is cheapest on a file that is still nearly empty. A process maps a huge page as
one only at an address that is a multiple of the huge page size.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ecckpt.errors import NotMapped
from ecckpt.memory.buffers import COPY_THREADS, usable_threads

HUGE_PAGE_BYTES = 2 << 20

# The unit of work of one thread in `begin_huge`: large enough that a system call costs nothing in
# comparison, small enough that the threads finish at about the same time.
_PIECE_BYTES = 16 * HUGE_PAGE_BYTES

# From <linux/mman.h> (x86-64 and aarch64); Python's mmap module does not have them.
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# The live mappings of this process by address, each with the function to call before it is unmapped
# (see `before_unmapping`).
_mappings: dict[int, Callable[[], bool] | None] = {}


def map_file(descriptor: int, size_bytes: int, *, private: bool = False) -> memoryview:
    """Map the first ``size_bytes`` of an open file, writable, at a multiple of the huge page size.

    The mapping belongs to the returned view and to all views and arrays derived from it. It is
    unmapped when the last of them is garbage. The descriptor may be closed right after the call.

    Args:
        descriptor: a file open for reading and writing, at least ``size_bytes`` long. An access
            beyond the end of the file kills the process with SIGBUS.
        size_bytes: length of the mapping, at least 1.
        private: writes stay in this process (copy on write). A page that this process has not
            written yet still shows what other processes write to the file.

    Raises:
        NotMapped: the process may not have that much memory.
        OSError: mmap(2) failed for another reason.
    """
    # Reserve address space with room for the alignment, then map the file over the aligned part
    # (MAP_FIXED). Another thread cannot take the range in between, because it stays reserved.
    room_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + HUGE_PAGE_BYTES
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = _map(None, room_bytes, 0, nothing, -1)
    address = -(-room // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        _map(address, size_bytes, both, kind | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(room, room_bytes)
        raise
    _give_back(room, address)
    _give_back(address + -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, room + room_bytes)
    array = (ctypes.c_ubyte * size_bytes).from_address(address)
    _mappings[address] = None
    # Not at exit: the kernel unmaps everything then, and views may still be in use by threads.
    weakref.finalize(array, _unmap, address, size_bytes).atexit = False
    return memoryview(array).cast("B")


def mapping_of(view: memoryview) -> tuple[int, int] | None:
    """Return (address, bytes) of the whole ``map_file`` mapping behind a view; None without one."""
    memory = view.obj
    if not isinstance(memory, ctypes.Array):
        return None
    address = ctypes.addressof(memory)
    return (address, ctypes.sizeof(memory)) if address in _mappings else None


def before_unmapping(address: int, end: Callable[[], bool]) -> None:
    """Register ``end`` to be called once, before the mapping at ``address`` is unmapped.

    If ``end()`` returns False, the mapping stays for the life of the process: CUDA, for instance,
    may still write to it. ``end`` runs in the thread that drops the last view, and does not run at
    process exit. A second registration replaces the first.
    """
    _mappings[address] = end


def lazy_bytes(size_bytes: int) -> mmap.mmap:
    """Map ``size_bytes`` of private zeros; the kernel allocates each page at its first access.

    The caller owns the mapping. Raises ``NotMapped`` if the process may not have that much memory.
    """
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise not_mapped("a private copy", size_bytes) from error


def not_mapped(what: str, size_bytes: int) -> NotMapped:
    """Make the error for memory that the system refuses, with this process's RLIMIT_AS in it."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    return NotMapped(what, need_bytes=size_bytes, limit_bytes=limit_bytes)


def fault_in(view: memoryview) -> None:
    """Allocate and map all pages of a mapping now, so that no later access takes a page fault.

    Raises ``OSError`` if the kernel cannot do it; before Linux 5.14 it always raises.
    """
    _advise(view, _MADV_POPULATE_WRITE)


def make_huge(view: memoryview) -> bool:
    """Collapse the pages of a ``map_file`` mapping into huge pages; return whether it worked.

    Other processes may use the file meanwhile. It takes 2 ms per MiB where small pages exist and
    have to be copied, a tenth of that on the nearly empty file of ``begin_huge``, and microseconds
    where the pages are huge already.
    """
    try:
        _advise(view, _MADV_COLLAPSE)
    except OSError:
        return False
    return True


def begin_huge(descriptor: int, view: memoryview) -> bool:
    """Allocate huge pages for an empty file that is mapped as ``view``; return whether it worked.

    Up to ``COPY_THREADS`` threads share the work, because the kernel has to clear every page. The
    caller allocates the rest with ``fault_in``: all small pages if this returns False, and the end
    of a file whose length is not a multiple of the huge page size. Raises ``OSError`` if the tmpfs
    has no room.
    """

    def allocate_piece(piece: range) -> bool:
        for start in piece:
            # MADV_COLLAPSE skips a huge page range in which no small page exists yet.
            os.pwrite(descriptor, b"\0", start)
        return make_huge(view[piece.start : piece.stop])

    page_starts = range(0, len(view) - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)
    pages_per_piece = _PIECE_BYTES // HUGE_PAGE_BYTES
    pieces = [
        page_starts[at : at + pages_per_piece] for at in range(0, len(page_starts), pages_per_piece)
    ]
    threads = min(len(pieces), usable_threads(COPY_THREADS))
    if threads > 1 and not address_space_is_limited():
        # A RuntimeError means that no thread could be started: the calling thread does it all.
        no_thread = contextlib.suppress(RuntimeError)
        with no_thread, ThreadPoolExecutor(threads, thread_name_prefix="clear") as pool:
            return all(list(pool.map(allocate_piece, pieces)))
    return bool(pieces) and all(allocate_piece(piece) for piece in pieces)


def address_space_is_limited() -> bool:
    """Return whether RLIMIT_AS limits this process; then start no threads.

    A new thread that cannot allocate memory in its first step dies before it tells Python that it
    has started, and ``Thread.start`` would wait for it for ever.
    """
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _map(address: int | None, size_bytes: int, protection: int, flags: int, file: int) -> int:
    mapped_at = _libc.mmap(address, size_bytes, protection, flags, file, 0)
    if mapped_at == _FAILED:
        error = ctypes.get_errno()
        if error == errno.ENOMEM:
            raise not_mapped("a file in memory", size_bytes)
        raise OSError(error, f"cannot map {size_bytes:,} bytes")
    return int(mapped_at)


def _unmap(address: int, size_bytes: int) -> None:
    end = _mappings.pop(address)
    if end is None or end():
        _libc.munmap(address, size_bytes)


def _give_back(begin: int, end: int) -> None:
    if end > begin:
        _libc.munmap(begin, end - begin)


def _advise(view: memoryview, advice: int) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if _libc.madvise(address, len(view), advice):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
