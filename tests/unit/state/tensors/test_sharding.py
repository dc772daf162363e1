"""DTensors and FSDP2: each rank saves and restores its own part, even an empty one."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ecckpt.errors import StateMismatch, UnsupportedState
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import check, load
from ecckpt.state.snapshot.plan import plan_shard


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


def invented_steps(state, count):
    for _ in range(count):
        for parameter in state["model"].parameters():
            parameter.grad = parameter.detach() * 0.5 + 0.1
        state["optim"].step()


def parts(state):
    model, optim = state["model"].state_dict(), state["optim"].state_dict()
    tensors = [*model.values(), *(x for entry in optim["state"].values() for x in entry.values())]
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def continue_exactly(mesh, steps=steps):
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
    # torch caches what it knows of equal meshes; a name of its own keeps each rank's apart.
    return init_device_mesh("cpu", (world,), mesh_dim_names=(f"ranks{dist.get_rank()}",))


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
        with pytest.raises(StateMismatch, match=r"x: saved as .*, here"):
            check(live, shard_of(saved))
    square = {
        "x": DTensor.from_local(
            torch.zeros(2, 3), init_device_mesh("cpu", (1, 1)), [Shard(0), Replicate()]
        )
    }
    with pytest.raises(StateMismatch, match="x: saved as"):
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
    with pytest.raises(StateMismatch, match="there is no DTensor here with its mesh") as caught:
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


@pytest.mark.usefixtures("alone")
def test_a_part_is_filled_where_it_ends_up(monkeypatch):
    """A part in the host's memory is moved when its mesh is one of GPUs."""
    really = DTensor.from_local

    def moving(local, *args, **kwargs):
        return really(local.clone(), *args, **kwargs)

    saved, live = (
        Average(DTensor.from_local(torch.full((3,), value), mesh_of(1), [Shard(0)]))
        for value in (1.0, 0.0)
    )
    monkeypatch.setattr(DTensor, "from_local", moving)
    load({"ema": live}, shard_of({"ema": saved}))
    assert torch.equal(live.average.full_tensor(), torch.ones(3))


@pytest.mark.parametrize("rank", [0, 1])
def test_uneven_and_empty_parts_of_two_ranks(rank):
    # The fake group does no communication, so that gradients are made up below.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        shard = continue_exactly(mesh_of(2), invented_steps)
    finally:
        dist.destroy_process_group()
    boxes = {
        "model.wide.weight": [((3, 7), (0, 0)), ((2, 7), (3, 0))],
        "model.last.bias": [((1,), (0,)), ((0,), (1,))],
        "optim.state.3.exp_avg": [((1,), (0,)), ((0,), (1,))],
    }
    for name, box in boxes.items():
        part = shard.shardings[name]
        assert (tuple(shard.tensors[name].shape), part.offset) == box[rank]
        assert part.coordinate == (rank,)
        assert part.mesh_shape == (2,)


def test_a_part_of_another_rank_does_not_fit():
    shards = []
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            state = {"x": distribute(torch.arange(4.0))}
            shards.append(shard_of(state))
            with pytest.raises(StateMismatch) if rank else nullcontext():
                check(state, shards[0])
        finally:
            dist.destroy_process_group()


def distribute(tensor):
    local = tensor.chunk(dist.get_world_size())[dist.get_rank()]
    return DTensor.from_local(local, mesh_of(dist.get_world_size()), [Shard(0)])
