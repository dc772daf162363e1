"""Plain tensors that all ranks have: stored once, back on any number of ranks, checked."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import nn

from ecckpt.client.effects import StoreAgree, StoreDrop, StoreGet, StorePut, StoreSubtract
from ecckpt.client.save.replica_check import ReplicaCheck
from ecckpt.coding.crc32c import checksum_many, crc32c
from ecckpt.errors import InvalidConfig, SaveFailed
from ecckpt.format.ids import ShardId
from ecckpt.state.file.shard import read_shard
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.snapshot.replicas import Claim, Replicas
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import generation
from tests.support.commits import GEN, Commits
from tests.support.performers import drive, explore
from tests.support.reshaping import restore_as
from tests.support.worlds import World


class Ema:
    """An object of which nothing but its state is known."""

    def __init__(self, fill):
        self.values = {"mean": torch.full((9, 3), float(fill)), "count": torch.tensor(fill)}

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


def state_of(rank, seed=1):
    """Model, optimizer and averages alike on all ranks; a generator and a position of each."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 1, bias=False))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 13)).square().mean().backward()
    optim.step()
    return {
        "model": model,
        "tied": model[0].weight,
        "optim": optim,
        "ema": Ema(seed),
        "images": torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last),
        "progress": {"step": seed},
        "mine": torch.full((1000,), rank),
    }


SAME = ("model", "tied", "optim", "ema", "images")


def planned(state, rank, ranks, patterns=SAME, previous=None):
    plan = plan_shard(state, previous=previous, replicas=Replicas(patterns, rank, ranks))
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return plan, bytes(target)


def tensors_of(state):
    found = dict(state["model"].state_dict())
    found |= {f"tied.{name}": each for name, each in {"w": state["tied"]}.items()}
    for at, moments in state["optim"].state_dict()["state"].items():
        found |= {f"optim.{at}.{name}": each for name, each in moments.items()}
    return found | {f"ema.{n}": v for n, v in state["ema"].values.items()} | {"i": state["images"]}


