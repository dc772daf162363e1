"""``ecckpt export --to dcp``: folders that torch's own loader reads, sharded or not."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ecckpt.errors import InvalidConfig, StateMismatch, UnsupportedState
from ecckpt.integrations.dcp.export import export_dcp
from ecckpt.state.tensors.dtypes import STORED
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.commands import leftovers, run
from tests.support.stored import as_ranks, distribute, opened, shard_bytes, store
from tests.support.tensors import random, same

# What dcp.load says of a single process, and torch.load of complex32.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf support"
)


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=6) as cluster:
        yield cluster


def training(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    optim = torch.optim.AdamW(model.parameters(), 0.01 * (seed + 1))
    model(random(3, 5)).sum().backward()
    optim.step()
    return {"model": model, "optim": optim, "epoch": seed, "seen": [1, {"a": 2.5}]}


def as_dicts(state):
    return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}


def load(state, folder):
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def test_a_training_state_is_loaded_by_torch(cluster, tmp_path):
    saved = training(1)
    store(cluster, [shard_bytes(saved)], run="training")
    done = export_dcp(opened(cluster, "training"), tmp_path / "out")
    blank = as_dicts(training(0))
    load(blank, tmp_path / "out")
    expected = as_dicts(saved)
    assert all(same(blank["model"][name], t) for name, t in expected["model"].items())
    for index, entry in expected["optim"]["state"].items():
        assert all(same(blank["optim"]["state"][index][name], t) for name, t in entry.items())
    assert blank["optim"]["param_groups"] == expected["optim"]["param_groups"]
    assert (blank["epoch"], blank["seen"]) == (1, [1, {"a": 2.5}])
    assert done.tensors == 7 + 12
    dcp_to_torch_save(tmp_path / "out", tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert same(one["model"]["0.weight"], saved["model"][0].weight.detach())


def test_every_dtype_and_shape(cluster, tmp_path):
    raw = torch.arange(64, dtype=torch.uint8) % 2
    tensors = {str(dtype)[6:]: raw.view(dtype).reshape(2, -1) for dtype in STORED}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    tied = {"a": tensors["float32"], "b": tensors["float32"]}
    store(cluster, [shard_bytes({**tensors, **tied})], run="dtypes")
    export_dcp(opened(cluster, "dtypes"), tmp_path / "out")
    wanted = {**tensors, **tied}
    blank = {
        name: torch.zeros(tensor.nbytes, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        for name, tensor in wanted.items()
    }
    assert not same(blank["bool"], wanted["bool"])
    load(blank, tmp_path / "out")
    assert all(same(blank[name], tensor) for name, tensor in wanted.items())


def test_parts_of_four_ranks_go_to_two(cluster, tmp_path):
    rows, columns, every = random(9, 5), random(4, 6, seed=1), random(3, seed=2)

    def state(rank):
        parts = {"rows": distribute(rows, [Shard(0)]), "columns": distribute(columns, [Shard(1)])}
        parts |= {"every": distribute(every, [Replicate()]), f"own{rank}": random(2, seed=rank)}
        return {"model": parts, "step": 5}

    store(cluster, as_ranks(4, state), run="four")
    export_dcp(opened(cluster, "four"), tmp_path / "out")
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            wanted = {
                "rows": distribute(rows, [Shard(0)]),
                "columns": distribute(columns, [Shard(0)]),
            }
            blank = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            blank["own3"] = torch.zeros(2)
            load({"model": blank}, tmp_path / "out")
            assert all(same(blank[n].to_local(), t.to_local()) for n, t in wanted.items())
            assert same(blank["own3"], random(2, seed=3))
        finally:
            dist.destroy_process_group()


def test_what_ranks_disagree_on_is_refused_or_chosen(cluster, tmp_path):
    def state(rank):
        return {"model": {"x": random(3)}, "rng": random(4, seed=rank), "place": {"rank": rank}}

    store(cluster, [shard_bytes(state(rank)) for rank in range(2)], run="differ")
    found = opened(cluster, "differ")
    with pytest.raises(StateMismatch, match=r"place\.rank: rank 1 has another value"):
        export_dcp(found, tmp_path / "out")
    with pytest.raises(StateMismatch, match="rng: rank 1 has other values than rank 0"):
        export_dcp(found, tmp_path / "out", prefix="rng")
    with pytest.raises(InvalidConfig, match="begins with 'none'"):
        export_dcp(found, tmp_path / "out", prefix="none")
    assert leftovers(tmp_path) == []
    done = export_dcp(found.as_rank(1), tmp_path / "out")
    blank = {"rng": torch.zeros(4), "place": {"rank": -1}}
    load(blank, tmp_path / "out")
    assert (done.tensors, done.values, done.total_bytes) == (2, 1, 28)
    assert blank["place"] == {"rank": 1}
    assert same(blank["rng"], random(4, seed=1))
    with pytest.raises(InvalidConfig, match="not an empty folder"):
        export_dcp(found.as_rank(1), tmp_path / "out")


def test_tensors_in_a_tuple_are_refused(cluster, tmp_path):
    store(cluster, [shard_bytes({"pair": (random(2), 1)})], run="tuple")
    with pytest.raises(UnsupportedState, match="pair: cannot store tensors in a tuple"):
        export_dcp(opened(cluster, "tuple"), tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_by_command(capsys, cluster, tmp_path):
    store(cluster, [shard_bytes({"model": {"x": random(3)}, "step": 1})], run="command")
    command = ("export", "command", *cluster.addresses(), "--to", "dcp", tmp_path / "out")
    status, out, err = run(capsys, *command, "--prefix", "model.", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["tensors"] == 1
    blank = {"x": torch.zeros(3)}
    load(blank, tmp_path / "out")
    assert same(blank["x"], random(3))
