"""Raw memory: views of buffers as bytes, and copies as fast as memory allows.

Large copies bypass the caches (non-temporal stores). A plain ``memcpy`` does so only above a size
of about 100 MiB per call: below it, each cache line is first read and then overwritten, so that a
snapshot of many tensors would take 1.6 times as long as one copy of the same bytes.
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

# For copies that a training program waits for, with nothing else to do meanwhile: about as many
# threads as it takes to use all of a socket's memory bandwidth.
COPY_THREADS = 4

# Anything with the buffer protocol: bytes, bytearray, memoryview, mmap, array, numpy array. The
# protocol has no type of its own before Python 3.12; `byte_view` checks it.
Buffer = Any
WritableBuffer = Any

# -- views ----------------------------------------------------------------------------------------


def byte_view(buffer: Buffer, name: str, *, writable: bool = False) -> Bytes:
    """Return the memory of a buffer as a one-dimensional uint8 array; nothing is copied.

    Args:
        buffer: any contiguous object with the buffer protocol; it stays owned by the caller, and
            is kept alive (a bytearray or mmap: kept from being resized) by the view.
        name: how an error calls the buffer.
        writable: whether the view will be written.

    Raises:
        InvalidBuffer: not a buffer, not C-contiguous, or read-only although ``writable``.
    """
    try:
        view = np.frombuffer(buffer, np.uint8)
    except TypeError:
        raise InvalidBuffer(f"{name} is a {type(buffer).__name__}, which is no buffer") from None
    except (ValueError, BufferError) as error:
        raise InvalidBuffer(f"{name} is no contiguous range of bytes: {error}") from None
    if writable and not view.flags.writeable:
        raise InvalidBuffer(f"{name} ({view.size:,} bytes) is read-only, but would be written")
    return view


def address_of(view: Bytes) -> int:
    """Return the address of the first byte of a view."""
    return int(view.__array_interface__["data"][0])


def check_disjoint(
    sources: Iterable[tuple[str, Bytes]], targets: Iterable[tuple[str, Bytes]]
) -> None:
    """Raise InvalidBuffer if a target shares a byte with a source or with another target.

    Sources may overlap each other. Each view comes with the name that the error gives it.
    """
    ranges = [(address_of(view), view.size, False, name) for name, view in sources]
    ranges += [(address_of(view), view.size, True, name) for name, view in targets]
    # The range reaching furthest so far, among all and among the targets; its end and its name.
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
    """Copy a buffer into another one of the same length, without the GIL.

    Args:
        source: any contiguous buffer; owned by the caller, only read.
        target: a writable contiguous buffer of the same number of bytes; owned by the caller,
            overwritten.
        threads: how many threads may share the work (at least 1), this one included. Small copies
            use fewer, and there are never more than CPUs.

    Raises:
        InvalidBuffer: not contiguous, read-only target, different lengths, or overlap. Nothing was
            written.
        InvalidConfig: ``threads`` is less than 1.
    """
    source_view = byte_view(source, "source")
    target_view = byte_view(target, "target", writable=True)
    if source_view.size != target_view.size:
        raise InvalidBuffer(
            f"source has {source_view.size:,} bytes, target {target_view.size:,}: they must agree"
        )
    check_disjoint([("source", source_view)], [("target", target_view)])
    threads = usable_threads(threads)
    if not HAVE_NATIVE:
        target_view[:] = source_view
        return
    row = [address_of(source_view), address_of(target_view), source_view.size]
    _native.copy_ranges(copying_engine(), np.array([row], np.int64), threads)


def copy_many(ranges: NDArray[np.int64], *, threads: int = 1) -> None:
    """Copy many separate ranges of memory in one call, without the GIL.

    The addresses are trusted: a wrong one ends the process or destroys data. The caller owns all
    memory behind them and keeps it alive and unmoved until the call returns; no target may overlap
    a source or another target.

    Args:
        ranges: int64 array of shape (N, 3), C-contiguous: source address, target address and
            length in bytes of each copy. N may be 0, lengths may be 0.
        threads: how many threads may share the bytes (at least 1), however they are spread over
            the rows; never more than there are CPUs.

    Raises:
        InvalidBuffer: another shape or type, a negative length, or a null address of a range that
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
    """Return the native engine for work beside coding: the codec's, unless that is zfec."""
    name = resolved(AUTO)
    return name if name != "zfec" else _native.engine_names()[0]


def _check_ranges(ranges: NDArray[np.int64]) -> None:
    if ranges.dtype != np.int64 or ranges.ndim != 2 or ranges.shape[1] != 3:
        raise InvalidBuffer(
            f"ranges to copy are int64 of shape (N, 3), not {ranges.dtype} of {ranges.shape}"
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
    """Return how many threads to run when so many are allowed: no more than there are CPUs.

    Raises:
        InvalidConfig: ``threads`` is less than 1.
    """
    if threads < 1:
        raise InvalidConfig(f"{threads} threads: at least 1 is needed")
    return min(threads, len(os.sched_getaffinity(0)))
