"""Tensors in a GPU's memory, saved and loaded, where there is a GPU."""

import pytest
import torch

from ecckpt.state import load, plan_shard, read_shard

DEVICE = "cuda"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def written(state):
    plan = plan_shard(state)
    slot = memoryview(bytearray(plan.shard_bytes))
    plan.write(slot, threads=4)
    return slot


def on_device(seed):
    """Tensors that are not one range of memory as they are, and some that are."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.rand(300, 200, generator=generator).to(DEVICE)
    numbers = torch.view_as_complex(torch.rand(50, 2, generator=generator)).to(DEVICE)
    return {
        "plain": plain,
        "transposed": plain.t(),
        "every second": plain[::2],
        "expanded": plain[0].expand(3, 200),
        "half": plain.to(torch.bfloat16),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "one": torch.tensor(float(seed), device=DEVICE),
        "none": torch.empty(0, 3, device=DEVICE),
        "on the host": torch.rand(10, generator=generator),
    }


def test_a_state_comes_back_to_where_it_was():
    state, other = on_device(1), on_device(2)
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    places = {name: (tensor.device, tensor.data_ptr()) for name, tensor in other.items()}
    load(other, read_shard(written(state)))
    for name, tensor in other.items():
        assert (tensor.device, tensor.data_ptr()) == places[name], name
        assert torch.equal(tensor.cpu(), expected[name]), name


def test_a_save_waits_for_what_was_queued_before_it():
    weights = torch.zeros(1 << 22, device=DEVICE)
    for _ in range(200):
        weights += 1
    slot = written({"weights": weights})
    weights += 1  # the state may change as soon as it is written
    assert read_shard(slot).tensors["weights"].eq(200).all()


def test_a_shard_from_a_gpu_is_loaded_without_one():
    state = on_device(1)
    host = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
    host["expanded"] = torch.empty(200).expand(3, 200)
    load(host, read_shard(written(state)))
    for name, tensor in host.items():
        assert torch.equal(tensor, state[name].cpu()), name
