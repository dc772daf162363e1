"""``dcp.save``, ``dcp.async_save`` and ``dcp.load`` through ecckpt: ranks are processes."""

import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ecckpt import errors
from ecckpt.integrations.dcp.export import export_dcp
from ecckpt.integrations.dcp.plan_shard import NOTES, read_contents
from ecckpt.integrations.safetensors.export import export_safetensors
from ecckpt.integrations.safetensors.importer import read_weights
from ecckpt.integrations.torch_dcp import Reader, Writer
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.state.tensors.sharding import box_of
from ecckpt.state.tree.nodes import StoredTensor
from ecckpt.testing.local_cluster import LocalCluster, await_end
from tests.support.dcp import assert_same_world, checkpointer, load, save, world_state
from tests.support.forked import die, preload, run_ranks
from tests.support.stored import opened
from tests.support.tensors import random, same

# What dcp says of a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=5) as cluster:
        yield cluster


def causes(caught):
    """What each rank failed with, by rank."""
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


def failing(act):
    """The kinds and texts of the failures that DCP reports here, by rank."""
    with pytest.raises(CheckpointException) as caught:
        act()
    return {rank: (type(error).__name__, str(error)) for rank, error in causes(caught).items()}


# -- one process ----------------------------------------------------------------------------------


@pytest.fixture
def alone(cluster, request):
    with checkpointer(cluster, request.node.name[:60].strip("[]")) as one:
        assert Reader(one).step is None
        yield one


VALUES = {
    "none": None,
    "numbers": (1, -(1 << 70), 2.5, -0.0, 3j, True),
    "inf": [math.inf, "text", b"bytes"],
    "set": {1, 2},
    "size": torch.Size([3, 4]),
    "dtype": torch.bfloat16,
    "ordered": (OrderedDict(b=1, a=2),),
    "random": (3, tuple(range(600)), None),
}


def test_values_come_back_exactly_and_nothing_is_pickled(alone, monkeypatch):
    pair = (random(3), {"deep": [random(2, seed=1)]})
    state = {"model": {"w": random(4, 3)}, "values": dict(VALUES), "pair": pair}

    def refuse(*args, **options):
        raise AssertionError("pickled")

    for module, names in ((torch, ("save", "load")), (pickle, ("dumps", "loads", "dump", "load"))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    save(alone, 1, state)
    blank = {
        "model": {"w": torch.zeros(4, 3)},
        "values": dict.fromkeys(VALUES, "blank"),
        "pair": (torch.zeros(3), None),
    }
    reader = load(alone, blank)
    assert (reader.step, reader.saved_by, reader.rejected) == (1, 1, {})
    assert same(blank["model"]["w"], state["model"]["w"])
    assert blank["values"] == VALUES
    assert math.copysign(1, blank["values"]["numbers"][3]) == -1
    assert {key: type(value) for key, value in blank["values"].items()} == {
        key: type(value) for key, value in VALUES.items()
    }
    assert same(blank["pair"][0], pair[0])
    assert same(blank["pair"][1]["deep"][0], pair[1]["deep"][0])


def test_unusual_tensors_and_tied_ones(alone):
    base = random(6, 8)
    state = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "turned": base.T,
        "slice": base[1:4, ::2],
        "expanded": random(1, 3).expand(4, 3),
        "conj": torch.tensor([1 - 2j]).conj(),
        "bf16": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn),
        "complex128": torch.tensor([1 + 2j], dtype=torch.complex128),
        "parameter": torch.nn.Parameter(random(3)),
        "tied": base,
        "also": base,
        "a%b.c": random(2),
    }
    save(alone, 1, state)
    blank = {name: torch.zeros_like(each).contiguous() for name, each in state.items()}
    blank["slice"] = torch.zeros(8, 3).T[:3, ::2]  # of other strides
    blank["conj"] = torch.zeros(1, dtype=torch.complex64).conj()
    load(alone, blank)
    for name, tensor in state.items():
        assert same(blank[name].resolve_conj(), tensor.resolve_conj().detach()), name


