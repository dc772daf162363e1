"""Loading: in place, every mismatch listed, and nothing changed if there is one."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from ecckpt.errors import StateMismatch, UnsupportedState
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import check, load
from ecckpt.state.snapshot.plan import plan_shard


def shard_of(state):
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return read_shard(memoryview(target))


def problems(live, saved):
    """The problems of loading ``saved`` into ``live``, neither check nor load changing it."""
    before = copy.deepcopy(live)
    found = []
    for restore in (check, load):
        with pytest.raises(StateMismatch) as caught:
            restore(live, shard_of(saved))
        found.append(caught.value.problems)
    assert repr(live) == repr(before)
    assert found[0] == found[1]
    return list(found[0])


def test_values_are_replaced_inside_the_users_containers():
    inner, losses = {"new": 1}, [9]
    live = {"progress": {"inner": inner, "losses": losses, "t": (1,)}, "w": torch.zeros(1), "n": 0}
    progress = live["progress"]
    saved = {
        "progress": {"inner": {"new": 2}, "losses": [1, 2], "t": (2, 3), "more": None},
        "w": torch.ones(1),
        "n": 7,
    }
    load(live, shard_of(saved))
    assert live == saved
    assert live["progress"] is progress
    assert progress["inner"] is inner
    assert progress["losses"] is losses


def test_values_may_change_their_kind_and_types_of_keys_follow_the_save():
    live = {"w": torch.zeros(1), "x": [1], "y": {1: "int"}, "z": OrderedDict(a=1), "l": [[1], 2]}
    saved = {"w": torch.ones(1), "x": {"a": 1}, "y": {True: "bool"}, "z": {"a": 2}, "l": [3]}
    load(live, shard_of(saved))
    assert repr(live["y"]) == "{True: 'bool'}"
    assert repr(live["z"]) == "{'a': 2}"
    assert (live["x"], live["l"]) == ({"a": 1}, [3])


@pytest.mark.parametrize("inside", [True, False])
def test_tensors_of_inference_mode_are_filled_inside_and_outside_of_it(inside):
    with torch.inference_mode():
        live = {"w": torch.zeros(3), "model": nn.Linear(2, 2), "t": torch.zeros(2, 3).t()}
    live["plain"] = torch.zeros(2)
    saved = {"w": torch.ones(3), "model": nn.Linear(2, 2), "t": torch.rand(3, 2)}
    saved["plain"] = torch.ones(2)
    with torch.inference_mode(inside):
        load(live, shard_of(saved))
    assert all(torch.equal(live[name], saved[name]) for name in ("w", "t", "plain"))
    assert torch.equal(live["model"].weight, saved["model"].weight)
    assert [live[name].is_inference() for name in ("w", "t", "plain")] == [True, True, False]


def test_a_state_of_values_only():
    live = {"a": 1}
    load(live, shard_of({"a": [1], "b": {}}))
    assert live == {"a": [1], "b": {}}
    assert problems({"a": 1, "gone": 2}, {"a": 1}) == ["gone: missing in the saved state"]


def test_two_loads_of_one_shard_share_nothing():
    shard = shard_of({"losses": [1]})
    one, two = {"losses": None}, {"losses": None}
    load(one, shard)
    one["losses"].append(2)
    load(two, shard)
    assert two == {"losses": [1]}


def test_tuples_around_tensors_are_rebuilt_only_for_new_values():
    tensor = torch.zeros(2)
    live = {"pair": (tensor, 1), "same": (tensor,), "list": [tensor, 1]}
    same, outer = live["same"], live["list"]
    load(
        live,
        shard_of({"pair": (torch.ones(2), 5), "same": (torch.ones(2),), "list": [tensor + 1, 6]}),
    )
    assert live["pair"][0] is tensor
    assert live["pair"][1] == 5
    assert live["same"] is same
    assert live["list"] is outer
    assert outer[1] == 6
    assert tensor.tolist() == [1.0, 1.0]


def test_every_mismatch_is_listed_and_nothing_is_changed():
    live = {
        "ok": torch.zeros(2),
        "shape": torch.zeros(2),
        "dtype": torch.zeros(2, dtype=torch.bfloat16),
        "value": torch.zeros(2),
        "missing": torch.zeros(1),
        "list": [torch.zeros(1)],
        "kind": [torch.zeros(1)],
        "nested": {"gone": 1, "t": torch.zeros(1)},
    }
    saved = {
        "ok": torch.ones(2),
        "shape": torch.ones(1, 2),
        "dtype": torch.ones(2),
        "value": 3,
        "unexpected": 1,
        "list": [torch.ones(1), 2],
        "kind": (torch.ones(1),),
        "nested": {"extra": 1, "t": torch.ones(1)},
    }
    assert problems(live, saved) == [
        "missing: missing in the saved state",
        "unexpected: saved, but not in this state",
        "shape: saved with shape [1, 2], here [2]",
        "dtype: saved as torch.float32, here torch.bfloat16",
        "value: a tensor here, int saved",
        "list: 2 items saved, 1 here",
        "kind: tuple saved, list here",
        "nested.gone: missing in the saved state",
        "nested.extra: saved, but not in this state",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_nothing_is_cast(dtype):
    model = nn.Linear(2, 2).to(dtype) if dtype.is_floating_point else nn.Module()
    if not dtype.is_floating_point:
        model.register_buffer("weight", torch.zeros(2, 2, dtype=dtype))
        model.register_buffer("bias", torch.zeros(2, dtype=dtype))
    assert problems({"model": model}, {"model": nn.Linear(2, 2)}) == [
        f"model.weight: saved as torch.float32, here {dtype}",
        f"model.bias: saved as torch.float32, here {dtype}",
    ]


def test_modules_match_key_by_key():
    saved = {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))}
    live = {"model": nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3))}
    assert problems(live, saved) == [
        "model.1.bias: missing in the saved state",
        "model.0.bias: saved, but not in this state",
        "model.1.weight: saved with shape [2, 2], here [3, 2]",
    ]


def test_objects_and_values_are_not_exchanged():
    model = nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    assert problems({"model": model}, {"model": 1}) == ["model: a module here, int saved"]
    assert problems({"model": model}, {"model": torch.ones(1)}) == [
        "model: a module here, a tensor saved"
    ]
    assert problems({"sched": None}, {"sched": scheduler}) == [
        "sched: state of torch.optim.lr_scheduler.StepLR saved, NoneType here"
    ]
    optimizer = torch.optim.SGD(model.parameters())
    assert problems({"optim": optimizer}, {"optim": {"lr": 1}}) == [
        "optim: an optimizer here, but the saved state is not one's"
    ]


def test_a_state_dict_and_its_module_are_exchanged():
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    load({"m": target}, shard_of({"m": source.state_dict()}))
    assert torch.equal(source.weight, target.weight)
    load({"m": target.state_dict()}, shard_of({"m": nn.Linear(2, 2)}))
    assert not torch.equal(source.weight, target.weight)


def test_what_the_live_state_cannot_hold_is_a_problem():
    loop = [torch.zeros(1)]
    loop[:] = [loop]
    with pytest.raises(StateMismatch, match="a container this deep"):
        check({"x": loop}, shard_of({"x": [torch.ones(1)]}))
    with pytest.raises(StateMismatch, match="sparse_coo"):
        check({"x": torch.eye(2).to_sparse()}, shard_of({"x": torch.eye(2)}))
    model = nn.Linear(2, 2)
    shard = shard_of({"model": model})
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(StateMismatch, match=r"model\.weight: cannot store a torch\.sparse_coo"):
        check({"model": model}, shard)
    with pytest.raises(UnsupportedState, match="pass a dict"):
        load([1], shard_of({}))


def test_memory_that_is_shared_here_takes_one_value_only():
    one = torch.zeros(2)
    assert problems({"a": one, "b": one}, {"a": torch.ones(2), "b": torch.zeros(2)}) == [
        "b: the same memory as a here, saved with other values"
    ]
    assert problems({"a": torch.zeros(1).expand(2)}, {"a": torch.arange(2.0)}) == [
        "a: expanded here, but saved with elements that differ"
    ]
    load({"a": one, "b": one}, shard_of({"a": torch.ones(2), "b": torch.ones(2)}))
    assert one.tolist() == [1.0, 1.0]


class Tied(nn.Module):
    def __init__(self, *, tied=True):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_fill_both_names(tied):
    saved = Tied()
    shard = shard_of({"model": saved})
    assert dict(shard.aliases) == {"model.head.weight": "model.embed.weight"}
    live = Tied(tied=tied)
    parameters = list(live.parameters())
    load({"model": live}, shard)
    assert torch.equal(live.embed.weight, saved.embed.weight)
    assert torch.equal(live.head.weight, saved.embed.weight)
    assert all(one is other for one, other in zip(live.parameters(), parameters, strict=True))
    assert live.embed.weight.requires_grad


class WithExtra(nn.Linear):
    def __init__(self, extra):
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [{"scale": [1.5], "t": torch.ones(3)}, None, torch.arange(7)])
def test_extra_state_goes_through_load_state_dict(extra):
    source, target = WithExtra(extra), WithExtra(torch.zeros(2))
    weight = target.weight
    load({"m": target}, shard_of({"m": source}))
    assert repr(target.extra) == repr(extra)
    assert target.weight is weight
    assert torch.equal(target.weight, source.weight)
    assert problems({"m": WithExtra(1)}, {"m": nn.Linear(2, 2)}) == [
        "m._extra_state: missing in the saved state"
    ]


class SavesCopies(nn.Linear):
    def state_dict(self, *args, **kwargs):
        whole = super().state_dict(*args, **kwargs)
        return type(whole)((key, value.clone()) for key, value in whole.items())


def test_a_module_that_saves_copies_is_restored_all_the_same():
    source, target = SavesCopies(2, 2), SavesCopies(2, 2)
    load({"m": target}, shard_of({"m": source}))
    assert torch.equal(target.weight, source.weight)
    assert problems({"m": SavesCopies(2, 3)}, {"m": source})[0].startswith("m.weight: saved with")


def test_batch_norm_counters_and_buffers_are_restored():
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    source(torch.randn(4, 3))
    load({"m": target}, shard_of({"m": source}))
    assert target.num_batches_tracked == 1
    assert torch.equal(target.running_var, source.running_var)


class Loader:
    """Like torchdata's: asking for its state before it runs would start it."""

    def __init__(self):
        self.position = 0
        self.asked = 0

    def state_dict(self):
        self.asked += 1
        return {"position": self.position, "order": torch.arange(3)}

    def check_state_dict(self, state):
        return [] if state["position"] < 10 else [f"no position {state['position']}"]

    def load_state_dict(self, state):
        self.position = state["position"]
        self.order = state["order"]


def test_objects_check_their_own_state_and_are_not_asked_for_it():
    source, target = Loader(), Loader()
    source.position = 4
    load({"data": target}, shard_of({"data": source}))
    assert (target.position, target.asked) == (4, 0)
    assert target.order.tolist() == [0, 1, 2]
    source.position = 10
    weight = torch.zeros(1)
    with pytest.raises(StateMismatch, match="data: no position 10"):
        load({"w": weight, "data": target}, shard_of({"w": torch.ones(1), "data": source}))
    assert target.position == 4
    assert not weight.any()
