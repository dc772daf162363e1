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
    outputs: Sequence[NDArray[np.uint8]],
    block_bytes: int,
    input_checksums: NDArray[np.uint32],
    output_checksums: NDArray[np.uint32],
) -> None:
    """Make outputs (outputs x inputs coefficients) and the CRC32C of each block of each array."""

def copy_ranges(ranges: NDArray[np.int64], threads: int) -> None:
    """Copy (source address, target address, length) rows."""
