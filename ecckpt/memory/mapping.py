"""Files in memory, mapped so that huge pages can be used, and given huge pages where possible.

A tmpfs hands out small pages unless it was mounted otherwise. Making 1 GiB of them takes half a
second, mapping it 100 ms in every process that does it, and coding loses up to a quarter of its
speed to the translation of addresses. Linux can gather the pages of a file into huge ones
(MADV_COLLAPSE, 6.1), whatever the mount says, and where most of them are not there yet it has
nothing to copy. A mapping profits if its address is a multiple of a huge page.
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

_PIECE_BYTES = 16 * HUGE_PAGE_BYTES  # what one thread makes at a time

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

# The mappings by address, and what has to end before one of them does.
_mappings: dict[int, Callable[[], bool] | None] = {}


def map_file(descriptor: int, size_bytes: int, *, private: bool = False) -> memoryview:
    """The first ``size_bytes`` of an open file, writable and shared; unmapped with the last view.

    The file must be as long: touching what lies beyond its end would end the process. Its address
    is a multiple of a huge page. What is written to a ``private`` mapping stays in this process; a
    page that was not written to yet shows what others write to the file. Raises ``OSError``,
    ``NotMapped`` where it is for want of memory.
    """
    # Room for the alignment is taken first and the file mapped into it: nobody else gets between.
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
    weakref.finalize(array, _unmap, address, size_bytes).atexit = False
    return memoryview(array).cast("B")


def mapping_of(view: memoryview) -> tuple[int, int] | None:
    """Address and bytes of the mapping that ``view`` shows a part of; None of other memory."""
    memory = view.obj
    if not isinstance(memory, ctypes.Array):
        return None
    address = ctypes.addressof(memory)
    return (address, ctypes.sizeof(memory)) if address in _mappings else None


def before_unmapping(address: int, end: Callable[[], bool]) -> None:
    """Have ``end()`` called once, before the mapping at ``address`` goes; if false it never goes.

    It is called in whichever thread lets go of the last view, and not at the end of the process.
    """
    _mappings[address] = end


def lazy_bytes(size_bytes: int) -> mmap.mmap:
    """Zeros that take memory only where they are written (or read); ``NotMapped``."""
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise not_mapped("a private copy", size_bytes) from error


def not_mapped(what: str, size_bytes: int) -> NotMapped:
    """The error for memory that this process cannot have, with its limit."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    return NotMapped(what, need_bytes=size_bytes, limit_bytes=limit_bytes)


def fault_in(view: memoryview) -> None:
    """Have all pages of a mapping at hand, so that no later access has to wait for one.

    Raises ``OSError`` where that is impossible; before Linux 5.14 it always is.
    """
    _advise(view, _MADV_POPULATE_WRITE)


def make_huge(view: memoryview) -> bool:
    """Gather the pages of a mapping of ``map_file`` into huge ones; whether that worked.

    Safe while others use the file. Takes 2 ms per MiB if the pages are there, a tenth of that for
    ``begin_huge``, next to nothing once done.
    """
    try:
        _advise(view, _MADV_COLLAPSE)
    except OSError:
        return False
    return True


def begin_huge(descriptor: int, view: memoryview) -> bool:
    """Make an empty file out of huge pages, mapped as ``view``; whether that worked.

    Threads share what is large: the kernel has to clear every page. Where it did not work, and at
    the end if that is no multiple of a huge page, pages are still missing. Raises ``OSError`` if
    there is no room.
    """

    def begin(piece: range) -> bool:
        for start in piece:
            os.pwrite(descriptor, b"\0", start)  # the kernel gathers only where there is something
        return make_huge(view[piece.start : piece.stop])

    whole = range(0, len(view) - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)
    each = _PIECE_BYTES // HUGE_PAGE_BYTES
    pieces = [whole[at : at + each] for at in range(0, len(whole), each)]
    threads = min(len(pieces), usable_threads(COPY_THREADS))
    if threads > 1 and not address_space_is_limited():
        no_thread = contextlib.suppress(RuntimeError)
        with no_thread, ThreadPoolExecutor(threads, thread_name_prefix="clear") as pool:
            return all(list(pool.map(begin, pieces)))
    return bool(pieces) and all(begin(piece) for piece in pieces)


def address_space_is_limited() -> bool:
    """Whether a thread may find no memory for its first step: Python would wait for it for ever."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _map(address: int | None, size_bytes: int, protection: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, size_bytes, protection, flags, file, 0)
    if found == _FAILED:
        error = ctypes.get_errno()
        if error == errno.ENOMEM:
            raise not_mapped("a file in memory", size_bytes)
        raise OSError(error, f"cannot map {size_bytes:,} bytes")
    return int(found)


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
