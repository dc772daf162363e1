"""CRC32C of one small buffer, and of many separate ranges of memory."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import InvalidBuffer
from ecckpt.memory.buffers import Buffer, byte_view, copying_engine, usable_threads
from ecckpt.memory.native import HAVE_NATIVE

if HAVE_NATIVE:
    from ecckpt.memory import _native


def crc32c(data: Buffer) -> int:
    """The CRC32C of a small contiguous buffer of the caller's, in a few microseconds; 0 if empty.

    A codec's pass would do the same, but checks and prepares for more than one buffer.

    Raises:
        InvalidBuffer: not a buffer, or not contiguous.
    """
    view = byte_view(data, "what is to be checked")
    if not view.size:
        return 0
    if not HAVE_NATIVE:
        return int(Codec(1, 0).encode([view], [], view.size)[0, 0])
    sums, none = np.empty((1, 1), np.uint32), np.empty((0, 1), np.uint32)
    _native.code(copying_engine(), b"", [view], 1, [], [], view.size, sums, none, 1)
    return int(sums[0, 0])


def checksum_many(spans: NDArray[np.int64], *, threads: int = 1) -> NDArray[np.uint32]:
    """The CRC32C of each of many ranges of memory, in one call and without the GIL.

    The addresses are trusted: a wrong one ends the process. The caller owns the memory behind them
    and keeps it alive and unchanged until the call returns.

    Args:
        spans: int64 array of shape (N, 2), C-contiguous: address and length in bytes of each range.
            N may be 0, lengths may be 0 (and have the checksum 0).
        threads: how many threads may share the bytes (at least 1), however they are spread over
            the rows; never more than there are CPUs.

    Raises:
        InvalidBuffer: another shape or type, a negative length, or a null address of a range that
            is not empty.
        InvalidConfig: ``threads`` is less than 1.
    """
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 2:
        raise InvalidBuffer(
            f"ranges to check are int64 of shape (N, 2), not {spans.dtype} of {spans.shape}"
        )
    addresses, lengths = spans.T
    if not spans.flags.c_contiguous or ((lengths < 0) | ((lengths > 0) & (addresses <= 0))).any():
        raise InvalidBuffer(f"ranges to check, shape {spans.shape}: not contiguous, or no ranges")
    sums = np.zeros(len(spans), np.uint32)
    threads = usable_threads(threads)
    if HAVE_NATIVE:
        _native.checksum_spans(copying_engine(), spans, sums, threads)
        return sums
    codec = Codec(1, 0)
    for row, (address, length) in enumerate(spans.tolist()):
        if length:
            view = (ctypes.c_uint8 * length).from_address(address)
            sums[row] = codec.encode([view], [], length)[0, 0]
    return sums
