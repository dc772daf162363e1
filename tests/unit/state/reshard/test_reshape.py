"""From one world to another, without a network: every rank has what it would have saved itself."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ecckpt
from ecckpt.errors import CorruptFragment, StateMismatch
from ecckpt.format.fragment_file import block_bytes_for
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import load
from ecckpt.state.reshard.reshape import is_relaid
from ecckpt.state.reshard.saved_shard import SavedShard
from tests.support.reshaping import (
    PartReader,
    local,
    mesh_of,
    placed,
    rank_of,
    restore_as,
    same,
    save_world,
    shard_bytes,
)

# B49: sizes that divide evenly, unevenly, and leave ranks without anything.
SIZES = [(6,), (9,), (1, 3), (5, 7), (2, 3, 4), (0, 3), ()]
WORLDS = [
    ((4,), [Shard(0)]),
    ((3,), [Shard(0)]),
    ((2,), [Shard(-1)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((1,), [Replicate()]),
]


def tensors():
    made = {}
    for number, size in enumerate(SIZES):
        dtype = [torch.float32, torch.bfloat16, torch.int64, torch.complex128][number % 4]
        made[f"t{number}"] = torch.arange(1, 1 + torch.Size(size).numel()).reshape(size).to(dtype)
    made["f8"] = torch.arange(24.0).reshape(8, 3).to(torch.float8_e4m3fn)
    return made


def world_state(mesh_shape, placements, *, blank=False):
    mesh = mesh_of(mesh_shape)
    state = {"step": 0 if blank else 7, "whole": torch.zeros(3) if blank else torch.arange(3.0)}
    for name, tensor in tensors().items():
        fits = [
            Shard(each.dim % tensor.ndim)
            if type(each) is Shard and tensor.ndim > max(0, each.dim)
            else each
            if type(each) is not Shard and (tensor.ndim or each.is_replicate())
            else Replicate()
            for each in placements
        ]
        if any(isinstance(each, _StridedShard) for each in fits):
            rows = strided_rows(tensor, mesh)
            value = DTensor.from_local(
                rows.clone(),
                mesh,
                fits,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        else:
            value = placed(tensor, mesh, fits)
        if blank:
            value.to_local().zero_()
        state[name] = value
    return state


def strided_rows(tensor, mesh):
    """[_StridedShard(0, 2), Shard(0)] on 2 x 2: the second dimension cuts first."""
    left, right = mesh.get_coordinate()
    chunks = [*tensor.split(max(1, -(-len(tensor) // 2)))] if len(tensor) else [tensor]
    chunks += [tensor[:0]] * (2 - len(chunks))
    halves = [[*each.split(max(1, -(-len(each) // 2)))] if len(each) else [each] for each in chunks]
    mine = torch.cat([half[left] if left < len(half) else tensor[:0] for half in halves])
    size = -(-len(mine) // 2)
    return mine[right * size : (right + 1) * size]


@pytest.mark.parametrize("saved", WORLDS, ids=str)
def test_any_world_to_any_other(saved):
    ranks = int(np.prod(saved[0]))
    shards = save_world(ranks, lambda _: world_state(*saved))
    for mesh_shape, placements in WORLDS:
        world = int(np.prod(mesh_shape))
        for rank in range(world):
            with rank_of(rank, world):
                expected = world_state(mesh_shape, placements)
                state = world_state(mesh_shape, placements, blank=True)
                restore_as(shards, state, rank=rank, world=world)
                assert state["step"] == 7
                for name, value in expected.items():
                    assert name == "step" or same(state[name], value), (name, mesh_shape, rank)


def test_whole_tensors_from_parts():
    shards = save_world(4, lambda _: world_state((4,), [Shard(0)]))
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    state |= {"step": 0, "whole": torch.zeros(3)}
    restore_as(shards, state, rank=0, world=1)
    assert all(same(state[name], tensor) for name, tensor in tensors().items())


def test_no_more_is_read_than_needed():
    """Shards of 64 MiB, counted in the whole blocks that are pulled while no holder is lost."""
    big = torch.arange(32 << 20, dtype=torch.float32).reshape(-1, 1024)
    names = ("a", "b")
    steps = {name: torch.tensor(3.0) for name in names}

    def make(world, dim, tensor):
        parts = {name: placed(tensor, mesh_of((world,)), [Shard(dim)]) for name in names}
        return {"parts": parts, "steps": dict(steps)}

    shards = save_world(4, lambda _: make(4, 0, big))
    blank = torch.zeros(1).expand(big.shape)
    for rank, world in [(1, 2), (1, 3)]:
        with rank_of(rank, world):
            state = make(world, 0, blank)
            _, readers = restore_as(shards, state, rank=rank, world=world)
            needed = sum(local(part).nbytes for part in state["parts"].values())
            pulled = sum(reader.pulled_bytes for reader in readers)
            runs = len(names) * (1 if world == 2 else 2)
            # A block more for each run of bytes, and header and values of each shard.
            block_bytes = block_bytes_for(len(shards[0]))
            assert pulled <= needed + (runs + 2 * len(shards)) * block_bytes
            assert pulled < 1.02 * needed
    with rank_of(1, 2):  # columns from rows: of each row, half is wanted
        state = make(2, 1, blank)
        _, readers = restore_as(shards, state, rank=1, world=2)
        assert torch.equal(local(state["parts"]["b"]), big[:, 512:])
        needed = sum(local(part).nbytes for part in state["parts"].values())
        assert sum(reader.read_bytes for reader in readers) < 1.01 * needed


class Tied(nn.Module):
    """Rows that leave ranks without any, and one tensor under two names."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(7, 5)
        self.last = nn.Linear(5, 1)
        self.again = nn.Linear(7, 5, bias=False)
        self.again.weight = self.wide.weight
        self.register_buffer("count", torch.tensor(0))


