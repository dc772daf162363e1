"""Tensors in a GPU's memory, saved and loaded, where there is a GPU.

What must come before what is tested without one as well: test_state_devices.py.
"""

import gc
from contextlib import contextmanager

import pytest
import torch

import ecckpt
from ecckpt.memory.mapping import map_file, mapping_of
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import check, load
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.tensors import devices
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.media import tmpfs_file

DEVICE = "cuda"
ROOM = 64 << 20
# A few ms of work, so that whoever does not wait for it is too early.
BUSY = 200

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU")


@contextmanager
def no_slot():
    """Memory that is not registered."""
    yield memoryview(bytearray(ROOM))


@contextmanager
def slot():
    """Memory that is registered, as a slot is."""
    with tmpfs_file(ROOM) as descriptor:
        yield map_file(descriptor, ROOM)


@pytest.fixture(params=[no_slot, slot])
def room(request):
    with request.param() as view:
        yield view
    gc.collect()


def written(state, target):
    plan = plan_shard(state)
    plan.write(target, threads=4)
    return target[: plan.shard_bytes]


def on_device(seed, device=DEVICE):
    """Tensors that are not one range of memory as they are, and some that are."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.rand(300, 200, generator=generator).to(device)
    numbers = torch.view_as_complex(torch.rand(50, 2, generator=generator)).to(device)
    return {
        "plain": plain,
        "transposed": plain.t(),
        "every second": plain[::2],
        "expanded": plain[0].expand(3, 200),
        "half": plain.to(torch.bfloat16),
        "half, transposed": plain.to(torch.bfloat16).t(),
        "eighth": plain.to(torch.float8_e4m3fn),
        "eighth, transposed": plain.to(torch.float8_e5m2).t(),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "both": numbers.view(10, 5).conj().t(),
        "trained": plain[:3].clone().requires_grad_(),
        "one": torch.tensor(float(seed), device=device),
        "none": torch.empty(0, 3, device=device),
        "on the host": torch.rand(10, generator=generator),
    }


def host_copies(state):
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def assert_equal(state, expected):
    for name, tensor in state.items():
        here, there = (each.detach().cpu().contiguous() for each in (tensor, expected[name]))
        if here.element_size() == 1:
            here, there = here.view(torch.uint8), there.view(torch.uint8)
        assert torch.equal(here, there), name


def test_a_state_comes_back_to_where_it_was(room):
    state, other = on_device(1), on_device(2)
    expected = host_copies(state)
    places = {name: (tensor.device, tensor.data_ptr()) for name, tensor in other.items()}
    load(other, read_shard(written(state, room)))
    for name, tensor in other.items():
        assert (tensor.device, tensor.data_ptr()) == places[name], name
    assert_equal(other, expected)


def test_a_shard_does_not_tell_where_its_tensors_were(room):
    state = on_device(1)
    on_host = {name: tensor.cpu() for name, tensor in state.items()}
    on_host["trained"] = on_host["trained"].detach()
    target = memoryview(bytearray(ROOM))
    assert bytes(written(state, room)) == bytes(written(on_host, target))


def test_a_save_waits_for_what_was_queued_before_it(room):
    weights = torch.zeros(1 << 22, device=DEVICE)
    for _ in range(BUSY):
        weights += 1
    shard = read_shard(written({"weights": weights}, room))
    weights.zero_()  # the state may change as soon as it is written
    assert shard.tensors["weights"].eq(BUSY).all()


@pytest.mark.parametrize("shape", [(1 << 22,), (1 << 11, 1 << 11)])
def test_a_save_waits_for_the_stream_that_its_caller_uses(room, shape):
    stream = torch.cuda.Stream()
    weights = torch.zeros(shape, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(BUSY):
            weights += 1
        slot = written({"weights": weights.t()}, room)
        weights.zero_()
    assert read_shard(slot).tensors["weights"].eq(BUSY).all()
    stream.synchronize()


def test_a_load_waits_for_what_was_queued_before_it_and_is_there_for_what_comes_next(room):
    shard = read_shard(written({"weights": torch.full((1 << 22,), 5.0)}, room))
    weights, others = torch.zeros(1 << 22, device=DEVICE), torch.zeros(1 << 22, device=DEVICE)
    for _ in range(BUSY):
        others += weights
        weights += 1
    load({"weights": weights}, shard)
    with torch.cuda.stream(torch.cuda.Stream()):  # of any stream
        seen = weights.clone()
        torch.cuda.current_stream().synchronize()
    assert seen.eq(5).all()
    assert others.eq(sum(range(BUSY))).all()


def test_an_optimizer_gets_its_state(room):
    def training(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(100, 100, device=DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        model(torch.ones(3, 100, device=DEVICE)).sum().backward()
        optimizer.step()
        return {"model": model, "optim": optimizer}

    state, other = training(1), training(2)
    load(other, read_shard(written(state, room)))
    for one, two in zip(*(each["model"].parameters() for each in (state, other)), strict=True):
        assert torch.equal(one, two)
        for key, moment in state["optim"].state[one].items():
            assert torch.equal(moment, other["optim"].state[two][key])


def test_nothing_is_assigned_to_a_gpu_or_in_place_of_pinned_memory(room):
    ones = torch.ones(1 << 18)
    live = {"gpu": torch.zeros(1 << 18, device=DEVICE), "pinned": torch.zeros(1 << 18).pin_memory()}
    target = written({"gpu": ones.to(DEVICE), "pinned": ones}, room)
    assert check(live, read_shard(target), assign=True)() == 0
    assert live["pinned"].is_pinned()
    assert all(each.eq(1).all() for each in live.values())


def test_temporaries_do_not_add_up(room, monkeypatch):
    monkeypatch.setattr(devices, "_TEMPORARY_BYTES", 1 << 20)
    state = {str(index): torch.rand(400, 300, device=DEVICE).t() for index in range(40)}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    slot = written(state, room)
    assert torch.cuda.max_memory_allocated() - before <= 2 << 20
    assert torch.cuda.memory_allocated() == before
    assert_equal(read_shard(slot).tensors, state)


def test_a_slot_is_registered_while_it_is_mapped():
    with slot() as view:
        address, _ = mapping_of(view)
        written(on_device(1), view)
        assert devices._registered[address]
        on_host = torch.frombuffer(view, dtype=torch.uint8)
        assert on_host.is_pinned()
        del view, on_host
        gc.collect()
        assert address not in devices._registered
    # Whatever is mapped there now is not taken for it.
    with slot() as again:
        assert not torch.frombuffer(again, dtype=torch.uint8).is_pinned()
        state = on_device(2)
        assert_equal(read_shard(written(state, again)).tensors, state)


def test_a_slot_that_cannot_be_registered():
    with slot() as view:
        address, _ = mapping_of(view)
        torch.ones(1, device=DEVICE)
        cudart = torch.cuda.cudart()
        assert int(cudart.cudaHostRegister(address + (1 << 20), 1 << 20, 0)) == 0
        try:
            state = on_device(1)
            shard = written(state, view)
            assert not devices._registered[address]
            assert torch.ones(10, device=DEVICE).sum() == 10, "no kernel fails by that error"
            assert_equal(read_shard(shard).tensors, state)
        finally:
            assert int(cudart.cudaHostUnregister(address + (1 << 20))) == 0


@two_gpus
def test_two_gpus(room):
    for device in ("cuda:0", "cuda:1"):
        torch.zeros(1, device=device)
    state = {index: on_device(index, f"cuda:{index}") for index in range(2)}
    more = torch.zeros(1 << 20, device="cuda:1")
    for _ in range(BUSY):
        more += 1
    other = {index: on_device(9, f"cuda:{index}") for index in range(2)} | {"more": more.clone()}
    current = torch.cuda.current_device()
    load(other, read_shard(written(state | {"more": more}, room)))
    assert torch.cuda.current_device() == current
    assert other["more"].eq(BUSY).all()
    for index in range(2):
        assert_equal(other[index], state[index])


def test_a_shard_from_a_gpu_is_loaded_without_one(room):
    state = on_device(1)
    host = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
    host["expanded"] = torch.empty(200).expand(3, 200)
    load(host, read_shard(written(state, room)))
    assert_equal(host, state)


def test_saves_and_restores_by_an_agent(cluster1: LocalCluster):
    weights = torch.zeros(1 << 22, device=DEVICE)
    state = {"weights": weights, "turned": torch.zeros(300, 200, device=DEVICE).t()}
    with ecckpt.Checkpointer("gpu", root=cluster1.root("n0")) as checkpointer:
        checkpointer.restore(state)
        for step in range(6):
            weights.fill_(step)
            state["turned"].fill_(step)
            handle = checkpointer.save(step, state, patience_s=30)
            weights.fill_(-1)
            assert handle.wait(30)
        restored = checkpointer.restore(state)
        assert restored is not None
        assert restored.step == 5
        assert weights.eq(5).all()
        assert state["turned"].eq(5).all()
