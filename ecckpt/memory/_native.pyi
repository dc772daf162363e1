"""The native engines, built from ``native/``; missing if ecckpt was installed without a compiler.

All functions release the GIL while they work and trust their arguments: ``coding`` and
``memory.buffers`` check them. The caller owns all buffers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def engine_names() -> list[str]:
    """Return the names of the engines that this CPU can run, fastest first."""

def code(
    engine: str,
    coefficients: bytes,
    inputs: Sequence[NDArray[np.uint8]],
    coded_count: int,
    copies: Sequence[NDArray[np.uint8] | None],
    outputs: Sequence[NDArray[np.uint8]],
    block_bytes: int,
    input_checksums: NDArray[np.uint32] | None,
    output_checksums: NDArray[np.uint32] | None,
    threads: int,
) -> None:
    """Compute outputs, copies and checksums in one pass.

    Args:
        engine: one of ``engine_names()``.
        coefficients: matrix of shape (outputs, coded_count), one byte per element, row-major.
        inputs: arrays of equal length; the first ``coded_count`` are the columns of the matrix.
        coded_count: how many inputs are combined into outputs; the others are only checksummed.
        copies: empty, or one array (or None) for each input, which receives its bytes.
        outputs: arrays of the same length; overwritten.
        block_bytes: bytes that one checksum covers.
        input_checksums: shape (inputs, blocks), overwritten; None if no checksums are wanted.
        output_checksums: shape (outputs, blocks), overwritten; None if and only if the above is.
        threads: the largest number of threads to use.
    """

def copy_ranges(engine: str, ranges: NDArray[np.int64], threads: int) -> None:
    """Copy memory; a row is (source address, target address, length in bytes)."""

def checksum_spans(
    engine: str, spans: NDArray[np.int64], sums: NDArray[np.uint32], threads: int
) -> None:
    """Write the CRC32C of each span to ``sums``; a row is (address, length in bytes)."""