def assert_same(one, other):
    mine, theirs = tensors_of(one), tensors_of(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


# -- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_element_is_stored_by_one_rank_and_shares_are_even(ranks):
    shards = [read_shard(memoryview(planned(state_of(r), r, ranks)[1])) for r in range(ranks)]
    for name, whole in shards[0].shardings.items():
        rows = [shard.tensors[name].numel() for shard in shards]
        assert sum(rows) == torch.Size(whole.shape).numel()
        assert (
            max(rows) - min(rows) <= torch.Size(whole.shape).numel() // whole.shape[whole.held[0]]
        )
    assert ("ema.mean" in shards[0].shardings) == (ranks > 1)
    # What belongs to a rank is never taken for anybody else's, what has one element is not cut.
    for rank, shard in enumerate(shards):
        assert shard.tensors["mine"].eq(rank).all()
        assert not {"mine", "ema.count"} & shard.shardings.keys()


@pytest.mark.parametrize(
    ("patterns", "covered"),
    [
        (("model",), {"model.0.weight", "model.weight"}),
        (("model.0",), {"model.0.weight"}),
        (("mod*",), {"model.0.weight", "model.weight", "models"}),
        (("*weight",), {"model.0.weight", "model.weight"}),
        (("*", "!*.0.*"), {"model.weight", "models", "other"}),
        (("!model", "model.0"), {"model.0.weight"}),
        ((), set()),
    ],
)
def test_patterns(patterns, covered):
    paths = [("model", "0.weight"), ("model", "weight"), ("models",), ("other",)]
    names = {".".join(path) for path in paths if Replicas(patterns, 0, 2).covers(path)}
    assert names == covered


def test_scalars_are_stored_by_every_rank_and_compared():
    def state(count, other=0.0):
        return {"model": {"count": torch.tensor(count), "w": torch.full((3,), other)}, "n": 1}

    plans = [planned(state(count), at, 2, patterns=("model",)) for at, count in ((0, 1), (1, 2))]
    mine, theirs = (plan.claim for plan, _ in plans)
    assert mine.differences(theirs.pack()) == "model.count"
    assert read_shard(memoryview(plans[1][1])).tensors["model.count"].item() == 2
    (same, _), (again, _) = (planned(state(1), at, 2, patterns=("model",)) for at in (0, 1))
    assert same.claim.digest == again.claim.digest
    assert planned({"x": torch.tensor(1)}, 0, 1, patterns=("x",))[0].claim is None


@pytest.mark.parametrize("pattern", ["modle", "modle.0.weight", "!mode"])
def test_a_pattern_that_names_nothing_is_refused(pattern):
    with pytest.raises(InvalidConfig, match="names nothing in a state of model, tied"):
        planned(state_of(0), 0, 2, patterns=("model", pattern))


def test_one_that_names_what_is_yet_to_come_is_not():
    model = nn.Linear(2, 2)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    assert planned(state, 0, 2, patterns=("optim.state",))[0].claim is None


@pytest.mark.parametrize(("saved", "ranks"), [(2, 2), (3, 2), (2, 3), (4, 1)])
def test_restored_on_any_number_of_ranks(saved, ranks):
    states = [state_of(rank) for rank in range(saved)]
    for state in states:
        del state["mine"]  # belongs to a rank, and could not be handed over
    shards = [planned(state, rank, saved)[1] for rank, state in enumerate(states)]
    for rank in range(ranks):
        blank = state_of(rank, seed=2)
        del blank["mine"]
        restore_as(shards, blank, rank=rank, world=ranks)
        assert_same(blank, states[0])


# -- the claim ------------------------------------------------------------------------------------


def claim_of(rank, change=lambda state: None, **options) -> Claim:
    state = state_of(rank)
    change(state)
    claim = planned(state, rank, 2, **options)[0].claim
    assert claim is not None
    return claim


def flip(tensor, at=0):
    """One bit of one element, the least."""
    with torch.no_grad():
        tensor.view(-1).view(torch.uint8)[at] ^= 1


def test_equal_states_make_equal_claims_whatever_each_rank_stores():
    assert claim_of(0).digest == claim_of(1).digest
    assert claim_of(0, lambda state: state["mine"].add_(5)).digest == claim_of(1).digest


@pytest.mark.parametrize("at", [0, 4 * 13 * 7 - 4])
def test_one_bit_anywhere_makes_another_claim_and_its_path_is_named(at):
    for rank in (0, 1):
        wrong = claim_of(rank, lambda state: flip(state["model"][0].weight, at))
        assert wrong.digest != claim_of(0).digest
        assert wrong.differences(claim_of(0).pack()) == "model.0.weight"


def test_layout_is_no_difference():
    other = claim_of(1, lambda state: state.update(images=state["images"].contiguous()))
    assert other.digest == claim_of(0).digest


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["ema"].values.pop("mean"),
        lambda state: state["ema"].values.update(mean=torch.ones(27)),
        lambda state: state["ema"].values.update(mean=torch.ones(9, 3).int()),
    ],
)
def test_other_tensors_make_another_claim(change):
    other = claim_of(1, change)
    assert other.digest != claim_of(0).digest
    assert "or other names, shapes or dtypes" in other.differences(claim_of(0).pack())


def test_many_differences_are_counted():
    other = claim_of(1, lambda state: [flip(each) for each in state["model"].parameters()])
    other_too = claim_of(1, lambda state: flip(state["images"].permute(0, 2, 3, 1)))
    assert other_too.differences(other.pack()).count(",") == 3
    everything = claim_of(1, lambda state: state.update(state_of(1, seed=9)))
    assert everything.differences(claim_of(0).pack()).endswith(" more")


def test_a_kept_plan_makes_a_new_claim():
    state = state_of(0)
    first, _ = planned(state, 0, 2)
    flip(state["model"][0].weight)
    second, _ = planned(state, 0, 2, previous=first)
    assert second._layout is first._layout
    assert second.claim.differences(first.claim.pack()) == "model.0.weight"


# -- claims of several ranks, compared in any order ------------------------------------------------


class Words:
    """A claim that is a word."""

    def __init__(self, word):
        self.digest = self.word = word

    def pack(self):
        return self.word

    def differences(self, packed):
        return f"{self.word!r} is not {packed!r}"


def checked(words):
    """A save of ranks that claim these words, on its way."""
    commits, keys = Commits(len(words), timeout_s=60.0), [[] for _ in words]
    commits.state = ["protected"] * len(words)
    for rank, word in enumerate(words):
        check = ReplicaCheck(ShardId("test", GEN, rank), Words(word), keys[rank])
        commits.follow(rank, check=check)
    return commits, keys


@pytest.mark.parametrize("words", [(b"a", b"a"), (b"a", b"b")])
def test_claims_are_compared_in_every_order(words):
    def play(choose):
        commits, keys = checked(words)
        kinds = (StoreAgree, StorePut, StoreGet, StoreSubtract)
        drive(commits.performers, commits.all_left, choose, among=kinds)
        if len(set(words)) == 1:
            assert commits.outcomes() == [None, None]
            assert keys == [[], []]
            assert not [key for key in commits.store.names() if key.startswith("claim/")]
            return
        assert commits.outcomes() == [SaveFailed] * 2
        # The one that differs says it, the other finds its words, unless it ended before them.
        texts = [str(handle.error) for handle in commits.handles.values()]
        assert any("not the same on rank" in text and "b'" in text for text in texts)
        assert commits.told == []
        assert {key.split("/")[-1] for each in keys for key in each} == {
            "digest",
            "sums",
            "verdict",
        }

    assert explore(play) > 1


