"""Plain tensors that the caller says are the same on all ranks: stored once, and held to it.

The ranks of a data-parallel run without DTensors (DDP) have the same parameters and moments, and
nothing in a plain tensor says so. What is named is cut into equal shares like a replicated DTensor,
and each rank takes the checksums of all that it did not store as well: whether they agree is found
out before the generation is committed.
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

_NAMED = 5


@dataclass(frozen=True, slots=True)
class Replicas:
    """Which tensors are the same on all of so many ranks, and which rank this is.

    A pattern names a path and everything below it; ``*`` in it stands for any text, dots included.
    One that begins with ``!`` takes out again; the last one that fits decides.
    """

    patterns: tuple[str, ...]
    rank: int
    ranks: int

    def check(self, state: dict[Any, Any]) -> None:
        """Raise ``InvalidConfig`` for a pattern that can fit nothing in this state."""
        keys = [describe((key,)) for key in state]
        for pattern in self.patterns:
            first = pattern.removeprefix("!").split(".")[0]
            if "*" not in first and not any(f"{key}.".startswith(f"{first}.") for key in keys):
                raise InvalidConfig(
                    f"replicated={pattern!r} names nothing in a state of {', '.join(keys)[:200]}"
                )

    def covers(self, path: Path) -> bool:
        """Whether what is at ``path`` was named."""
        name, covered = describe(path), False
        for pattern in self.patterns:
            bare = pattern.removeprefix("!")
            if fnmatchcase(name, bare) or fnmatchcase(name, f"{bare}.*"):
                covered = bare == pattern
        return covered

    def share(self, shape: torch.Size) -> ReplicaShare | None:
        """This rank's share of a tensor that was named; None for one that cannot be cut."""
        return _share(shape, self.rank, self.ranks)


class ReplicaShare(NamedTuple):
    """A share of a tensor, and its own shape.

    ``start`` is the first of its elements in C order; None if others lie between them.
    """

    sharding: Sharding
    shape: torch.Size
    start: int | None


@lru_cache(maxsize=1 << 14)  # a model has many tensors, but of few shapes
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
    assert held is not None, "there are other ranks, and something to share"
    dim, start, length = held
    sizes, offset = list(shape), [0] * len(shape)
    sizes[dim], offset[dim] = length, start
    is_range = math.prod(shape[:dim]) == 1
    sharding = replace(whole, held=held, offset=tuple(offset))
    return ReplicaShare(sharding, torch.Size(sizes), start * stride[dim] if is_range else None)


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """What one rank says that all have: tensors by name and form, and the CRC32C of each."""

    names: tuple[str, ...]
    form: bytes
    sums: NDArray[np.uint32]

    @property
    def digest(self) -> bytes:
        """Equal for two ranks if their claims are."""
        return hashlib.sha256(self.form + self.sums.tobytes()).digest()[:16]

    def pack(self) -> bytes:
        """What ``differences`` needs of another rank's claim."""
        return self.form + self.sums.tobytes()

    def differences(self, packed: bytes) -> str:
        """In words, where another rank's claim is not this one."""
        form, sums = packed[: len(self.form)], packed[len(self.form) :]
        if form != self.form or len(sums) != self.sums.nbytes:
            return (
                f"{len(self.names)} replicated tensors here and {len(sums) // 4} there, or of "
                "other names, shapes or dtypes"
            )
        wrong = np.flatnonzero(self.sums != np.frombuffer(sums, np.uint32)).tolist()
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        return ", ".join(self.names[at] for at in wrong[:_NAMED]) + more


def form_of(described: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Equal for equal names, dtypes and shapes."""
    text = repr([(name, str(dtype), tuple(shape)) for name, dtype, shape in described])
    return hashlib.sha256(text.encode()).digest()[:16]


def checksums(
    tensors: Sequence[tuple[torch.Tensor, int]], sizes: NDArray[np.int64], *, threads: int
) -> NDArray[np.uint32]:
    """The CRC32C of the elements of each tensor, in C order, wherever and however they lie.

    Tensors come with the address at which so many bytes of them are, or 0 if it is not as simple.
    """
    addresses = np.fromiter((address for _, address in tensors), np.int64, len(tensors))
    sums = checksum_many(np.column_stack((addresses, sizes * (addresses > 0))), threads=threads)
    for at in np.flatnonzero(addresses == 0).tolist():
        # One after another: a copy of each is all that is needed at a time.
        plain = tensors[at][0].detach().cpu().resolve_conj().resolve_neg().contiguous()
        span = np.array([[plain.data_ptr(), plain.nbytes]], np.int64)
        sums[at] = checksum_many(span, threads=threads)[0]
    return sums