def training(world, seed, **options):
    torch.manual_seed(seed)
    model = Tied()
    fully_shard(model, mesh=mesh_of((world,)))
    return {
        "model": model,
        "optim": torch.optim.AdamW(model.parameters(), 0.01, **options),
        "rng": ecckpt.RngState(),
    }


def invented_steps(state):
    """Steps with gradients that follow from the element's place, so that all worlds take them."""
    for parameter in state["model"].parameters():
        mesh, whole = parameter.device_mesh, torch.randn(parameter.shape, generator=seeded())
        parameter.grad = placed(whole, mesh, parameter.placements)
        with torch.no_grad():
            parameter.to_local().copy_(placed(whole + 1, mesh, parameter.placements).to_local())
    state["optim"].step()
    state["model"].count.fill_(1)


def seeded():
    return torch.Generator().manual_seed(5)


def stepped(world, rank):
    with rank_of(rank, world):
        state = training(world, 0)
        invented_steps(state)
        torch.manual_seed(rank)
        return state, shard_bytes(state)


def flat(state):
    model, optim = state["model"].state_dict(), state["optim"].state_dict()
    entries = {f"{n}.{k}": t for n, entry in optim["state"].items() for k, t in entry.items()}
    return {**model, **entries}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_fsdp2_and_adamw_saved_on_4(world):
    shards = [stepped(4, rank)[1] for rank in range(4)]
    draws = []
    for rank in range(world):
        expected, _ = stepped(world, rank)
        with rank_of(rank, world):
            state = training(world, 1)
            parameters = list(state["model"].parameters())
            reseeded, _ = restore_as(shards, state, rank=rank, world=world)
            draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
            restored = flat(state)
            for name, tensor in flat(expected).items():
                assert same(restored[name], tensor), name
                assert isinstance(restored[name], DTensor) == isinstance(tensor, DTensor)
            assert all(
                one is other
                for one, other in zip(parameters, state["model"].parameters(), strict=True)
            )
            assert state["model"].again.weight is state["model"].wide.weight
        # Nothing drew a number of Python's or numpy's: they were equal on all ranks, and are.
        assert reseeded == (() if world == 4 else ("rng: torch",))
    assert [len({draw[part] for draw in draws}) for part in range(3)] == [1, 1, world]