def test_a_claim_that_is_not_told_in_time_is_named_without_its_paths():
    commits, _ = checked([b"a", b"b"])
    commits.performers[0].gates[StorePut] = lambda effect: not effect.key.endswith("/sums")
    drive(commits.performers, lambda: commits.handles[1].done)
    assert "rank 0 did not tell what" in str(commits.handles[1].error)


def test_keys_of_a_failed_save_go_after_the_next_commit():
    commits = Commits(1)
    keys: list[str] = []
    for state, step in (("failed", 1), ("protected", 2)):
        commits.state = [state]
        gen = generation(step=step)
        check = ReplicaCheck(ShardId("test", gen, 0), Words(b"a"), keys)
        commits.follow(0, gen, check=check)
        drive(commits.performers, commits.all_left)
        assert len(keys) == (2 if step == 1 else 0)
    assert not [key for key in commits.store.names() if key.startswith("claim/")]


def test_a_store_that_is_lost_while_keys_go_costs_no_commit():
    commits, _ = checked([b"a"])
    lost = SaveFailed("the ranks' store: gone")
    commits.performers[0].fail = lambda each: lost if isinstance(each, StoreDrop) else None
    drive(commits.performers, commits.all_left)
    assert commits.outcomes() == [None]
    assert "the replica check: the ranks' store: gone" in commits.performers[0].log()[0]


# -- the checksums --------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_checksums_of_ranges_however_threads_cut_them(threads, monkeypatch):
    monkeypatch.setattr("ecckpt.coding.crc32c.usable_threads", lambda threads: threads)
    noise = torch.randint(0, 256, (3_000_000,), dtype=torch.uint8)
    sizes = [0, 1, 63, 64, 4096, 262_143, 300_001, 0, 1_500_000, 5]
    starts = [0, *itertools.accumulate(sizes)]
    parts = [noise[start:end] for start, end in itertools.pairwise(starts)]
    spans = torch.tensor([[part.data_ptr(), len(part)] for part in parts]).numpy()
    sums = checksum_many(spans, threads=threads)
    assert sums.tolist() == [crc32c(part.numpy()) for part in parts]


# -- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=3) as cluster:
        yield cluster


def run_states(ranks, seed):
    return [state_of(rank, seed) for rank in range(ranks)]


def test_a_run_saves_once_and_restores_everywhere(cluster: LocalCluster) -> None:
    states = run_states(3, seed=1)
    with World(cluster, run="once", code=(1, 1), replicated=SAME) as world:
        world.restore(states)
        handles = world.save(1, states)
        assert all(handle.wait(30) for handle in handles)
        assert [
            world._store.check([f"ecckpt/{handles[0].generation.session}/{key}"])
            for key in (
                f"claim/{handles[0].generation}/digest",
                f"claim/{handles[0].generation}/sums",
            )
        ] == [False, False]
    blank = run_states(3, seed=2)
    with World(cluster, run="once", code=(1, 1), replicated=SAME) as world:
        assert [each.step for each in world.restore(blank)] == [1, 1, 1]
    for state, expected in zip(blank, states, strict=True):
        assert_same(state, expected)
        assert torch.equal(state["mine"], expected["mine"])


def test_a_claim_that_is_wrong_by_a_bit_fails_the_save_everywhere(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    good, bad = run_states(3, seed=1), run_states(3, seed=3)
    flip(bad[1]["model"][0].weight)
    with World(cluster, run="wrong", code=(1, 1), replicated=SAME) as world:
        world.restore(good)
        assert all(handle.wait(30) for handle in world.save(1, good))
        for handle in world.save(2, bad):
            with pytest.raises(SaveFailed, match=r"rank \d as on rank \d, .*: model\.0\.weight"):
                handle.wait(30)
    blank = run_states(3, seed=2)
    with World(cluster, run="wrong", code=(1, 1), replicated=SAME) as world:
        assert [each.step for each in world.restore(blank)] == [1, 1, 1]
    assert_same(blank[2], good[2])


def test_all_ranks_must_claim_alike(cluster: LocalCluster) -> None:
    with pytest.raises(InvalidConfig, match="list of texts"):
        World(cluster, ranks=1, run="text", replicated="model")
