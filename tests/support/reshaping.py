"""Worlds of DTensors, one rank after another in this process, and shards read like remote ones."""

import contextlib
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ecckpt.format.block_ranges import covering
from ecckpt.format.fragment_file import block_bytes_for
from ecckpt.state.load.load import check, load
from ecckpt.state.reshard.reshape import Place, reshape
from ecckpt.state.reshard.saved_shard import SavedShard
from ecckpt.state.snapshot.plan import plan_shard
from tests.support.builders import header


class PartReader:
    """Gives out what was required and nothing else, as a reader of remote shards does."""

    is_near = False

    def __init__(self, shard):
        self._header = header(
            k=8, m=2, shard_bytes=len(shard), block_bytes=block_bytes_for(len(shard))
        )
        self._blocks = np.zeros((8, self._header.rows), bool)
        self._shard = np.frombuffer(shard, np.uint8)
        self._data = np.zeros(len(shard), np.uint8)
        self._there = np.zeros(len(shard), bool)
        self.data = memoryview(self._data)

    @property
    def read_bytes(self):
        return int(self._there.sum())

    @property
    def pulled_bytes(self):
        """What a reader pulls for that: every block that it touches, while no holder is lost."""
        sizes = [
            each.stop - each.start for each in map(self._header.block, range(self._header.rows))
        ]
        return int((self._blocks * np.array(sizes)).sum())

    def require(self, starts, ends):
        self._blocks |= covering(self._header, starts, ends)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            assert 0 <= start <= end <= len(self._data)
            self._data[start:end] = self._shard[start:end]
            self._there[start:end] = True

    def release(self):
        self._data[:] = 0

    def digest(self, start, end):
        return self._shard[start:end].tobytes()


@contextlib.contextmanager
def rank_of(rank, world):
    """Be this rank, in a group that does no communication."""
    hook = sys.excepthook  # torch wraps it, again and again
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def mesh_of(shape):
    # torch caches what it knows of equal meshes; names of its own keep each rank's apart.
    names = tuple(
        f"dim{dim}of{dist.get_rank()}in{dist.get_world_size()}" for dim in range(len(shape))
    )
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def placed(tensor, mesh, placements):
    """This rank's DTensor of a tensor that every rank knows; no communication."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = tensor
    if mesh.get_coordinate() is None:
        local = tensor.new_empty(0)
    else:
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        for dim, (start, size) in enumerate(zip(offset, shape, strict=True)):
            local = local.narrow(dim, start, size)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def shard_bytes(state):
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return bytes(target)


def save_world(world, make):
    """The shard of every rank; ``make(rank)`` gives its state."""
    shards = []
    for rank in range(world):
        with rank_of(rank, world):
            shards.append(shard_bytes(make(rank)))
    return shards


def restore_as(shards, state, *, rank, world):
    """Restore a rank of another world; returns the paths seeded anew and the readers."""
    readers = [PartReader(shard) for shard in shards]
    place = Place(rank=rank, world_size=world, saved_by=len(shards))
    shard, reseeded = reshape(state, place, [SavedShard(reader) for reader in readers])
    check(state, shard)
    load(state, shard)
    return reseeded, readers


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(one, other):
    one, other = local(one), local(other)
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(one, other)
