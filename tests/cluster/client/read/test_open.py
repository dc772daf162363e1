"""Looking into a checkpoint: what is joined, what is proven, and how little is read."""

import os
import signal
import socket
import time
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import ecckpt
from ecckpt.errors import (
    AgentUnreachable,
    InvalidConfig,
    NothingToRestore,
    StateMismatch,
    TooFewFragments,
)
from ecckpt.protocol.messages.save import Commit
from ecckpt.protocol.verbs import COMMIT
from ecckpt.state.tensors.dtypes import STORED
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.stored import (
    BLOCK_BYTES,
    as_ranks,
    damage,
    distribute,
    files_of,
    opened,
    shard_bytes,
    store,
)
from tests.support.tensors import random, same
from tests.support.worlds import World, states_for


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=6) as cluster:
        yield cluster


# -- what is there --------------------------------------------------------------------------------


def test_what_a_checkpointer_saved_is_read_without_restoring(cluster):
    states = states_for(6, seed=1)
    with World(cluster, run="real", code=(3, 2)) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(4, states))
    found = opened(cluster, "real")
    assert (found.generation.step, found.world_size) == (4, 6)
    for rank, state in enumerate(states):
        assert same(found.as_rank(rank)["weights"], state["weights"])
        assert found.values_of(rank)["progress"] == state["progress"]
        stand_in = found.values_of(rank)["weights"]
        assert (stand_in.device.type, stand_in.shape) == ("meta", state["weights"].shape)
    assert "generation 1.4." in repr(found)
    with World(cluster, run="real", code=(3, 2)) as world:  # nothing was fenced or changed
        assert {each.timeline for each in world.restore(states)} == {2}


def test_every_dtype_and_shape_comes_back(cluster):
    raw = torch.arange(240, dtype=torch.uint8) % 2
    state = {str(dtype)[6:]: raw.view(dtype).reshape(5, -1) for dtype in STORED}
    state |= {"scalar": torch.tensor(2.5), "truth": torch.tensor(True)}
    state |= {"empty": torch.empty(0, 3), "nothing": torch.empty(2, 0, 4)}
    store(cluster, [shard_bytes({"model": state})], run="dtypes")
    found = opened(cluster, "dtypes")
    assert set(found) == {f"model.{name}" for name in state}
    for name, tensor in state.items():
        assert same(found[f"model.{name}"], tensor), name
        assert found.shape(f"model.{name}") == tuple(tensor.shape)
        assert found.dtype(f"model.{name}") == tensor.dtype
    assert found.slice("model.nothing")[0:1].shape == (1, 0, 4)


def test_containers_of_every_kind_are_in_the_tree(cluster):
    tree = {
        "last": deque([1, (2, random(2))], maxlen=5),
        "seen": Counter(a=2),
        "lists": defaultdict(list, x=[1]),
        "order": OrderedDict(b=1, a={3: random(1)}),
    }
    store(cluster, [shard_bytes(tree)], run="tree")
    found = opened(cluster, "tree").tree_of(0, lambda name: name)
    assert found["last"] == deque([1, (2, "last.1.1")])
    assert (found["last"].maxlen, found["seen"]) == (5, Counter(a=2))
    assert (found["lists"].default_factory, found["lists"]["x"]) == (list, [1])
    assert list(found["order"].items()) == [("b", 1), ("a", {3: "order.a.3"})]


def test_tied_tensors_have_both_names(cluster):
    weight = random(7, 3)
    store(cluster, [shard_bytes({"a": weight, "b": weight, "c": weight.clone()})], run="tied")
    found = opened(cluster, "tied")
    assert list(found) == ["a", "c", "b"]
    assert (len(found), "b" in found, found.aliases) == (3, True, {"b": "a"})
    assert same(found["b"], weight)
    assert same(found.slice("b")[2:4], weight[2:4])


def test_tied_parts_stay_tied_though_empty_ones_are_tied_to_nothing(cluster):
    weight = random(3, 2)  # of four ranks, the last has no row

    def state(_):
        part = distribute(weight, [Shard(0)])
        return {"a": part, "b": part}

    store(cluster, as_ranks(4, state), run="tied-parts")
    found = opened(cluster, "tied-parts")
    assert found.aliases == {"b": "a"}
    assert same(found["b"], weight)