def test_a_state_without_a_template_and_parts_of_it(alone, caplog):
    state = {"model": {"w": random(3), "list": [random(2), 7]}, "epoch": 4}
    save(alone, 1, state)
    reader = Reader(alone)
    everything = _load_state_dict_from_keys(storage_reader=reader)
    assert same(everything["model"]["w"], state["model"]["w"])
    assert same(everything["model"]["list"][0], state["model"]["list"][0])
    assert (everything["model"]["list"][1], everything["epoch"]) == (7, 4)
    part = {"epoch": 0, "new": 5}
    with caplog.at_level(logging.WARNING, "ecckpt"):
        dcp.load(part, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert part == {"epoch": 4, "new": 5}
    assert "3 names of step 1 are not loaded: model.w, model.list.0, model.list.1" in caplog.text


def test_a_flat_state_is_not_taken_apart(alone):
    flat = {"model.w": random(3), "config": {"a": {"b": [1, 2]}}}
    save(alone, 1, flat, planner=DefaultSavePlanner(flatten_state_dict=False))
    blank = {"model.w": torch.zeros(3), "config": None}
    load(alone, blank, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert same(blank["model.w"], flat["model.w"])
    assert blank["config"] == {"a": {"b": [1, 2]}}


def test_cached_plans_save_what_is_there_now(alone):
    for step in range(1, 4):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(alone, step, {"w": random(3, seed=step), "step": step}, planner=planner)
    blank = {"w": torch.zeros(3), "step": 0}
    load(alone, blank)
    assert blank["step"] == 3
    assert same(blank["w"], random(3, seed=3))


def test_what_does_not_fit_is_named_before_anything_is_read(alone):
    save(alone, 1, {"a": random(3), "b": random(3), "c": {"1": "x"}, "d": 1})
    blank = {"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.bfloat16), "c": {1: "old"}}
    kind, text = failing(lambda: load(alone, blank))[0]
    assert kind == "StateMismatch"
    assert "2 mismatches: b: saved as torch.float32, here torch.bfloat16" in text
    assert "c.1: under a dict key that is not a text" in text
    assert not blank["a"].any()
    assert blank["c"] == {1: "old"}
    assert "Size mismatch" in failing(lambda: load(alone, {"a": torch.zeros(4)}))[0][1]
    assert "Missing key" in failing(lambda: load(alone, {"e": 1}))[0][1]
    assert "expected BytesStorageMetadata" in failing(lambda: load(alone, {"a": "no tensor"}))[0][1]


class Trap:
    """Something that only pickle would take."""


def test_what_cannot_be_stored_is_refused_by_its_path(alone):
    save(alone, 1, {"x": random(3)})
    for value, text in [
        (Trap(), "test_torch_dcp.Trap (register"),
        (torch.ones(2).to_sparse(), "sparse"),
        ([torch.nn.Linear(1, 1)], "nested.it: cannot store an object with a state"),
    ]:
        state = {"x": random(3), "nested": {"it": value}}
        kind, found = failing(lambda state=state: save(alone, 2 + alone_step(alone), state))[0]
        assert text in found
        assert kind in ("UnsupportedState", "NotImplementedError", "RuntimeError")
    kind, found = failing(lambda: save(alone, 90, {"dcp%notes": 1}))[0]
    assert "an entry of this name" in found
    save(alone, 91, {"x": random(3, seed=1)})
    blank = {"x": torch.zeros(3)}
    assert load(alone, blank).step == 91
    assert same(blank["x"], random(3, seed=1))


def alone_step(checkpointer):
    """A step that was not used yet."""
    used = getattr(checkpointer, "_used_steps", 0)
    checkpointer._used_steps = used + 1
    return used


def test_wrong_use_of_a_writer(alone):
    state = {"x": random(3)}
    writer = Writer(alone, 5)
    dcp.save(state, storage_writer=writer)
    assert failing(lambda: dcp.save(state, storage_writer=writer))[0][0] == "WrongOrder"
    with pytest.raises(errors.WrongOrder, match="step 5 is used a second time"):
        dcp.async_save(state, storage_writer=writer)
    assert "not after step 5" in failing(lambda: save(alone, 5, state))[0][1]
    with pytest.raises(errors.InvalidConfig, match="checkpoint_id='elsewhere'"):
        dcp.save(state, storage_writer=Writer(alone, 6), checkpoint_id="elsewhere")
    own = Writer(alone, 7)
    dcp.save(state, storage_writer=own, checkpoint_id=own.checkpoint_id)
    assert not Writer.validate_checkpoint_id(own.checkpoint_id)
    assert not Reader.validate_checkpoint_id(own.checkpoint_id)
    with pytest.raises(errors.InvalidConfig, match="no common commit"):
        save(alone, 8, state, use_collectives=False)


def test_wrong_use_of_a_reader(alone, cluster):
    empty = Reader(alone)
    assert (empty.step, empty.generation, empty.margin) == (None, None, -1)
    assert "look at Reader.step" in failing(lambda: dcp.load({"x": 1}, storage_reader=empty))[0][1]
    with checkpointer(cluster, "not-by-dcp") as other:
        other.restore({"x": 0})
        other.save(1, {"x": 1}).wait(20)
        assert "not saved through DCP" in failing(lambda: load(other, {"x": 0}))[0][1]
    with checkpointer(cluster, "unread") as fresh:
        assert "save() before restore()" in failing(lambda: save(fresh, 1, {"x": 1}))[0][1]
    save(alone, 1, {"x": 1})
    with pytest.raises(errors.NothingToRestore):
        Reader(alone, step=9)
    with pytest.raises(errors.InvalidConfig, match="checkpoint_id"):
        dcp.load({"x": 0}, storage_reader=Reader(alone), checkpoint_id="else")

    class Own(DefaultLoadPlanner):
        def load_bytes(self, read_item, value):
            raise AssertionError("it would unpickle")

    kind, text = failing(lambda: load(alone, {"x": 0}, planner=Own()))[0]
    assert (kind, "Own expects a value as pickled bytes" in text) == ("InvalidConfig", True)


def test_saves_in_the_background_queue_and_see_no_later_change(alone):
    tensor, counts = torch.zeros(100_000), [0]
    futures = []
    for step in range(1, 6):
        tensor.fill_(step)
        counts[0] = step
        futures.append(
            dcp.async_save({"x": tensor, "n": [counts]}, storage_writer=Writer(alone, step))
        )
    tensor.fill_(-1)
    counts[0] = -1
    save(alone, 6, {"x": tensor, "n": [counts]})  # waits for the one before, by itself
    for future in futures:
        assert future.done()
        future.result()
    futures = [dcp.async_save({"x": tensor * 7, "n": [[7]]}, storage_writer=Writer(alone, 7))]
    futures[0].result(timeout=20)
    blank = {"x": torch.zeros(100_000), "n": None}
    assert load(alone, blank).step == 7
    assert blank["n"] == [[7]]
    assert (blank["x"] == -7).all()


def test_conjugate_and_negative_views_are_stored_as_they_read(alone):
    wave = torch.randn(3, 4, dtype=torch.complex64)
    state = {"conj": wave.conj(), "nested": [{"mH": wave.mH, "imag": wave.conj().imag}]}
    assert state["nested"][0]["imag"].is_neg()
    dcp.async_save(state, storage_writer=Writer(alone, 1)).result(timeout=20)
    blank = {
        "conj": torch.zeros(3, 4, dtype=torch.complex64),
        "nested": [{"mH": torch.zeros(4, 3, dtype=torch.complex64), "imag": torch.zeros(3, 4)}],
    }
    load(alone, blank)
    assert same(blank["conj"], wave.conj().resolve_conj())
    assert same(blank["nested"][0]["mH"], wave.mH.resolve_conj())
    assert same(blank["nested"][0]["imag"], -wave.imag)


def test_a_save_that_does_not_end_keeps_the_next_until_the_deadline(cluster):
    release = threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, write_item):
            assert release.wait(20)
            return super().resolve_data(write_item)

    with checkpointer(cluster, "slow", save_timeout_s=1.0) as one:
        Reader(one)
        state = {"x": random(3)}
        future = dcp.async_save(state, storage_writer=Writer(one, 1), planner=Slow())
        with pytest.raises(errors.SaveTimedOut, match="save of step 1 is not over after 1 s"):
            dcp.async_save(state, storage_writer=Writer(one, 2))
        release.set()
        future.result(timeout=20)
        save(one, 4, state)
        assert Reader(one).step == 4


def test_a_commit_that_does_not_reach_the_agent_is_no_commit():
    with LocalCluster(nodes=1) as cluster:
        node = cluster.nodes[0]

        class Cut(Writer):
            def finish(self, metadata, results):
                os.killpg(cluster.pid(node), signal.SIGKILL)
                await_end([cluster.pid(node)])
                super().finish(metadata, results)

        with checkpointer(cluster, "cut", code="auto") as one:
            Reader(one)
            save(one, 1, {"x": 1})
            cut = failing(lambda: dcp.save({"x": 2}, storage_writer=Cut(one, 2)))
            assert cut[0][0] == "AgentUnreachable"
            assert cluster.client(node).call(INVENTORY, "cut").committed.step == 1
            save(one, 3, {"x": 3})
            inventory = cluster.client(node).call(INVENTORY, "cut")
            assert inventory.committed.step == 3
            assert {header.shard.generation.step for header in inventory.headers} == {3}


def test_others_look_into_it_and_export_it(alone, cluster, tmp_path):
    state = {"model": {"w": random(3), "deep": {"b": random(2)}}, "list": [random(4), 1]}
    save(alone, 1, state)
    found = opened(cluster, alone.run)
    assert set(found) == {"model.w", "model.deep.b", "list.0"}
    assert same(found["model.deep.b"], state["model"]["deep"]["b"])
    export_safetensors(found, tmp_path / "st")
    assert set(read_weights(tmp_path / "st")) == {"w", "deep.b"}
    export_dcp(found, tmp_path / "dcp")
    again = _load_state_dict_from_keys(storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert same(again["list"][0], state["list"][0])
    assert again["list"][1] == 1


def notes(**fields):
    return {"format": 1, "values": [], "paths": {}, "digests": {}} | fields


def stored(shape=(2,), box=None, dtype=torch.float32):
    return StoredTensor.of_tensor("x", {"x": torch.zeros(shape, dtype=dtype)}, box)


@pytest.mark.parametrize(
    ("trees", "text"),
    [
        ([{NOTES: notes(format=2)}], "format 2"),
        ([{NOTES: notes(values=[1])}], "1 is not of type str"),
        ([{NOTES: notes(paths={"a.b": ["a", "c"]})}], "does not join to 'a.b'"),
        ([{NOTES: notes(paths={"99999999": [99999999]})}], "99999999 in the path"),
        ([{NOTES: notes(paths={"": []})}], "does not join to"),
        ([{NOTES: notes(digests={"a": "1"})}], "'1' is not of type int"),
        ([{NOTES: [1]}], "cannot be read"),
        ([{NOTES: notes(), "x": 1}], "neither a tensor nor noted"),
        ([{NOTES: notes(), 7: stored()}], "neither a tensor nor noted"),
        ([{NOTES: notes(), "x": stored(box=box_of((4,), (3,)))}], "not a box of its tensor"),
        ([{NOTES: notes(), "x": stored(box=box_of((4, 1), (0,)))}], "not a box of its tensor"),
        ([{NOTES: notes(), "x": stored(box=box_of((4,), (0,)))}], "x: 2 of 4 elements"),
        ([{NOTES: notes(), "x": []}], "a tensor without boxes"),
        (
            [{NOTES: notes(), "x": stored(box=box_of((4,), (at,)))} for at in (0, 1)],
            "saved twice",
        ),
        (
            [{NOTES: notes(), "x": stored(dtype=each)} for each in (torch.int8, torch.uint8)],
            "not the same kind of tensor",
        ),
        ([{NOTES: notes(digests={"v": each})} for each in (1, 2)], "v: not the same on rank 0"),
    ],
)
def test_shards_that_lie_or_do_not_fit_together(trees, text):
    with pytest.raises((errors.CorruptFragment, errors.StateMismatch), match=text):
        read_contents(trees)


# -- several ranks --------------------------------------------------------------------------------


def test_other_ranks_read_it_after_the_loss_of_its_homes(tmp_path):
    with LocalCluster(nodes=5) as cluster:

        def save_twice(rank):
            with checkpointer(cluster, "world", rank) as one:
                Reader(one)
                save(one, 1, world_state(2))
                dcp.async_save(world_state(2, seed=3), storage_writer=Writer(one, 2)).result(20)

        run_ranks(tmp_path, 2, save_twice)
        cluster.replace(*cluster.nodes[:2])

        def read(rank):
            with checkpointer(cluster, "world", rank) as one:
                blank = world_state(dist.get_world_size(), blank=True)
                reader = load(one, blank)
                assert_same_world(blank, world_state(dist.get_world_size(), seed=3))
                return reader.step, reader.saved_by

        for ranks in (1, 3):
            assert run_ranks(tmp_path, ranks, read) == [(2, 2)] * ranks


def test_a_save_that_was_refused_is_not_what_the_next_start_gets(cluster, tmp_path):
    def refused(rank):
        with checkpointer(cluster, "refused", rank) as one:
            Reader(one)
            save(one, 1, world_state(2))
            return failing(lambda: save(one, 2, world_state(2) | {"same": rank}))

    assert run_ranks(tmp_path, 2, refused)[0][0][0] == "StateMismatch"

    def again(rank):
        with checkpointer(cluster, "refused", rank) as one:
            return Reader(one).step

    assert run_ranks(tmp_path, 2, again) == [1, 1]


def test_no_rank_is_left_without_the_news_of_a_failure(cluster, tmp_path):
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item):
            raise OSError("no such memory")

    def act(rank):
        heard = []
        with checkpointer(cluster, "failing", rank) as one:
            Reader(one)
            save(one, 1, world_state(2))
            planner = Failing() if rank == 1 else None
            heard.append(failing(lambda: save(one, 2, world_state(2, seed=2), planner=planner)))
            state = world_state(2) | {"same": rank, "also": torch.tensor([rank])}
            heard.append(failing(lambda: save(one, 3, state)))
            heard.append(failing(lambda: save(one, 4 + rank, world_state(2))))
            heard.append(failing(lambda: save(one, 6, {"bad": Trap()} if rank else {})))
            heard.append(failing(lambda: save(one, 7, world_state(2), no_dist=True)))
            blank = world_state(2, blank=True)
            assert Reader(one).step == 1  # no generation that was refused
            save(one, 8, world_state(2, seed=8))
            heard.append(failing(lambda: load(one, blank | {"none": rank})))
            blank = world_state(2, blank=True)
            assert load(one, blank).step == 8
            assert_same_world(blank, world_state(2, seed=8))
            short = {"epoch": 0} if rank else {"epoch": 0, "model": {"plain": torch.zeros(4)}}
            heard.append(failing(lambda: load(one, short)))
        return heard

    first, second = run_ranks(tmp_path, 2, act)
    planner, values, steps, value, lonely, missing, shape = first
    assert [each for each in first if each is not lonely] == [
        each for at, each in enumerate(second) if at != 4
    ]
    assert planner == {1: ("OSError", "no such memory")}
    assert values[0][0] == "StateMismatch"
    assert "same: not the same on rank 0 and rank 1" in values[0][1]
    assert "also: not the same on rank 0 and rank 1" in values[0][1]
    assert "other ranks saved" in steps[0][1]
    assert value[1][0] == "UnsupportedState"
    assert "1 of 2 ranks saved" in lonely[0][1]
    assert "rank 1 of the run saves as rank 0" in second[4][0][1]
    assert "Missing key in checkpoint" in missing[0][1]
    assert "Size mismatch" in shape[0][1]


def test_an_agent_or_a_rank_that_is_killed(tmp_path):
    with LocalCluster(nodes=4) as cluster:

        def act(rank):
            with checkpointer(cluster, "killed", rank, save_timeout_s=10.0) as one:
                Reader(one)
                save(one, 1, world_state(2))
                if rank == 1:
                    os.killpg(cluster.pid(cluster.nodes[1]), signal.SIGKILL)
                    await_end([cluster.pid(cluster.nodes[1])])
                dist.barrier()
                heard = failing(lambda: save(one, 2, world_state(2, seed=2)))
                save(one, 3, world_state(2, seed=3))
                if rank == 1:
                    die()
                started_s = time.monotonic()
                # From gloo, whose words change, or as what it made of DCP's gathering.
                with pytest.raises((RuntimeError, CheckpointException)):
                    save(one, 4, world_state(2, seed=4))
                assert time.monotonic() - started_s < 20
                return heard

        heard, none = run_ranks(tmp_path, 2, act)
        assert none is None
        assert heard[1][0] == "AgentUnreachable"


def training(ranks, *, steps):
    """A model under FSDP2 with AdamW, trained a little: 13 rows over any number of ranks."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(3, 7)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


def whole(states):
    """Every tensor as all ranks together have it, every value, by name."""
    flat, _ = flatten_state_dict(states)
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in flat.items()
    }


@pytest.mark.long
def test_fsdp2_and_meshes_of_two_dimensions_on_other_numbers_of_ranks(tmp_path):
    preload()
    placed = {
        "both": [Shard(0), Shard(1)],
        "half": [Replicate(), Shard(0)],
        "twice": [Shard(0), Shard(0)],
    }
    tensors = {name: random(9, 6, seed=at) for at, name in enumerate(placed)}
    with LocalCluster(nodes=4) as cluster:

        def save_all(rank):
            with checkpointer(cluster, "fsdp2", rank) as one:
                Reader(one)
                weights, moments = get_state_dict(*training(4, steps=3))
                mesh = init_device_mesh("cpu", (2, 2))
                other = {
                    name: distribute_tensor(tensors[name], mesh, placements)
                    for name, placements in placed.items()
                }
                state = {"model": weights, "optim": moments, "other": other}
                save(one, 1, state)
                return whole(state)

        saved = run_ranks(tmp_path, 4, save_all)[0]
        cluster.replace(*cluster.nodes[1:3])

        def load_all(rank):
            ranks = dist.get_world_size()
            with checkpointer(cluster, "fsdp2", rank) as one:
                weights, moments = get_state_dict(*training(ranks, steps=0))
                mesh = init_device_mesh("cpu", (ranks,))
                other = {
                    name: distribute_tensor(torch.zeros(9, 6), mesh, [Shard(1)]) for name in placed
                }
                state = {"model": weights, "optim": moments, "other": other}
                load(one, state)
                return whole(state)

        for ranks in (1, 3):
            for found in run_ranks(tmp_path, ranks, load_all):
                assert found.keys() == saved.keys()
                for name, each in saved.items():
                    tensor = isinstance(each, torch.Tensor)
                    assert same(found[name], each) if tensor else found[name] == each, name


# -- as users run it ------------------------------------------------------------------------------


def example():
    """The program of the documentation."""
    text = (Path(__file__).parents[3] / "docs" / "DCP.md").read_text()
    return text.split("```python\n")[1].split("```")[0]


@pytest.mark.long
@pytest.mark.timeout(300)  # three starts of torchrun
def test_the_example_of_the_documentation(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(example() + "\nprint('started at', first, flush=True)\n")
    with LocalCluster(nodes=1) as cluster:
        settings = {"ECCKPT_ROOT": str(cluster.root(cluster.nodes[0])), "OMP_NUM_THREADS": "1"}
        for ranks, first in ((2, 0), (2, 10), (1, 20)):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            done = subprocess.run(
                [*command, f"--nproc-per-node={ranks}", str(program)],
                env=os.environ | settings,
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert done.stdout.count(f"started at {first}") == ranks


@pytest.mark.long
def test_saves_in_dcps_process_queue_and_are_committed(tmp_path):
    process = AsyncCheckpointerType.PROCESS
    with LocalCluster(nodes=4) as cluster:

        def act(rank):
            with checkpointer(cluster, "process", rank, save_timeout_s=60.0) as one:
                Reader(one)
                futures = []
                for step in range(1, 4):
                    writer = Writer(one, step)
                    state = world_state(2, seed=step)
                    futures.append(
                        dcp.async_save(
                            state, storage_writer=writer, async_checkpointer_type=process
                        )
                    )
                for future in futures:
                    future.result(60)
                writer = Writer(one, 4)
                bad = dcp.async_save(
                    {"one": rank}, storage_writer=writer, async_checkpointer_type=process
                )
                with pytest.raises(CheckpointException) as caught:
                    bad.result(60)
                with pytest.raises(errors.WrongOrder, match="a second time"):
                    dcp.async_save({}, storage_writer=writer, async_checkpointer_type=process)
                dcp.save(world_state(2, seed=5), storage_writer=Writer(one, 5))
                return str(causes(caught)[0])

        heard = run_ranks(tmp_path, 2, act, timeout_s=100)
        assert "one: not the same on rank 0 and rank 1" in heard[0]
        assert heard[0] == heard[1]
        cluster.kill(*cluster.nodes[:2])
        with checkpointer(cluster, "process", 2, code="auto") as one:
            reader = Reader(one)
            assert reader.step == 5
            full = _load_state_dict_from_keys(storage_reader=reader)
            assert same(full["model"]["uneven"], random(13, 7, seed=51))
