"""Assigning: what becomes of each kind of state, and that nobody keeps looking at old memory."""

import copy
import gc
import mmap
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from ecckpt.errors import StateMismatch
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import check
from ecckpt.state.snapshot.plan import plan_shard
from tests.support.trees import same

SIZE = 1 << 16  # float32: as little as is assigned
WIDTH = 256


def packed(state):
    """A shard in memory that is nobody else's, as a restore has it."""
    plan = plan_shard(state)
    target = mmap.mmap(-1, plan.shard_bytes)
    plan.write(target)
    return memoryview(target)


def assign(live, saved):
    """Restore ``saved`` into ``live``; the bytes that were assigned, and all of them."""
    buffer = packed(saved)
    assigned_bytes = check(live, read_shard(buffer), assign=True)()
    gc.collect()
    return assigned_bytes, buffer


def lies_in(tensor, buffer):
    begin = np.frombuffer(buffer, np.uint8).ctypes.data
    return begin <= tensor.data_ptr() < begin + len(buffer)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape or (SIZE,), dtype=dtype)


class Net(nn.Module):
    """Two layers whose weights are tied, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(SIZE))

    def forward(self, x):
        return self.second(self.first(x))


def trained(seed=1):
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, WIDTH)).square().sum().backward()
        optimizer.step()
    return {"model": net, "optim": optimizer}


def contents(state):
    return copy.deepcopy({name: each.state_dict() for name, each in state.items()})


# -- what is assigned ------------------------------------------------------------------------------


def test_tensors_in_containers_stay_the_objects_that_they_are():
    live = {"w": torch.zeros(SIZE), "all": [torch.zeros(SIZE), (torch.zeros(SIZE), 1)], "n": 0}
    w, (first, (second, _)) = live["w"], live["all"]
    saved = {"w": ones(), "all": [2 * ones(), (3 * ones(), 5)], "n": 7}
    assigned_bytes, buffer = assign(live, saved)
    assert assigned_bytes == 3 * 4 * SIZE
    assert same(live, saved)
    assert (live["w"] is w, live["all"][0] is first, live["all"][1][0] is second) == (True,) * 3
    assert all(lies_in(each, buffer) for each in (w, first, second))
    assert w.untyped_storage().nbytes() == 4 * SIZE  # not the whole shard, for whoever stores that
    assert not w._is_view()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2fnuz, torch.complex128])
def test_any_dtype(dtype):
    live = {"odd": torch.zeros(3, dtype=torch.uint8), "w": torch.zeros(1 << 18, dtype=dtype)}
    assigned_bytes, _ = assign(
        live, {"odd": ones(3, dtype=torch.uint8), "w": ones(1 << 18).to(dtype)}
    )
    assert assigned_bytes == live["w"].nbytes
    assert live["w"].to(torch.complex128).eq(1).all()


def test_a_training_goes_on_as_if_it_had_been_copied():
    saved, live, copied = trained(1), trained(2), trained(3)
    net, parameters = live["model"], list(live["model"].parameters())
    buffer = packed(saved)
    assigned_bytes = check(live, read_shard(buffer), assign=True)()
    check(copied, read_shard(packed(saved)))()
    weights = 4 * (WIDTH * WIDTH + SIZE)
    assert assigned_bytes == weights + 2 * 4 * WIDTH * WIDTH  # and both moments of the one weight
    assert same(contents(live), contents(saved))
    assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
    assert net.second.weight is net.first.weight
    assert lies_in(net.first.weight, buffer)
    for state in (live, copied, saved):
        torch.manual_seed(9)
        for _ in range(3):
            state["optim"].zero_grad()
            state["model"](torch.randn(4, WIDTH)).square().sum().backward()
            state["optim"].step()
    assert same(contents(live), contents(saved))
    assert same(contents(copied), contents(saved))
    assert same(contents(live)["model"]["first.weight"], contents(live)["model"]["second.weight"])


def test_state_that_an_optimizer_casts_back_and_forth():
    def made(seed):
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, dtype=torch.bfloat16))
        optimizer = torch.optim.Adam([weight])
        moments = {
            "exp_avg": torch.randn(2 * WIDTH, WIDTH),
            "exp_avg_sq": torch.rand(2 * WIDTH, WIDTH),
        }
        optimizer.state[weight] = {"step": torch.tensor(3.0), **moments}
        return {"w": weight, "optim": optimizer}

    saved, live = made(1), made(2)
    assigned_bytes, _ = assign(live, saved)
    assert same(live["optim"].state_dict(), saved["optim"].state_dict())
    assert assigned_bytes == 2 * WIDTH * WIDTH * (2 + 4 + 4)


def test_memory_goes_with_the_last_tensor():
    live = {"a": torch.zeros(SIZE), "b": torch.zeros(SIZE)}
    _, buffer = assign(live, {"a": ones(), "b": ones()})
    target = buffer.obj
    buffer.release()
    for name in ("a", "b"):
        with pytest.raises(BufferError):
            target.close()
        del live[name]
    target.close()


def test_assigning_again():
    live = {"w": torch.zeros(SIZE)}
    _, first = assign(live, {"w": ones()})
    assigned_bytes, second = assign(live, {"w": 2 * ones()})
    assert (assigned_bytes, live["w"][0]) == (4 * SIZE, 2)
    assert lies_in(live["w"], second)
    first.release()


def test_a_graph_that_kept_a_tensor_is_not_used_with_new_values():
    live = {"w": torch.zeros(SIZE)}
    factor = torch.ones(SIZE, requires_grad=True)
    result = (factor * live["w"]).sum()
    assign(live, {"w": ones()})
    assert live["w"].eq(1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


# -- what is copied, as ever -----------------------------------------------------------------------


def _alias():
    w = torch.zeros(SIZE)
    return w, w.detach()


def _numpy():
    w = torch.zeros(SIZE)
    return w, w.numpy()


def _from_numpy():
    array = np.zeros(SIZE, np.float32)
    return torch.from_numpy(array), array


def _dlpack():
    w = torch.zeros(SIZE)
    return w, np.from_dlpack(w)


def _view():
    base = torch.zeros(3 * SIZE)
    return base[SIZE : 2 * SIZE], base[SIZE : 2 * SIZE]


def _shared():
    w = torch.zeros(SIZE).share_memory_()
    return w, w.detach()


@pytest.mark.parametrize("make", [_alias, _numpy, _from_numpy, _dlpack, _view, _shared])
def test_whoever_else_sees_the_memory_sees_what_was_restored(make):
    w, other = make()
    assigned_bytes, _ = assign({"w": w}, {"w": ones()})
    assert assigned_bytes == 0
    assert w.eq(1).all()
    assert np.asarray(other).min() == 1


def test_what_was_assigned_and_is_seen_by_numpy_is_copied_into_the_next_time():
    live = {"w": torch.zeros(SIZE)}
    assign(live, {"w": ones()})
    array = live["w"].numpy()
    assert assign(live, {"w": 2 * ones()})[0] == 0
    assert array.min() == live["w"][0] == 2


def test_memory_that_another_process_has():
    w = torch.zeros(SIZE).share_memory_()
    assert assign({"w": w}, {"w": ones()})[0] == 0
    assert w.is_shared()


def test_a_state_dict_of_a_model_restores_the_model():
    """Its tensors share memory with the parameters, which nobody else would restore."""
    saved, live = trained(1), trained(2)
    state = {"model": live["model"].state_dict(), "optim": live["optim"]}
    assigned_bytes, _ = assign(
        state, {"model": saved["model"].state_dict(), "optim": saved["optim"]}
    )
    assert assigned_bytes == 2 * 4 * WIDTH * WIDTH  # the optimizer's
    assert same(contents(live), contents(saved))


def test_parameters_in_a_dict_are_assigned_to_the_model():
    saved, live = trained(1)["model"], trained(2)["model"]
    assigned_bytes, _ = assign(
        {"w": dict(live.named_parameters())}, {"w": dict(saved.named_parameters())}
    )
    assert assigned_bytes == 4 * WIDTH * WIDTH
    assert torch.equal(live.first.weight, saved.first.weight)
    assert live.second.weight is live.first.weight


def test_tensors_that_were_tied_and_are_not_here_do_not_become_tied():
    tied = ones()
    live = {"a": torch.zeros(SIZE), "b": torch.zeros(SIZE)}
    assigned_bytes, _ = assign(live, {"a": tied, "b": tied})
    assert assigned_bytes == 4 * SIZE
    live["a"].add_(1)
    assert (live["a"][0], live["b"][0]) == (2, 1)


def test_tensors_that_are_tied_here_by_their_memory_only():
    w = torch.zeros(SIZE)
    live, tied = {"a": w, "b": w.detach()}, ones()
    assert assign(live, {"a": tied, "b": tied})[0] == 0
    live["a"].add_(1)
    assert live["b"].eq(2).all()


def test_other_strides_and_small_tensors():
    live = {"t": torch.zeros(WIDTH, WIDTH).T, "small": torch.zeros(SIZE - 1)}
    saved = {"t": torch.randn(WIDTH, WIDTH), "small": ones(SIZE - 1)}
    assert assign(live, saved)[0] == 0
    assert live["t"].stride() == (1, WIDTH)
    assert all(torch.equal(live[name], saved[name]) for name in saved)


def test_in_inference_mode():
    live = {"w": torch.zeros(SIZE)}
    with torch.inference_mode():
        live["inference"] = torch.zeros(SIZE)
        assert assign(live, {"w": ones(), "inference": ones()})[0] == 4 * SIZE
    assert (live["w"].is_inference(), live["inference"].is_inference()) == (False, True)
    assert all(each.eq(1).all() for each in live.values())
    live["w"].add_(1)


def test_an_object_that_loads_by_itself_gets_copies():
    """It may do with them what it likes: torch's own generators crash on misaligned states."""

    class Loader:
        def __init__(self):
            self.held = torch.zeros(SIZE)

        def state_dict(self):
            return {"held": self.held}

        def load_state_dict(self, state):
            self.held = state["held"]

    saved, live = Loader(), Loader()
    saved.held += 1
    assert assign({"loader": live}, {"loader": saved})[0] == 0
    assert live.held.eq(1).all()


