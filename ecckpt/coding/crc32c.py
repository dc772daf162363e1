"""CRC32C (Castagnoli) of one small buffer, and of many separate ranges of memory.

File headers and messages use ``crc32c``; ``state/snapshot/replicas.py`` compares tensors across
ranks with ``checksum_many``. Checksums of fragments come from ``Codec``, in its pass over memory.
"""

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
    """Return the CRC32C of a small buffer; 0 if it is empty.

    It takes a few microseconds. ``Codec.encode`` computes the same checksum, but its argument
    checks cost more than the checksum of a small buffer.

    Args:
        data: any contiguous buffer. The caller owns it; it is only read.

    Raises:
        InvalidBuffer: the object is not a buffer, or is not contiguous.
    """
    view = byte_view(data, "the buffer to checksum")
    if not view.size:
        return 0
    if not HAVE_NATIVE:
        return int(Codec(1, 0).encode([view], [], view.size)[0, 0])
    sums, none = np.empty((1, 1), np.uint32), np.empty((0, 1), np.uint32)
    _native.code(copying_engine(), b"", [view], 1, [], [], view.size, sums, none, 1)
    return int(sums[0, 0])


def checksum_many(spans: NDArray[np.int64], *, threads: int = 1) -> NDArray[np.uint32]:
    """Return the CRC32C of each of many ranges of memory; the GIL is released meanwhile.

    The addresses are not checked: a wrong one crashes the process. The caller owns the memory at
    all of them and keeps it alive and unchanged until the call returns.

    Args:
        spans: int64 array of shape (N, 2), C-contiguous. A row is the address and the length in
            bytes of one range. N may be 0. A length may be 0; its checksum is 0.
        threads: the largest number of threads to use (at least 1). The threads share the bytes
            evenly, independent of how the bytes are spread over the rows. The number never exceeds
            the number of CPUs.

    Returns:
        uint32 array of shape (N,); the caller owns it.

    Raises:
        InvalidBuffer: another shape or dtype, a negative length, or a null address in a range that
            is not empty.
        InvalidConfig: ``threads`` is less than 1.
    """
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 2:
        raise InvalidBuffer(
            f"ranges to check must be int64 of shape (N, 2), not {spans.dtype} of {spans.shape}"
        )
    addresses, lengths = spans.T
    if not spans.flags.c_contiguous or ((lengths < 0) | ((lengths > 0) & (addresses <= 0))).any():
        raise InvalidBuffer(
            f"ranges to check, shape {spans.shape}: not C-contiguous, a negative length, or a null "
            "address"
        )
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
