"""``Sharding``: the place of a rank's local tensor in a global one; DTensors to it and back.

A shard stores it in its metadata (docs/FORMAT.md). ``snapshot`` makes it from DTensors, ``load``
compares the saved with the live one, and ``reshard`` computes which shards hold which elements.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ecckpt.state.tensors.boxes import Cut, cut_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A rank's part of a global tensor.

    Attributes:
        shape: of the global tensor.
        stride: of the global tensor, in elements.
        placements: one per mesh dimension: ``R`` (replicated), ``S(dim)`` (sharded) or
            ``S(dim, split)`` (strided shard). Empty for a box that belongs to no mesh (``box_of``).
        mesh_shape: ranks per mesh dimension; empty for a box that belongs to no mesh.
        coordinate: of the rank in the mesh; None for a rank outside the mesh, which has no part.
        offset: where the part begins in the global tensor, in elements per dimension. None if the
            part is not a single box, or the rank is outside the mesh.
        held: (dimension, start, length) of the share of the part that this rank stores, if its
            replicas store the rest; None: the rank stores the whole part.
        plain: the tensor is not a DTensor, but one that the user declared equal on all ranks
            (``snapshot/replicas.py``).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    offset: tuple[int, ...] | None
    held: tuple[int, int, int] | None = None
    plain: bool = False

    def cut(self) -> Cut | None:
        """Return the elements that this rank stores; None for a rank outside the mesh.

        Raises ``ValueError`` if placements and mesh do not fit together.
        """
        if self.coordinate is None:
            return None
        cut = cut_of(self.shape, self.placements, self.mesh_shape, self.coordinate)
        return cut.narrow(*self.held) if self.held else cut

    @property
    def layout(self) -> tuple[Any, ...]:
        """The attributes that are equal on all ranks that have parts of one tensor."""
        return self.shape, self.stride, self.placements, self.mesh_shape

    def share(self, local_shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return the share of the part that this rank stores: (dimension, start, length).

        The replicas of a part divide it along one dimension into shares that differ by at most one
        row. It is the first dimension, or the longest one if the global tensor has fewer rows than
        the mesh has ranks. Each byte is stored by exactly one rank. A share depends on the sharding
        alone, so each rank computes its own without communication.

        None: the part has no replicas, or cannot be divided; this rank stores all of it.
        """
        if self.coordinate is None or 0 in local_shape or not local_shape:
            return None
        replicas, number = 1, 0
        for placement, ranks, rank in zip(
            self.placements, self.mesh_shape, self.coordinate, strict=True
        ):
            if placement == "R":
                replicas, number = replicas * ranks, number * ranks + rank
        if replicas == 1:
            return None
        # The global shape decides, not the local one: all ranks must divide along the same
        # dimension, so that the shares form a grid, which `catalog.py` checks.
        few = self.shape[0] < math.prod(self.mesh_shape)
        dim = self.shape.index(max(self.shape)) if few else 0
        rows = local_shape[dim]
        start, end = rows * number // replicas, rows * (number + 1) // replicas
        return dim, start, end - start

    def __str__(self) -> str:
        placements = ", ".join(self.placements)
        return (
            f"[{placements}] of {list(self.shape)} at {self.coordinate} of mesh {self.mesh_shape}"
        )


def box_of(shape: tuple[int, ...], offset: tuple[int, ...]) -> Sharding:
    """Return the sharding of a box that begins at ``offset`` of a tensor of ``shape``.

    For parts that another library has cut (DCP's plans): there is no mesh.
    """
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Sharding(
        shape=shape, stride=stride, placements=(), mesh_shape=(), coordinate=(), offset=offset
    )


def is_dtensor(value: object) -> bool:
    """Return whether ``value`` is a DTensor.

    It does not import ``torch.distributed.tensor``, which takes seconds. Without that module loaded
    there is no DTensor in the process.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is module.DTensor


def local_tensor(value: DTensor) -> torch.Tensor:
    """Return the local part of ``value``: the same memory, detached from autograd."""
    with torch.no_grad():
        return value.to_local()


class Shardings:
    """Computes the ``Sharding`` of DTensors, with a cache: computing one takes tens of µs."""

    def __init__(self) -> None:
        self._known: dict[Any, Sharding] = {}

    def sharding_of(self, value: DTensor) -> Sharding:
        """Return the sharding of ``value`` on this rank."""
        return self.sharding_like(value, value.shape, value.stride())

    def sharding_like(
        self, value: DTensor, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Sharding:
        """Return the sharding on this rank of a tensor with the mesh and placements of ``value``.

        ``shape`` and ``stride`` are those of that global tensor.
        """
        key = (value.device_mesh, value.placements, torch.Size(shape), tuple(stride))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _sharding(*key)
        return known


def has_partial(value: DTensor) -> bool:
    """Return whether the ranks hold summands of ``value`` (``Partial``) instead of parts of it."""
    return any(placement.is_partial() for placement in value.placements)


def rebuild_dtensor(local: torch.Tensor, sharding: Sharding, like: DTensor) -> DTensor:
    """Make a DTensor from its local part, which it shares memory with.

    It gets mesh and placements of ``like``; the caller checks that these equal ``sharding``.
    """
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(sharding.shape),
        stride=sharding.stride,
    )


def _sharding(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Sharding:
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset,
    )

    coordinate = mesh.get_coordinate()
    offset = None
    # A strided part (tensor parallelism under FSDP) interleaves with others: it is not one box.
    boxed = not any("Strided" in type(placement).__name__ for placement in placements)
    if coordinate is not None and boxed:
        _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Sharding(
        shape=tuple(shape),
        stride=tuple(stride),
        placements=tuple(map(_spell, placements)),
        mesh_shape=tuple(mesh.shape),
        coordinate=None if coordinate is None else tuple(coordinate),
        offset=None if offset is None else tuple(map(int, offset)),
    )


def _spell(placement: Any) -> str:
    """Spell a placement as ``R``, ``S(dim)`` or ``S(dim, split)``.

    The text goes into files, and ``str(placement)`` differs between versions of torch.
    """
    if placement.is_replicate():
        return "R"
    split = getattr(placement, "split_factor", None)
    return f"S({placement.dim})" if split is None else f"S({placement.dim}, {split})"
