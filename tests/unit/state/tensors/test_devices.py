"""Copies from and to GPUs: what must come before what. Of GPUs that are made up (gpus.py)."""

import gc
import logging
import os
from contextlib import contextmanager

import pytest
import torch

import ecckpt
from ecckpt.memory import mapping
from ecckpt.memory.mapping import map_file
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import load
from ecckpt.state.snapshot import plan
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.tensors import devices
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.media import SIZE, mapped_here, tmpfs_file
from tests.unit.state.tensors.gpus import ALREADY_REGISTERED, Gpus


@pytest.fixture
def gpus(monkeypatch):
    yield Gpus(monkeypatch)
    devices._side_stream.cache_clear()


def tensors(seed):
    """Tensors that are one range of memory, and tensors that are anything else."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.rand(30, 20, generator=generator)
    numbers = torch.view_as_complex(torch.rand(50, 2, generator=generator))
    return {
        "plain": plain,
        "transposed": torch.rand(30, 20, generator=generator).t(),
        "every second": torch.rand(30, 20, generator=generator)[::2],
        "expanded": torch.rand(20, generator=generator).expand(3, 20),
        "half": plain.to(torch.bfloat16),
        "eighth": plain.to(torch.float8_e4m3fn).t(),
        "conjugate": numbers.clone().conj(),
        "negative": numbers.clone().conj().imag,
        "both": torch.rand(8, 8, 2, generator=generator).view(torch.complex64)[..., 0].conj().t(),
        "trained": torch.rand(3, generator=generator).requires_grad_(),
        "one": torch.tensor(float(seed)),
        "none": torch.empty(0, 3),
    }


def mixed(gpus, seed):
    """The same on two GPUs and on the host."""
    state = {"host": tensors(seed)}
    for index in range(2):
        state[f"gpu {index}"] = {
            name: gpus.place(tensor, index) for name, tensor in tensors(seed + 1 + index).items()
        }
    return state


def everything(state):
    return [tensor for part in state.values() for tensor in part.values()]


def written(state, slot=None):
    made = plan_shard(state)
    slot = memoryview(bytearray(made.shard_bytes)) if slot is None else slot
    made.write(slot, threads=2)
    return slot[: made.shard_bytes]


@contextmanager
def mapped():
    with tmpfs_file() as descriptor:
        yield map_file(descriptor, SIZE)


# -- to the host ----------------------------------------------------------------------------------


def test_a_shard_does_not_tell_where_its_tensors_were(gpus):
    state = {"host": tensors(1), "gpu 0": tensors(2), "gpu 1": tensors(3)}
    assert bytes(written(mixed(gpus, 1))) == bytes(written(state))


def test_all_is_copied_before_the_caller_may_change_it(gpus):
    state = mixed(gpus, 1)
    slot = written(state)
    assert gpus.pending == 0
    before = bytes(slot)
    for tensor in everything(state):
        tensor.detach().to(torch.float32).zero_() if tensor.ndim == 0 else tensor.detach().zero_()
    assert bytes(slot) == before
    assert not any(stream.waits for stream in gpus._side), "an event is waited for, no other copies"


@pytest.mark.parametrize("turned", [False, True])
def test_what_the_callers_stream_still_writes_is_waited_for(gpus, turned):
    weights = gpus.place(torch.zeros(40, 30), 1)
    stream = gpus.current_stream(torch.device("cuda", 1))
    for _ in range(3):
        stream.queue(lambda: weights.add_(1))
    shard = read_shard(written({"w": weights.t() if turned else weights}))
    assert shard.tensors["w"].eq(3).all()


def test_temporaries_are_bounded(gpus, monkeypatch):
    monkeypatch.setattr(devices, "_TEMPORARY_BYTES", 5000)
    alive = []

    class Queue(devices._CopyQueue):
        def reserve_temporary(self, temporary_bytes):
            super().reserve_temporary(temporary_bytes)
            alive.append(self._temporary_bytes)

    monkeypatch.setattr(devices, "_CopyQueue", Queue)
    state = {str(index): gpus.place(torch.rand(20, 20)).t() for index in range(20)}
    shard = read_shard(written(state))
    assert max(alive) == 3 * 1600
    assert all(torch.equal(shard.tensors[name], tensor) for name, tensor in state.items())
    large = gpus.place(torch.rand(100, 100)).t()  # by itself it may be
    assert torch.equal(read_shard(written({"large": large})).tensors["large"], large)


def test_a_copy_that_fails_fails_the_save_after_all_others(gpus):
    state = mixed(gpus, 1)

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access")

    gpus.current_stream(torch.device("cuda", 0)).queue(fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        written(state)
    assert [stream.pending > 0 for stream in gpus._side] == [True, False]


def test_a_save_that_fails_leaves_nothing_on_its_way(gpus, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(plan, "copy_many", fail)
    with pytest.raises(MemoryError):
        written(mixed(gpus, 1))
    assert len(gpus._side) == 2
    assert gpus.pending == 0


# -- registered memory ----------------------------------------------------------------------------


def test_a_slot_is_registered_once_and_unregistered_before_it_is_unmapped(gpus):
    with mapped() as view:
        for seed in range(3):
            slot = written(mixed(gpus, seed), view[4096:])
            assert bytes(slot) == bytes(written(mixed(gpus, seed)))
        assert gpus.calls == ["register"]
        assert list(gpus.registered.values()) == [SIZE]
        del view
        gc.collect()
        assert gpus.registered
        del slot
        gc.collect()
        assert gpus.calls == ["register", "device 0", "unregister"]
        assert not gpus.registered
        assert not mapped_here()


def test_a_slot_that_cannot_be_registered_is_written_nevertheless(gpus, caplog):
    gpus.refuses.add("register")
    with mapped() as one, mapped_again() as other:
        for view in (one, other, one):
            assert bytes(written(mixed(gpus, 1), view)) == bytes(written(mixed(gpus, 1)))
            assert not gpus.last_error, "the next kernel of the training would fail by it"
        assert gpus.calls == ["register", "register"]
        del one, other, view
        gc.collect()
        assert "unregister" not in gpus.calls
        assert not mapped_here()
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert f"error {ALREADY_REGISTERED}" in lines[0].message


@contextmanager
def mapped_again():
    descriptor = os.memfd_create("ecckpt-test-mapping")
    os.ftruncate(descriptor, SIZE)
    try:
        yield map_file(descriptor, SIZE)
    finally:
        os.close(descriptor)


def test_a_slot_that_stays_registered_stays_mapped(gpus, caplog):
    """Or what is mapped at its address next would be taken for it."""
    gpus.refuses.add("unregister")
    with mapped() as view:
        written({"w": gpus.place(torch.rand(9))}, view)
        (address,) = gpus.registered
        del view
        gc.collect()
        assert gpus.calls[-1] == "unregister"
        assert "which stays mapped: error" in caplog.text
        assert mapped_here()
        mapping._libc.munmap(address, SIZE)


def test_a_fork_leaves_cuda_alone(gpus):
    with mapped() as view:
        written({"w": gpus.place(torch.rand(9))}, view)
        (address,) = gpus.registered
        assert devices._unregister(address, torch.device("cuda", 0), os.getppid())
        assert gpus.calls == ["register"]


def test_memory_that_is_no_slot_is_not_registered(gpus):
    written(mixed(gpus, 1))
    assert not gpus.calls


def test_what_does_not_involve_a_gpu_does_not_touch_cuda(monkeypatch):
    def touched(*_, **__):
        raise AssertionError("torch.cuda was touched")

    for name in ("Stream", "stream", "current_stream", "Event", "cudart", "device", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)
    with mapped() as view:
        other = {"host": tensors(2)}
        load(other, read_shard(written({"host": tensors(1)}, view)))
        assert all(map(torch.equal, everything(other), tensors(1).values()))
    assert not torch.cuda.is_initialized()


# -- to GPUs --------------------------------------------------------------------------------------


def test_tensors_are_filled_wherever_and_however_they_lie(gpus):
    state, other = mixed(gpus, 1), mixed(gpus, 50)
    versions = [tensor._version for tensor in everything(other)]
    load(other, read_shard(written(state)))
    assert gpus.pending == 0
    for one, two in zip(everything(state), everything(other), strict=True):
        assert torch.equal(one.contiguous(), two.contiguous())
    for tensor, version in zip(everything(other), versions, strict=True):
        assert tensor._version > version or not tensor.numel()


def test_what_the_callers_stream_still_does_with_a_target_comes_first(gpus):
    slot = written({"w": torch.ones(40, 30)})
    weights, seen = gpus.place(torch.zeros(30, 40)), []
    gpus.current_stream(torch.device("cuda", 0)).queue(lambda: seen.append(weights.sum().item()))
    gpus.current_stream(torch.device("cuda", 0)).queue(lambda: weights.fill_(7))
    load({"w": weights.t()}, read_shard(slot))
    assert seen == [0]
    assert weights.eq(1).all()


def test_loading_registers_nothing(gpus):
    with mapped() as view:
        load(mixed(gpus, 2), read_shard(written({**mixed_on_host(1)}, view)))
        assert not gpus.calls


def mixed_on_host(seed):
    return {"host": tensors(seed), "gpu 0": tensors(seed + 1), "gpu 1": tensors(seed + 2)}


# -- all of it ------------------------------------------------------------------------------------


def test_saves_into_the_slots_of_an_agent(gpus, cluster1: LocalCluster):
    state, other = {"parts": mixed(gpus, 1)}, {"parts": mixed(gpus, 50)}
    with ecckpt.Checkpointer("gpus", root=cluster1.root("n0")) as checkpointer:
        checkpointer.restore(state)
        for step in range(6):
            handle = checkpointer.save(step, state, patience_s=30)
            assert gpus.pending == 0
            assert handle.wait(30)
        assert 1 <= len(gpus.registered) <= 3
        assert len(gpus.calls) == len(gpus.registered)
        restored = checkpointer.restore(other)
        assert restored is not None
        assert restored.step == 5
    for one, two in zip(everything(state["parts"]), everything(other["parts"]), strict=True):
        assert torch.equal(one.contiguous(), two.contiguous())
    del checkpointer, restored, handle
    gc.collect()
    assert not gpus.registered
