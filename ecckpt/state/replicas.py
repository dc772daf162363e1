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
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ecckpt.checksums import checksum_many
from ecckpt.errors import InvalidConfig
from ecckpt.state.paths import Path, describe
from ecckpt.state.sharding import Sharding

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

    def sharding(self, tensor: torch.Tensor) -> Sharding | None:
        """A named tensor as all ranks have it; None for one that cannot be cut into shares."""
        shape = tuple(tensor.shape)
        if self.ranks == 1 or not shape or 0 in shape:
            return None
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return Sharding(
            shape=shape,
            stride=stride,
            placements=("R",),
            mesh_shape=(self.ranks,),
            coordinate=(self.rank,),
            offset=(0,) * len(shape),
            plain=True,
        )


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


def checksums(tensors: Sequence[torch.Tensor], *, threads: int) -> NDArray[np.uint32]:
    """The CRC32C of the elements of each, in C order, wherever and however they lie."""
    sums = np.zeros(len(tensors), np.uint32)
    spans = np.zeros((len(tensors), 2), np.int64)
    for at, tensor in enumerate(tensors):
        if is_raw(tensor):
            spans[at] = tensor.data_ptr(), tensor.nbytes
    sums[:] = checksum_many(spans, threads=threads)
    for at in np.flatnonzero(spans[:, 0] == 0).tolist():
        # One after another: a copy of each is all that is needed at a time.
        plain = tensors[at].detach().cpu().resolve_conj().resolve_neg().contiguous()
        span = np.array([[plain.data_ptr(), plain.nbytes]], np.int64)
        sums[at] = checksum_many(span, threads=threads)[0]
    return sums


def is_raw(local: torch.Tensor) -> bool:
    """Whether the bytes in memory, from the address on, are those of the elements in C order."""
    return local.is_cpu and local.is_contiguous() and not (local.is_neg() or local.is_conj())