@pytest.mark.parametrize("world", [1, 3])
def test_generators_that_were_equal_on_all_ranks_stay_so_and_others_differ(world):
    shards = []
    for rank in range(2):
        own = {"sampler": seeded(), "noise": np.random.default_rng(rank)}
        random.seed(rank)
        np.random.seed(7)
        torch.manual_seed(rank)
        shards.append(shard_bytes({"rng": ecckpt.RngState(own)}))
    draws = []
    for rank in range(world):
        own = {"sampler": torch.Generator().manual_seed(99), "noise": np.random.default_rng(9)}
        rng = ecckpt.RngState(own)
        reseeded, _ = restore_as(shards, {"rng": rng}, rank=rank, world=world)
        assert reseeded == ("rng: generator noise", "rng: python", "rng: torch")
        draw = lambda own=own: (  # noqa: E731
            torch.rand((), generator=own["sampler"]).item(),
            np.random.rand(),
            random.random(),
            torch.rand(()).item(),
            own["noise"].random(),
        )
        draws.append(draw())
        rng.rewind()
        assert draw() == draws[-1]
    np.random.seed(7)
    assert {each[:2] for each in draws} == {
        (torch.rand((), generator=seeded()).item(), np.random.rand())
    }
    assert [len({each[part] for each in draws}) for part in (2, 3, 4)] == [world] * 3


def test_of_one_rank_its_own_generators_go_on_and_global_ones_differ():
    shard = shard_bytes({"rng": ecckpt.RngState({"sampler": seeded()})})
    draws = []
    for rank in range(2):
        own = torch.Generator().manual_seed(rank)
        restore_as([shard], {"rng": ecckpt.RngState({"sampler": own})}, rank=rank, world=2)
        draws.append((torch.rand((), generator=own).item(), torch.rand(()).item(), random.random()))
    assert [len({each[part] for each in draws}) for part in range(3)] == [1, 2, 2]


def test_seeding_anew_is_the_same_every_time():
    shards = [stepped(2, rank)[1] for rank in range(2)]
    draws = []
    for _ in range(2):
        with rank_of(0, 1):
            state = training(1, random.randrange(1000))
            restore_as(shards, state, rank=0, world=1)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert draws[0] == draws[1]


def test_sharded_training_goes_on_in_a_plain_one():
    shards = [stepped(4, rank)[1] for rank in range(4)]
    torch.manual_seed(1)
    model = Tied()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters(), 0.01)}
    state["rng"] = ecckpt.RngState()
    restore_as(shards, state, rank=0, world=1)
    expected, _ = stepped(1, 0)
    for name, tensor in flat(expected).items():
        assert same(flat(state)[name], tensor)


@pytest.mark.parametrize(("saved_by", "world"), [(1, 2), (2, 3), (2, 2)])
def test_plain_training_goes_on_in_a_sharded_one(saved_by, world):
    """As from DDP to FSDP2; only the rank's own rows are read."""

    def plain(_):
        torch.manual_seed(0)
        model = Tied()
        optim = torch.optim.AdamW(model.parameters(), 0.01)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=seeded())
            with torch.no_grad():
                parameter.copy_(parameter.grad + 1)
        optim.step()
        model.count.fill_(1)
        return {"model": model, "optim": optim, "rng": ecckpt.RngState()}

    shards = save_world(saved_by, plain)
    for rank in range(world):
        expected, _ = stepped(world, rank)
        with rank_of(rank, world):
            state = training(world, 1)
            assert is_relaid(state, read_shard(memoryview(shards[0])))
            with pytest.raises(StateMismatch, match=r"exp_avg: saved as a whole tensor"):
                load({"optim": state["optim"]}, read_shard(memoryview(optim_only(shards[0]))))
            restore_as(shards, state, rank=rank, world=world)
            for name, tensor in flat(expected).items():
                assert same(flat(state)[name], tensor), name
                assert isinstance(flat(state)[name], DTensor) == isinstance(tensor, DTensor)