def test_a_module_with_extra_state_loads_by_itself():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": 1}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    saved, live = Extra(WIDTH, WIDTH), Extra(WIDTH, WIDTH)
    assert assign({"model": live}, {"model": saved})[0] == 0
    assert torch.equal(live.weight, saved.weight)
    assert live.calls == 1


def test_dtensors_are_copied():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        live = {"w": distribute_tensor(torch.zeros(SIZE), mesh, [Replicate()])}
        saved = {"w": distribute_tensor(ones(), mesh, [Replicate()])}
        local = live["w"].to_local()
        assert assign(live, saved)[0] == 0
        assert live["w"].to_local().eq(1).all()
        assert local.eq(1).all()
    finally:
        dist.destroy_process_group()


def test_nothing_changes_where_something_does_not_fit():
    live = {"a": torch.zeros(SIZE), "b": torch.zeros(SIZE)}
    before = live["a"].data_ptr()
    shard = read_shard(packed({"a": ones(), "b": ones(3)}))
    with pytest.raises(StateMismatch, match="shape"):
        check(live, shard, assign=True)
    good = check(live, read_shard(packed({"a": ones(), "b": ones()})), assign=True)
    assert (live["a"].data_ptr(), live["a"][0]) == (before, 0)
    good()
    assert live["a"].data_ptr() != before


def test_an_ordered_dict_with_a_module_of_another_name():
    saved = {"m": OrderedDict(net=trained(1)["model"])}
    live = {"m": OrderedDict(net=trained(2)["model"])}
    assert assign(live, saved)[0] == 4 * (WIDTH * WIDTH + SIZE)
    assert same(dict(live["m"]["net"].state_dict()), dict(saved["m"]["net"].state_dict()))