def test_names_and_slices_that_are_not_there(cluster):
    store(cluster, [shard_bytes({"x": random(4), "s": torch.tensor(1)})], run="small")
    found = opened(cluster, "small")
    with pytest.raises(KeyError):
        found["y"]
    with pytest.raises(InvalidConfig, match="no dimension"):
        found.slice("s")
    with pytest.raises(InvalidConfig, match="only"):
        found.slice("x")[::2]
    with pytest.raises(InvalidConfig, match="there is no rank 1"):
        found.as_rank(1)
    assert found.slice("x")[3:1].shape == (0,)
    assert same(found.slice("x")[-2:], found["x"][2:])
    assert len(found.slice("x")) == 4


# -- parts ----------------------------------------------------------------------------------------

CUTS = {
    "rows": ([Shard(0)], (4,)),
    "columns": ([Shard(1)], (4,)),
    "whole": ([Replicate()], (4,)),
    "grid": ([Shard(0), Shard(1)], (2, 2)),
    "hybrid": ([Replicate(), Shard(0)], (2, 2)),
    "twice": ([Shard(0), Shard(0)], (2, 2)),
}


def test_parts_are_joined_wherever_they_are(cluster):
    tensors = {f"{cut}{rows}": random(rows, 5, 3) for cut in CUTS for rows in (9, 3)}
    tensors["scalar"] = torch.tensor(7.0)

    def state(rank):
        parts = {
            name: distribute(tensors[name], *CUTS[name[:-1]])
            for name in tensors
            if name[:-1] in CUTS
        }
        return {"model": {**parts, "scalar": distribute(tensors["scalar"], [Replicate()])}}

    store(cluster, as_ranks(4, state), run="parts")
    found = opened(cluster, "parts")
    assert len(found) == len(tensors)
    for name, tensor in tensors.items():
        assert same(found[f"model.{name}"], tensor), name
        for start, stop in [(0, 1), (1, 3), (2, 8)] if tensor.dim() else []:
            assert same(found.slice(f"model.{name}")[start:stop], tensor[start:stop]), name


def test_tensors_that_ranks_disagree_on_are_refused_by_name(cluster):
    def state(rank):
        return {"own": random(3, seed=rank), "same": random(3), "sizes": random(rank + 1)}

    store(cluster, [shard_bytes(state(rank)) for rank in range(2)], run="differ")
    found = opened(cluster, "differ")
    assert same(found["same"], random(3))
    with pytest.raises(StateMismatch, match=r"own: rank 1 has other values than rank 0"):
        found["own"]
    with pytest.raises(StateMismatch, match=r"sizes: torch.float32 of shape \[1\] on rank 0"):
        found.shape("sizes")
    for rank in range(2):
        assert same(found.as_rank(rank)["own"], state(rank)["own"])
        assert same(found.as_rank(rank)["sizes"], state(rank)["sizes"])


def test_one_name_for_two_meshes_is_no_replica(cluster):
    """Two stages of a pipeline call different tensors alike: both are part 0 of some mesh."""

    def stage(rank):
        parts = {"x": random(4, 2, seed=rank), "norm": torch.ones(3)}
        return {name: distribute(tensor, [Shard(0)]) for name, tensor in parts.items()}

    shards = [as_ranks(1, lambda _, stage_rank=rank: stage(stage_rank))[0] for rank in range(2)]
    store(cluster, shards, run="stages")
    found = opened(cluster, "stages")
    assert same(found["norm"], torch.ones(3))
    with pytest.raises(StateMismatch, match="x: rank 1 has other values than rank 0"):
        found["x"]


# -- how little is read ---------------------------------------------------------------------------


def test_a_slice_reads_only_its_blocks(cluster):
    tensor = random(4096, 64)  # 256 blocks

    def state(rank):
        return {"big": distribute(tensor, [Shard(0)]), "more": random(200_000, seed=rank)}

    store(cluster, as_ranks(2, state), run="slices")
    found = opened(cluster, "slices")
    header_bytes = found.pulled_bytes
    assert header_bytes <= 2 * 2 * BLOCK_BYTES
    assert same(found.slice("big")[100:110], tensor[100:110])
    assert found.pulled_bytes - header_bytes <= 2 * BLOCK_BYTES
    before = found.pulled_bytes
    assert same(found["big"], tensor)
    assert found.pulled_bytes - before <= tensor.nbytes + 8 * BLOCK_BYTES


def test_small_tensors_share_their_blocks(cluster):
    state = {f"x{index}": random(3, seed=index) for index in range(300)}
    store(cluster, [shard_bytes(state)], run="many")
    found = opened(cluster, "many")
    assert all(same(found[name], tensor) for name, tensor in state.items())
    assert found.pulled_bytes <= len(shard_bytes(state)) + BLOCK_BYTES


