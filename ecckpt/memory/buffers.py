"""Views of buffers as byte arrays, overlap checks, and copies at memory bandwidth.

``coding`` takes its inputs and outputs as views from here; ``state`` copies tensors into slots and
back with ``copy_many``.

Large copies bypass the caches (non-temporal stores). The C library's ``memcpy`` does so only for
calls above about 100 MiB. Below that size it reads each cache line of the target before it
overwrites it, so that a snapshot of many tensors would take 1.6 times as long as one copy of the
same number of bytes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecckpt.errors import InvalidBuffer, InvalidConfig
from ecckpt.memory.native import AUTO, HAVE_NATIVE, resolved

if HAVE_NATIVE:
    from ecckpt.memory import _native

Bytes = NDArray[np.uint8]

# Threads for a copy that blocks the training program. Four threads come close to the memory
# bandwidth of one socket; more of them would take CPUs from other ranks of the node.
COPY_THREADS = 4

# Any object with the buffer protocol: bytes, bytearray, memoryview, mmap, array, numpy array.
# Python has no type for the protocol before 3.12; `byte_view` checks it at run time.
Buffer = Any
WritableBuffer = Any

# -- views ----------------------------------------------------------------------------------------


def byte_view(buffer: Buffer, name: str, *, writable: bool = False) -> Bytes:
    """Return the memory of a buffer as a one-dimensional uint8 array, without copying it.

    Args:
        buffer: any contiguous object with the buffer protocol. The caller keeps ownership. The
            view keeps the object alive, and prevents a bytearray or mmap from being resized.
        name: the name of the buffer in error messages.
        writable: whether the caller is going to write to the view.

    Returns:
        An array of shape (bytes,), dtype uint8, over the same memory.

    Raises:
        InvalidBuffer: the object has no buffer protocol or is not C-contiguous, or it is read-only
            and ``writable`` is set.
    """
    try:
        view = np.frombuffer(buffer, np.uint8)
    except TypeError:
        raise InvalidBuffer(f"{name} is a {type(buffer).__name__}, not a buffer") from None
    except (ValueError, BufferError) as error:
        raise InvalidBuffer(f"{name} is not a contiguous range of bytes: {error}") from None
    if writable and not view.flags.writeable:
        raise InvalidBuffer(f"{name} ({view.size:,} bytes) is read-only but must be writable")
    return view


def address_of(view: Bytes) -> int:
    """Return the address of the first byte of a view; valid while the caller holds the view."""
    return int(view.__array_interface__["data"][0])


def check_disjoint(
    sources: Iterable[tuple[str, Bytes]], targets: Iterable[tuple[str, Bytes]]
) -> None:
    """Check that no target shares a byte with a source or with another target.

    Sources may overlap each other. Each argument is a sequence of (name, view); error messages use
    the names.

    Raises:
        InvalidBuffer: two of the views overlap.
    """
    ranges = [(address_of(view), view.size, False, name) for name, view in sources]
    ranges += [(address_of(view), view.size, True, name) for name, view in targets]
    # Sweep in order of addresses. For each range it is enough to compare with the one that reaches
    # furthest so far: (end, name) among all ranges, and among the targets only.
    furthest = furthest_target = (0, "")
    for start, length, is_target, name in sorted(ranges):
        if length == 0:
            continue
        end, other = furthest if is_target else furthest_target
        if start < end:
            raise InvalidBuffer(f"{name} and {other} overlap by {min(end - start, length):,} bytes")
        furthest = max(furthest, (start + length, name))
        if is_target:
            furthest_target = max(furthest_target, (start + length, name))


# -- copies ---------------------------------------------------------------------------------------


def copy_bytes(source: Buffer, target: WritableBuffer, *, threads: int = 1) -> None:
    """Copy one buffer into another of the same length; the GIL is released meanwhile.

    Args:
        source: any contiguous buffer. The caller owns it; it is only read.
        target: a writable contiguous buffer of the same number of bytes. The caller owns it; it is
            overwritten.
        threads: the largest number of threads to use, the calling thread included (at least 1).
            Small copies use fewer. The number never exceeds the number of CPUs.

    Raises:
        InvalidBuffer: a buffer is not contiguous, the target is read-only, the lengths differ, or
            the buffers overlap. Nothing was written.
        InvalidConfig: ``threads`` is less than 1.
    """
    source_view = byte_view(source, "source")
    target_view = byte_view(target, "target", writable=True)
    if source_view.size != target_view.size:
        raise InvalidBuffer(
            f"source has {source_view.size:,} bytes, target {target_view.size:,}: "
            "the lengths must be equal"
        )
    check_disjoint([("source", source_view)], [("target", target_view)])
    threads = usable_threads(threads)
    if not HAVE_NATIVE:
        target_view[:] = source_view
        return
    row = [address_of(source_view), address_of(target_view), source_view.size]
    _native.copy_ranges(copying_engine(), np.array([row], np.int64), threads)


def copy_many(ranges: NDArray[np.int64], *, threads: int = 1) -> None:
    """Copy many separate ranges of memory in one call; the GIL is released meanwhile.

    The addresses are not checked: a wrong one crashes the process or destroys data. The caller owns
    the memory at all of them and keeps it alive, at the same address, until the call returns. No
    target may overlap a source or another target.

    Args:
        ranges: int64 array of shape (N, 3), C-contiguous. A row is the source address, the target
            address and the length in bytes of one copy. N may be 0, and so may lengths.
        threads: the largest number of threads to use (at least 1). The threads share the bytes
            evenly, independent of how the bytes are spread over the rows. The number never exceeds
            the number of CPUs.

    Raises:
        InvalidBuffer: another shape or dtype, a negative length, or a null address in a range that
            is not empty. Nothing was written.
        InvalidConfig: ``threads`` is less than 1.
    """
    _check_ranges(ranges)
    threads = usable_threads(threads)
    if not HAVE_NATIVE:
        for source_address, target_address, length in ranges.tolist():
            ctypes.memmove(target_address, source_address, length)
        return
    _native.copy_ranges(copying_engine(), ranges, threads)


def copying_engine() -> str:
    """Return the native engine that copies memory and computes single checksums.

    It is the codec's engine of this process. Where that is zfec, which does neither, it is the best
    native one. Call it only if ``HAVE_NATIVE``.
    """
    name = resolved(AUTO)
    return name if name != "zfec" else _native.engine_names()[0]


def _check_ranges(ranges: NDArray[np.int64]) -> None:
    if ranges.dtype != np.int64 or ranges.ndim != 2 or ranges.shape[1] != 3:
        raise InvalidBuffer(
            f"ranges to copy must be int64 of shape (N, 3), not {ranges.dtype} of {ranges.shape}"
        )
    if not ranges.flags.c_contiguous:
        raise InvalidBuffer(f"ranges to copy, shape {ranges.shape}, are not C-contiguous")
    lengths = ranges[:, 2]
    wrong = (lengths < 0) | ((lengths > 0) & (ranges[:, :2] <= 0).any(axis=1))
    if wrong.any():
        row = int(wrong.argmax())
        source_address, target_address, length = ranges[row].tolist()
        raise InvalidBuffer(
            f"range {row} copies {length} bytes from {source_address:#x} to {target_address:#x}"
        )


def usable_threads(threads: int) -> int:
    """Return ``threads``, reduced to the number of CPUs that this process may run on.

    Raises:
        InvalidConfig: ``threads`` is less than 1.
    """
    if threads < 1:
        raise InvalidConfig(f"{threads} threads: at least 1 is needed")
    # The affinity mask, not os.cpu_count(): a container or `taskset` may allow fewer CPUs.
    return min(threads, len(os.sched_getaffinity(0)))
