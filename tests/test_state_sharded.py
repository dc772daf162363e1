"""DTensors and FSDP2: each rank saves and restores its own part, even an empty one."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ecckpt.errors import StateMismatch, UnsupportedState
from ecckpt.state import check, load, plan_shard, read_shard


def shard_of(state):
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return read_shard(memoryview(target))


@pytest.fixture
def alone(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    """Sizes that two ranks cannot share evenly, and one that leaves a rank without a row."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(7, 5)
        self.last = nn.Linear(5, 1)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, inputs):
        return self.last(self.wide(inputs).relu())


def training(seed, mesh):
    torch.manual_seed(seed)
    model = Model()
    fully_shard(model, mesh=mesh)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), 0.01)}


def steps(state, count):
    for _ in range(count):
        state["model"](torch.ones(3, 7)).sum().backward()
        state["optim"].step()
        state["optim"].zero_grad()


def parts(state):
    model, optim = state["model"].state_dict(), state["optim"].state_dict()
    tensors = [*model.values(), *(x for entry in optim["state"].values() for x in entry.values())]
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def continue_exactly(mesh):
    straight = training(0, mesh)
    steps(straight, 3)
    shard = shard_of(straight)
    steps(straight, 2)
    resumed = training(1, mesh)
    parameters = list(resumed["model"].parameters())
    load(resumed, shard)
    entries = resumed["optim"].state.values()
    assert all(isinstance(entry["exp_avg"], DTensor) for entry in entries)
    assert all(a is b for a, b in zip(parameters, resumed["model"].parameters(), strict=True))
    steps(resumed, 2)
    for one, other in zip(parts(straight), parts(resumed), strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)
    return shard


def mesh_of(world):
    return init_device_mesh("cpu", (world,))


@pytest.mark.usefixtures("alone")
def test_fsdp2_with_adamw_continues_exactly():
    shard = continue_exactly(mesh_of(1))
    sharding = shard.shardings["model.wide.weight"]
    assert sharding.shape == (5, 7)
    assert sharding.placements == ("S(0)",)
    assert sharding.mesh_shape == (1,)
    assert sharding.offset == (0, 0)
    assert "optim.state.0.exp_avg" in shard.shardings
    assert "model.count" not in shard.shardings


@pytest.mark.usefixtures("alone")
def test_parts_do_not_go_into_whole_tensors_nor_other_placements():
    mesh = mesh_of(1)
    tensor = torch.arange(6.0).reshape(2, 3)
    whole = {"x": tensor.clone()}
    rows = {"x": DTensor.from_local(tensor.clone(), mesh, [Shard(0)])}
    columns = {"x": DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(1)])}
    for live, saved in [(whole, rows), (rows, whole), (columns, rows)]:
        with pytest.raises(StateMismatch, match=r"x: saved as .* resharding is not supported yet"):
            check(live, shard_of(saved))
    square = {
        "x": DTensor.from_local(
            torch.zeros(2, 3), init_device_mesh("cpu", (1, 1)), [Shard(0), Replicate()]
        )
    }
    with pytest.raises(StateMismatch, match="resharding"):
        check(square, shard_of(rows))
    load({"x": columns["x"]}, shard_of({"x": DTensor.from_local(tensor, mesh, [Shard(1)])}))
    assert torch.equal(columns["x"].to_local(), tensor)


@pytest.mark.usefixtures("alone")
def test_partial_sums_are_refused():
    tensor = DTensor.from_local(torch.ones(2), mesh_of(1), [Partial()])
    with pytest.raises(UnsupportedState, match="x: cannot store a DTensor with Partial"):
        plan_shard({"x": tensor})


@pytest.mark.usefixtures("alone")
def test_an_optimizer_needs_dtensors_for_what_was_sharded():
    saved = training(0, mesh_of(1))
    steps(saved, 1)
    model = Model()
    live = {"optim": torch.optim.AdamW(model.parameters())}
    with pytest.raises(StateMismatch, match="with no DTensor here to tell the mesh") as caught:
        check(live, shard_of({"optim": saved["optim"]}))
    assert len(caught.value.problems) == 8


class Average:
    def __init__(self, tensor):
        self.average = tensor

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


@pytest.mark.usefixtures("alone")
def test_other_objects_get_dtensors_like_the_ones_they_have():
    mesh = mesh_of(1)
    saved = Average(DTensor.from_local(torch.ones(3), mesh, [Shard(0)]))
    live = Average(DTensor.from_local(torch.zeros(3), mesh, [Shard(0)]))
    load({"ema": live}, shard_of({"ema": saved}))
    assert torch.equal(live.average.full_tensor(), torch.ones(3))
    with pytest.raises(StateMismatch, match=r"ema\.average"):
        check({"ema": Average(torch.zeros(3))}, shard_of({"ema": saved}))


def worker(rank, store, results):
    torch.set_num_threads(1)  # the threads of the parent are not in a fork
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    shard = continue_exactly(mesh_of(2))
    report = {
        name: (list(shard.tensors[name].shape), part.offset, part.coordinate)
        for name, part in shard.shardings.items()
        if name.startswith("model.")
    }
    (results / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def test_two_ranks_with_uneven_and_empty_parts(tmp_path):
    mp.start_processes(
        worker, (str(tmp_path / "pair"), tmp_path), nprocs=2, start_method="fork", join=True
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["model.wide.weight"] == [[3, 7], [0, 0], [0]]
    assert second["model.wide.weight"] == [[2, 7], [3, 0], [1]]
    assert first["model.last.bias"] == [[1], [0], [0]]
    assert second["model.last.bias"] == [[0], [1], [1]]