def optim_only(shard):
    model = Tied()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters(), 0.01)}
    load(state | {"rng": ecckpt.RngState()}, read_shard(memoryview(shard)))
    return shard_bytes({"optim": state["optim"]})


# -- what is handed over, and what is refused -----------------------------------------------------


def test_what_differs_between_ranks_is_refused_by_path():
    def make(rank):
        return {
            "same": {"lr": float("nan"), "names": ["a", ("b", 1)], 1: None},
            "position": {"epoch": 3, "seen": [rank, 0]},
            "tensor": torch.full((3,), float(rank == 2)),
            "equal": torch.ones(2),
            "kind": 1 if rank else True,
        }

    shards = save_world(3, make)
    problems = []
    for rank in range(2):
        with pytest.raises(StateMismatch) as caught:
            restore_as(shards, make(0), rank=rank, world=2)
        problems += caught.value.problems
    named = [problem.partition(": ")[0] for problem in problems]
    assert named == ["position.seen.0", "kind", "position.seen.0", "kind", "tensor"]
    assert "rank 0 and rank 2 of the 3 that saved; 2 ranks restore" in problems[-1]


def test_on_as_many_ranks_each_keeps_its_own():
    def make(rank, placements):
        tensor = torch.arange(8.0).reshape(2, 4)
        return {"mine": rank, "x": placed(tensor, mesh_of((2,)), placements)}

    shards = save_world(2, lambda rank: make(rank, [Shard(0)]))
    for rank in range(2):
        with rank_of(rank, 2):
            expected = make(rank, [Shard(1)])
            state = make(9, [Shard(1)])
            state["x"].to_local().zero_()
            assert is_relaid(state, read_shard(memoryview(shards[rank])))
            assert not is_relaid(make(0, [Shard(0)]), read_shard(memoryview(shards[rank])))
            restore_as(shards, state, rank=rank, world=2)
            assert state["mine"] == rank
            assert same(state["x"], expected["x"])


