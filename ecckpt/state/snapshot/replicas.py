"""Plain tensors that the user declares equal on all ranks: stored once, and checked at each save.

In a data-parallel run without DTensors (DDP) all ranks have the same parameters and optimizer
moments, but nothing in a plain tensor says so; the user names them (``replicated=``). ``plan.py``
divides each into shares, one per rank, like a replicated DTensor. A false declaration would lose
data, so each rank computes the checksums of the whole tensors (``Claim``), and
``client/save/replica_check.py`` compares them across ranks before the generation is committed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ecckpt.coding.crc32c import checksum_many
from ecckpt.errors import InvalidConfig
from ecckpt.state.paths import Path, describe
from ecckpt.state.tensors.sharding import Sharding

_NAMED = 5  # an error names at most so many tensors


@dataclass(frozen=True, slots=True)
class Replicas:
    """The declaration of tensors that are equal on all ranks.

    Attributes:
        patterns: a pattern matches a path and everything below it; ``*`` matches any text, dots
            included. A pattern that begins with ``!`` excludes. The last pattern that matches a
            path decides.
        rank: this rank.
        ranks: number of all ranks.
    """

    patterns: tuple[str, ...]
    rank: int
    ranks: int

    def check(self, state: dict[Any, Any]) -> None:
        """Raise ``InvalidConfig`` for a pattern whose first key is not in this state."""
        keys = [describe((key,)) for key in state]
        for pattern in self.patterns:
            first = pattern.removeprefix("!").split(".")[0]
            if "*" not in first and not any(f"{key}.".startswith(f"{first}.") for key in keys):
                raise InvalidConfig(
                    f"replicated={pattern!r} names nothing in a state of {', '.join(keys)[:200]}"
                )

    def covers(self, path: Path) -> bool:
        """Return whether the tensor at ``path`` is declared equal on all ranks."""
        name, covered = describe(path), False
        for pattern in self.patterns:
            bare = pattern.removeprefix("!")
            if fnmatchcase(name, bare) or fnmatchcase(name, f"{bare}.*"):
                covered = bare == pattern
        return covered

    def share(self, shape: torch.Size) -> ReplicaShare | None:
        """Return this rank's share of a declared tensor; None for one that cannot be divided.

        Scalars and empty tensors cannot; then each rank stores its own.
        """
        return _share(shape, self.rank, self.ranks)


class ReplicaShare(NamedTuple):
    """One rank's share of a tensor."""

    sharding: Sharding
    shape: torch.Size  # of the share
    start: int | None  # index of its first element in C order; None if the share is not contiguous


@lru_cache(maxsize=1 << 14)  # a model has many tensors, but few distinct shapes
def _share(shape: torch.Size, rank: int, ranks: int) -> ReplicaShare | None:
    if ranks == 1 or not shape or 0 in shape:
        return None
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    whole = Sharding(
        shape=tuple(shape),
        stride=stride,
        placements=("R",),
        mesh_shape=(ranks,),
        coordinate=(rank,),
        offset=None,
        plain=True,
    )
    held = whole.share(tuple(shape))
    assert held is not None, "there are several ranks, and the tensor is not empty"
    dim, start, length = held
    sizes, offset = list(shape), [0] * len(shape)
    sizes[dim], offset[dim] = length, start
    is_range = math.prod(shape[:dim]) == 1  # rows of the outermost dimension that is not 1
    sharding = replace(whole, held=held, offset=tuple(offset))
    return ReplicaShare(sharding, torch.Size(sizes), start * stride[dim] if is_range else None)


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """The whole tensors behind one rank's shares: names, a digest of their forms, checksums."""

    names: tuple[str, ...]
    form: bytes  # 16 bytes, see `form_of`
    sums: NDArray[np.uint32]  # CRC32C of each tensor, in the order of the names

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal on two ranks if their claims are."""
        return hashlib.sha256(self.form + self.sums.tobytes()).digest()[:16]

    def pack(self) -> bytes:
        """Return the claim as bytes: the form, then the checksums in native byte order.

        Another rank passes them to ``differences``.
        """
        return self.form + self.sums.tobytes()

    def differences(self, packed: bytes) -> str:
        """Describe where another rank's claim, as ``pack`` made it, differs from this one."""
        form, sums = packed[: len(self.form)], packed[len(self.form) :]
        if form != self.form or len(sums) != self.sums.nbytes:
            return (
                f"{len(self.names)} replicated tensors here and {len(sums) // 4} there, or other "
                "names, shapes or dtypes"
            )
        wrong = np.flatnonzero(self.sums != np.frombuffer(sums, np.uint32)).tolist()
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        return ", ".join(self.names[at] for at in wrong[:_NAMED]) + more


def form_of(described: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return 16 bytes that are equal for equal names, dtypes and shapes."""
    text = repr([(name, str(dtype), tuple(shape)) for name, dtype, shape in described])
    return hashlib.sha256(text.encode()).digest()[:16]


def checksums(
    tensors: Sequence[tuple[torch.Tensor, int]], sizes: NDArray[np.int64], *, threads: int
) -> NDArray[np.uint32]:
    """Return the CRC32C of the elements of each tensor, in C order, on any device.

    Args:
        tensors: (tensor, address). The address is where its elements lie in C order in CPU memory,
            or 0 for any other device or layout: such a tensor is copied.
        sizes: length of each tensor in bytes.
        threads: the largest number of threads to use.
    """
    addresses = np.fromiter((address for _, address in tensors), np.int64, len(tensors))
    sums = checksum_many(np.column_stack((addresses, sizes * (addresses > 0))), threads=threads)
    for at in np.flatnonzero(addresses == 0).tolist():
        # One at a time, so that only one copy of a tensor exists.
        plain = tensors[at][0].detach().cpu().resolve_conj().resolve_neg().contiguous()
        span = np.array([[plain.data_ptr(), plain.nbytes]], np.int64)
        sums[at] = checksum_many(span, threads=threads)[0]
    return sums