# -- what is lost or damaged ----------------------------------------------------------------------


@pytest.fixture
def two_ranks(cluster6):
    tensor = random(1000, 64)
    store(cluster6, as_ranks(2, lambda rank: {"x": distribute(tensor, [Shard(0)])}))
    return cluster6, tensor


def test_three_lost_nodes_change_nothing(two_ranks):
    cluster, tensor = two_ranks
    found = opened(cluster, timeout_s=2.0)
    cluster.kill("n0", "n1")  # both homes, while it is open
    assert same(found["x"], tensor)
    cluster.kill("n3")
    assert same(opened(cluster)["x"], tensor)
    assert same(opened(cluster).slice("x")[499:501], tensor[499:501])
    cluster.kill("n4")
    with pytest.raises(NothingToRestore, match="lost"):
        opened(cluster)


def test_damaged_blocks_are_read_elsewhere_or_decoded(two_ranks):
    cluster, tensor = two_ranks
    home = files_of(cluster, "n0", 0)[-1]
    damage(home, 40_000)  # fragment 0: its holder has it
    damage(home, 60_000)
    found = opened(cluster)
    assert same(found["x"], tensor)
    fragment = files_of(cluster, "n1", 0)[0]
    damage(fragment, 40_000)  # nobody has it now: any three others of its row
    damage(files_of(cluster, "n2", 0)[1], 40_000)
    assert same(opened(cluster)["x"], tensor)
    for node, index in [("n3", 2), ("n4", 3)]:
        damage(files_of(cluster, node, 0)[index], 40_000)
    found = opened(cluster)
    assert same(found["x"], tensor)  # the home copy still has fragments 1 and 2, n5 has 4
    damage(files_of(cluster, "n5", 0)[4], 40_000)
    found = opened(cluster)
    with pytest.raises(TooFewFragments, match=r"block 9 of fragment 0 .*fragment 0 at n0"):
        found["x"]
    assert same(opened(cluster).slice("x")[500:], tensor[500:])  # rank 1's


def test_a_node_that_hangs_costs_one_deadline(two_ranks):
    cluster, tensor = two_ranks
    found = opened(cluster, timeout_s=0.5)
    os.killpg(cluster.pid("n0"), signal.SIGSTOP)
    started_s = time.monotonic()
    try:
        assert same(found.slice("x")[:300], tensor[:300])
        assert same(found["x"], tensor)
    finally:
        os.killpg(cluster.pid("n0"), signal.SIGCONT)
    assert time.monotonic() - started_s < 5


def test_a_generation_that_goes_while_it_is_open(cluster6):
    store(cluster6, [shard_bytes({"x": random(50_000)})], step=1)
    found = opened(cluster6)
    store(cluster6, [shard_bytes({"x": random(50_000, seed=1)})], step=2)
    newest = opened(cluster6)
    assert (found.generation.step, newest.generation.step) == (1, 2)
    assert opened(cluster6, step=1).generation.step == 1
    for node in cluster6.nodes:
        cluster6.client(node).call(COMMIT, Commit("test", newest.generation))
    with pytest.raises(TooFewFragments, match="0 good fragments"):
        found["x"]
    assert same(newest["x"], random(50_000, seed=1))


# -- agents ---------------------------------------------------------------------------------------


@contextmanager
def silent_address():
    """Somebody who takes a request and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_nothing_to_open(cluster):
    with pytest.raises(NothingToRestore, match="run 'unknown': nothing to restore"):
        opened(cluster, "unknown")
    store(cluster, [shard_bytes({"x": random(3)})], run="steps")
    with pytest.raises(NothingToRestore):
        opened(cluster, "steps", step=7)
    with pytest.raises(InvalidConfig, match="no agents"):
        ecckpt.open("test", [])
    with pytest.raises(InvalidConfig, match="not a usable name"):
        ecckpt.open("../test", cluster.addresses())


def test_agents_that_do_not_answer_are_passed_over(cluster):
    store(cluster, [shard_bytes({"x": random(3)})], run="answers")
    with silent_address() as silent:
        addresses = [silent, "127.0.0.1:1", *cluster.addresses()]
        assert same(ecckpt.open("answers", addresses, timeout_s=0.5)["x"], random(3))
        with pytest.raises(AgentUnreachable):
            ecckpt.open("answers", [silent, "127.0.0.1:1"], timeout_s=0.2)
        with pytest.raises(NothingToRestore, match=r"agent 127\.0\.0\.1:1"):
            ecckpt.open("unknown", [cluster.addresses()[0], "127.0.0.1:1"])
