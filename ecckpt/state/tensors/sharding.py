"""Where a rank's local tensor sits in a global one: DTensor, taken apart and put together."""

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


@dataclass(frozen=True, slots=True)
class Sharding:
    """A rank's part of a global tensor.

    ``coordinate`` is the rank's place in the mesh (None: outside of it) and ``offset`` where its
    box begins in the global tensor (None where the part is no single box, or there is none).
    ``held`` is set where only a share of the part is meant, the rest being with its replicas:
    dimension, start and length within the part. ``plain``: it is no DTensor, but one of the tensors
    that all ranks were said to have (`replicas.py`). A box that no mesh explains (``box_of``) has
    neither placements nor mesh.
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
        """The elements that this rank has; None outside of the mesh.

        Raises ``ValueError`` where placements and mesh do not fit together.
        """
        if self.coordinate is None:
            return None
        cut = cut_of(self.shape, self.placements, self.mesh_shape, self.coordinate)
        return cut.narrow(*self.held) if self.held else cut

    @property
    def layout(self) -> tuple[Any, ...]:
        """What is the same on all ranks that have parts of one tensor."""
        return self.shape, self.stride, self.placements, self.mesh_shape

    def share(self, local_shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """The share of this part that its rank stores: dimension, start and length; None: all.

        Replicas have equal shares, up to one row: of the first dimension, or, if the global tensor
        has fewer rows than the mesh has ranks, of the longest. So each byte is stored once, every
        rank knows its own without asking, and no rank's share depends on what else the others'
        states hold.
        """
        if self.coordinate is None or 0 in local_shape or not local_shape:
            return None
        replicas, number = 1, 0
        for placement, ranks, at in zip(
            self.placements, self.mesh_shape, self.coordinate, strict=True
        ):
            if placement == "R":
                replicas, number = replicas * ranks, number * ranks + at
        if replicas == 1:
            return None
        # Chosen by the global shape: all parts are cut along the same dimension, and form a grid.
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
    """A part that somebody else cut: it begins at ``offset`` of a tensor of ``shape``."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Sharding(shape, stride, (), (), (), offset)


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a DTensor, without importing what takes seconds to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is module.DTensor


def local_tensor(value: DTensor) -> torch.Tensor:
    """The local part of ``value``: the same memory, outside autograd."""
    with torch.no_grad():
        return value.to_local()


class Shardings:
    """``Sharding`` of DTensors; remembers them, since computing one costs tens of microseconds."""

    def __init__(self) -> None:
        self._known: dict[Any, Sharding] = {}

    def of(self, value: DTensor) -> Sharding:
        """How ``value`` is sharded here."""
        return self.like(value, value.shape, value.stride())

    def like(self, value: DTensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> Sharding:
        """How a tensor of another shape is sharded here if it is placed as ``value`` is."""
        key = (value.device_mesh, value.placements, torch.Size(shape), tuple(stride))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _sharding(*key)
        return known


def has_partial(value: DTensor) -> bool:
    """Whether ranks hold summands of ``value`` rather than parts of it."""
    return any(placement.is_partial() for placement in value.placements)


def rebuild_dtensor(local: torch.Tensor, sharding: Sharding, like: DTensor) -> DTensor:
    """A DTensor on the mesh of ``like``, which must be sharded as ``sharding`` says."""
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
    # A strided part (tensor parallel below FSDP) interleaves: no single box describes it.
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
    """S(0), R, or S(0, 2) for a part strided by 2: the same text in every version of torch."""
    if placement.is_replicate():
        return "R"
    split = getattr(placement, "split_factor", None)
    return f"S({placement.dim})" if split is None else f"S({placement.dim}, {split})"
