"""The native engines; absent when ecckpt was installed without a compiler."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def engine_names() -> list[str]:
    """Return the engines this CPU can run, best first."""

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
    """Make outputs (outputs x coded_count coefficients), copies, and the CRC32C of each block.

    Copies are none at all, or one (or None) for each input. The tables are both None, or have a row
    for each input and output.
    """

def copy_ranges(engine: str, ranges: NDArray[np.int64], threads: int) -> None:
    """Copy (source address, target address, length) rows."""

def checksum_spans(
    engine: str, spans: NDArray[np.int64], sums: NDArray[np.uint32], threads: int
) -> None:
    """Put the CRC32C of each (address, length) row into sums."""
