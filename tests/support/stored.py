"""Generations put straight into agents, shard by shard: any ranks, any code, small blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

import ecckpt
from ecckpt.format.fragment_file import HOME, Header, fragment_bytes_for, parse_superblock
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.save import Protect, Reserve, Stage, Target, Watch
from ecckpt.protocol.verbs import PROTECT, RESERVE, STAGE, WATCH
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import SESSION, writer_of

BLOCK_BYTES = 4096


def shard_bytes(state: dict[str, Any]) -> bytes:
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return bytes(target)


def as_ranks(world: int, make: Callable[[int], dict[str, Any]]) -> list[bytes]:
    """The shards of ``make(rank)``, each made where torch believes to be that rank."""
    shards = []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            shards.append(shard_bytes(make(rank)))
        finally:
            dist.destroy_process_group()
    return shards


def distribute(
    tensor: torch.Tensor, placements: Sequence[Placement], mesh: tuple[int, ...] = ()
) -> DTensor:
    """This rank's part of ``tensor``, as torch would cut it, without communication."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = mesh or (world,)
    # A name of its own keeps apart what torch remembers of each rank's mesh.
    names = tuple(f"r{rank}d{dim}" for dim in range(len(mesh)))
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    coordinate = [rank // math.prod(mesh[dim + 1 :]) % mesh[dim] for dim in range(len(mesh))]
    local = tensor
    for place, part, parts in zip(placements, coordinate, mesh, strict=True):
        if isinstance(place, Replicate):
            continue
        chunks = local.chunk(parts, place.dim)
        empty = local.narrow(place.dim, 0, 0)
        local = chunks[part] if part < len(chunks) else empty
    return DTensor.from_local(
        local.contiguous(),
        device_mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def store(
    cluster: LocalCluster,
    shards: Sequence[bytes],
    *,
    run: str = "test",
    code: tuple[int, int] = (3, 2),
    step: int = 1,
) -> None:
    """Protect the shards of one generation: rank r at home on node r, fragments on the next."""
    nodes, (k, m) = cluster.nodes, code
    addresses = {node: cluster.client(node).node().address for node in nodes}
    for rank, shard in enumerate(shards):
        home = rank % len(nodes)
        others = [nodes[(home + 1 + index) % len(nodes)] for index in range(k + m)]
        others = others if len(nodes) > k + m else []
        header = Header(
            shard=ShardId(run, Generation(1, step, SESSION), rank),
            world_size=len(shards),
            index=HOME,
            k=k,
            m=m,
            shard_bytes=len(shard),
            fragment_bytes=fragment_bytes_for(len(shard), k),
            block_bytes=BLOCK_BYTES,
            home=nodes[home],
            parent=None,
            created_unix_s=0,
        )
        client = cluster.client(nodes[home])
        slot = client.call(
            RESERVE,
            Reserve(header=header, memory_bytes=0, local_ranks=1, holders=k + m, discard=()),
        )
        with Path(slot.path).open("r+b") as file:
            file.seek(slot.payload_offset)
            file.write(shard.ljust(header.payload_bytes, b"\0"))
        client.call(STAGE, Stage(header, slot.region))
        targets = tuple(Target(i, node, addresses[node]) for i, node in enumerate(others))
        client.call(
            PROTECT,
            Protect(
                shard=header.shard,
                writer=writer_of(1),
                targets=targets,
                min_fragments=len(targets),
                every_living=False,
                memory_bytes=0,
                timeout_s=10.0,
                discard=(),
            ),
        )
        state = "encoding"
        while state not in ("protected", "failed"):
            state = client.call(WATCH, Watch(header.shard, state, 5.0)).state
        assert state == "protected"


def files_of(cluster: LocalCluster, node: str, rank: int) -> dict[int, Path]:
    """The files in which a node keeps something of a rank's shards: index -> path."""
    found = {}
    for path in (cluster.root(node) / "regions").iterdir():
        header = parse_superblock(path.read_bytes()[:4096], str(path))
        if header is not None and header.shard.rank == rank:
            found[header.index] = path
    return found


def damage(path: Path, offset: int) -> None:
    """Flip one bit of a file's payload."""
    with path.open("r+b") as file:
        file.seek(4096 + offset)
        byte = file.read(1)[0]
        file.seek(4096 + offset)
        file.write(bytes([byte ^ 1]))


def opened(cluster: LocalCluster, run: str = "test", **options: Any) -> ecckpt.Opened:
    """A run of this cluster, opened for reading."""
    return ecckpt.open(run, cluster.addresses(), **options)
