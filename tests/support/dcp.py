"""Saves and loads by ``torch.distributed.checkpoint``, and states of several ranks for them."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ecckpt
from ecckpt.integrations.torch_dcp import Reader, Writer
from tests.support.tensors import random, same


def checkpointer(cluster, run, rank=0, **options):
    options = {"code": (2, 1), "save_timeout_s": 20.0, "restore_timeout_s": 20.0} | options
    root = cluster.root(cluster.nodes[rank])
    return ecckpt.Checkpointer(run, root=root, agents=cluster.addresses(), **options)


def save(checkpointer, step, state, **options):
    return dcp.save(state, storage_writer=Writer(checkpointer, step), **options)


def load(checkpointer, state, **options):
    reader = Reader(checkpointer)
    dcp.load(state, storage_reader=reader, **options)
    return reader


def world_state(ranks, *, blank=False, seed=0):
    """The same global state on any number of ranks: uneven, empty, replicated parts, and more."""
    mesh = init_device_mesh("cpu", (ranks,))

    def tensor(*shape, number):
        return torch.zeros(shape) if blank else random(*shape, seed=10 * seed + number)

    model = {
        "uneven": distribute_tensor(tensor(13, 7, number=1), mesh, [Shard(0)]),
        "columns": distribute_tensor(tensor(4, 9, number=2), mesh, [Shard(1)]),
        "row": distribute_tensor(tensor(1, 5, number=3), mesh, [Shard(0)]),
        "every": distribute_tensor(tensor(6, number=4), mesh, [Replicate()]),
        "plain": tensor(3, number=5),
    }
    return {"model": model, "epoch": None if blank else seed, "lists": [] if blank else [[1], (2,)]}


def assert_same_world(found, wanted):
    for name, tensor in wanted["model"].items():
        pair = (found["model"][name], tensor)
        if isinstance(tensor, DTensor):
            pair = tuple(each.to_local() for each in pair)
        assert same(*pair), name
    assert (found["epoch"], found["lists"]) == (wanted["epoch"], wanted["lists"])