def test_stages_of_a_pipeline_keep_their_own_names():
    def make(rank, dim, fill=1.0):
        mesh = DeviceMesh("cpu", [0, 1] if rank < 2 else [2, 3])
        tensor = torch.arange(12.0).reshape(3, 4) * fill * (1 + rank // 2)
        return {f"stage{rank // 2}": placed(tensor, mesh, [Shard(dim)])}

    shards = save_world(4, lambda rank: make(rank, 0))
    for rank in range(4):
        with rank_of(rank, 4):
            state, expected = make(rank, 1, fill=0.0), make(rank, 1)
            restore_as(shards, state, rank=rank, world=4)
            name = f"stage{rank // 2}"
            assert same(state[name], expected[name])
    with rank_of(0, 2):
        state = {"stage0": placed(torch.zeros(3, 4), mesh_of((2,)), [Shard(0)])}
        with pytest.raises(StateMismatch, match="state: differs between rank 0 and rank 3"):
            restore_as(shards, state, rank=0, world=2)


def test_another_shape_or_dtype_is_refused_by_path():
    shards = save_world(2, lambda _: {"x": placed(torch.ones(4, 3), mesh_of((2,)), [Shard(0)])})
    with rank_of(0, 1):
        mesh = mesh_of((1,))
        for other in (torch.ones(5, 3), torch.ones(4), torch.ones(4, 3, dtype=torch.float64)):
            live = {"x": placed(other, mesh, [Shard(0)])}
            with pytest.raises(StateMismatch, match="x: saved"):
                restore_as(shards, live, rank=0, world=1)
        live = {"x": placed(torch.ones(4, 3), mesh, [Shard(0)]), "y": torch.ones(1)}
        with pytest.raises(StateMismatch, match="y: missing"):
            restore_as(shards, live, rank=0, world=1)


def test_parts_that_make_up_no_whole_are_refused():
    shards = save_world(2, lambda _: {"x": placed(torch.ones(4), mesh_of((2,)), [Shard(0)])})
    other = save_world(3, lambda _: {"x": placed(torch.ones(4), mesh_of((3,)), [Shard(0)])})
    with rank_of(0, 1):
        live = {"x": placed(torch.zeros(4), mesh_of((1,)), [Shard(0)])}
        with pytest.raises(StateMismatch, match="x: 2 of 4 elements were saved"):
            restore_as([shards[0]] * 2, live, rank=0, world=1)
        with pytest.raises(StateMismatch, match=r"x: saved as .* but by rank 1 as"):
            restore_as([shards[0], other[1]], live, rank=0, world=1)
        assert not live["x"].to_local().any()


@pytest.mark.parametrize("length", [0, 4, 8, 100])
def test_a_shard_cut_off_is_refused(length):
    whole = save_world(1, lambda _: {"x": torch.ones(4)})[0]
    with pytest.raises(CorruptFragment):
        SavedShard(PartReader(whole[:length]))


# -- replicated data ------------------------------------------------------------------------------


def replicated(rank, *, fill=1.0):
    mesh = mesh_of((2, 3))
    big = torch.arange(700.0).reshape(100, 7) * fill
    return {
        "rows": placed(big, mesh, [Replicate(), Shard(0)]),
        "everywhere": placed(big[:3], mesh, [Replicate(), Replicate()]),
        "wide": placed(big[:1] * 2, mesh, [Shard(0), Replicate()]),
        "scalar": placed(big[1, 1], mesh, [Replicate(), Replicate()]),
        "mine": torch.full((50,), 5.0),
    }


def test_replicated_data_is_stored_once_and_evenly():
    shards = save_world(6, replicated)
    parts = [read_shard(memoryview(shard)) for shard in shards]
    for name, elements in [("rows", 700), ("everywhere", 21), ("wide", 7)]:
        sizes = [part.tensors[name].numel() for part in parts]
        assert sum(sizes) == elements
    rows = [part.tensors["rows"].shape[0] for part in parts]
    assert max(rows) - min(rows) <= 2
    assert all(part.tensors["mine"].shape == (50,) for part in parts)  # per rank: never once
    sharding = parts[4].shardings["rows"]
    assert (sharding.held, sharding.offset) == ((0, 17, 17), (51, 0))


@pytest.mark.parametrize("world", [6, 1, 4])
def test_replicated_data_comes_back_everywhere(world):
    shards = save_world(6, replicated)
    for rank in range(world):
        with rank_of(rank, world):
            if world == 6:
                expected, state = replicated(rank), replicated(rank, fill=0.0)
                assert is_relaid(state, read_shard(memoryview(shards[rank])))
                with pytest.raises(StateMismatch, match="rows: saved as"):
                    load(state, read_shard(memoryview(shards[rank])))
            else:
                mesh = mesh_of((world,))
                whole = replicated_whole()
                expected = {n: placed(t, mesh, [Replicate()]) for n, t in whole.items()}
                state = {n: placed(t * 0, mesh, [Replicate()]) for n, t in whole.items()}
                expected["mine"], state["mine"] = torch.full((50,), 5.0), torch.zeros(50)
            restore_as(shards, state, rank=rank, world=world)
            assert all(same(state[name], value) for name, value in expected.items())


def replicated_whole():
    big = torch.arange(700.0).reshape(100, 7)
    return {"rows": big, "everywhere": big[:3], "wide": big[:1] * 2, "scalar": big[1, 1]}


def test_a_new_optimizer_is_not_given_a_share_for_a_whole():
    def make():
        mesh = mesh_of((2,))
        param = nn.Parameter(placed(torch.ones(4, 2), mesh, [Replicate()]))
        return {"optim": torch.optim.AdamW([param], 0.1)}, param

    with rank_of(0, 2):
        state, param = make()
        param.grad = placed(torch.ones(4, 2), param.device_mesh, [Replicate()])
        state["optim"].step()
        shard = read_shard(memoryview(shard_bytes(state)))
        assert shard.tensors["optim.state.0.exp_avg"].shape == (2, 2)
        fresh, _ = make()
        with pytest.raises(StateMismatch, match="exp_avg"):
            load(fresh, shard)
        assert is_relaid(fresh, shard)
