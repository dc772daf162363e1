"""What a save captured is what was there when save() was called, whatever happens next."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn

import ecckpt
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import load
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.trees import same

TENSORS = 40


def tag(state: dict[str, object], number: int) -> None:
    """Write ``number`` into every part of a state, in place."""
    for tensor in state["tensors"]:
        tensor.fill_(number)
    state["array"].fill(number)
    state["list"][:] = [number, [number]]
    state["counter"]["steps"] = number
    state["deque"].append(number)
    state["progress"]["step"] = number


def tags(state: dict[str, object]) -> set[float]:
    return {
        *(float(value) for tensor in state["tensors"] for value in tensor.unique()),
        *(float(value) for value in np.unique(state["array"])),
        *(state["list"][0], state["list"][1][0]),
        *(state["counter"]["steps"], state["deque"][-1], state["progress"]["step"]),
    }


def tagged() -> dict[str, object]:
    # 0-dim, small, large, and strided, so that every way of copying takes part.
    tensors = [torch.empty(()), torch.empty(2**19), torch.empty(64, 64).t()]
    tensors += [torch.empty(1000) for _ in range(TENSORS)]
    state = {"tensors": tensors, "array": np.empty(1000), "list": [], "counter": Counter()}
    return state | {"deque": deque(maxlen=4), "progress": {}}


def test_one_tag_per_checkpoint(cluster1: LocalCluster) -> None:
    live, other = tagged(), tagged()
    tag(live, -1)
    with ecckpt.Checkpointer("tags", root=cluster1.root("n0")) as checkpointer:
        checkpointer.restore(live)
        for step in range(8):
            tag(live, step)
            handle = checkpointer.save(step, live, patience_s=30)
            tag(live, 1000 + step)  # while the save goes on
            if step % 3 == 0:
                assert handle.wait(30)
                restored = checkpointer.restore(other)
                assert restored is not None
                assert restored.step == step
                assert tags(other) == {step}
        restored = checkpointer.restore(other)  # right after a save: waits for it
        assert restored is not None
        assert restored.step == 7
        assert tags(other) == {7}


def test_adamw_counters_are_of_the_same_step_as_moments_and_weights(
    cluster1: LocalCluster,
) -> None:
    torch.manual_seed(3)
    model = nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optimizer}

    def train() -> None:
        model(torch.randn(4, 50)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def snapshot() -> list[torch.Tensor]:
        moments = [part.clone() for each in optimizer.state.values() for part in each.values()]
        return [each.detach().clone() for each in model.parameters()] + moments

    with ecckpt.Checkpointer("adamw", root=cluster1.root("n0")) as checkpointer:
        checkpointer.restore(state)
        for step in range(6):
            train()
            want = snapshot()
            handle = checkpointer.save(step, state, patience_s=30)
            for _ in range(5):
                train()
            assert handle.wait(30)
            checkpointer.restore(state)
            assert same(snapshot(), want)


class Saver:
    """Saves as a Checkpointer does: every plan is made from the last one."""

    def __init__(self) -> None:
        self.plan = None

    def save(self, state):
        self.plan = plan_shard(state, previous=self.plan)
        target = bytearray(b"\x77" * self.plan.shard_bytes)
        self.plan.write(memoryview(target))
        return read_shard(memoryview(target))


def assert_captured(shard, name, want):
    assert same(shard.tensors[name].clone(), want.detach())


def test_storages_that_were_replaced_are_captured_as_they_are():
    saver = Saver()
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optim": optimizer, "x": torch.zeros(4), "list": [torch.zeros(2)]}
    saver.save(state)
    for turn in range(3):
        model.weight.data = torch.full((3, 3), 10.0 + turn)  # what FSDP and quantizers do
        model.bias = nn.Parameter(torch.full((3,), 20.0 + turn))
        state["x"].set_(torch.full((4,), 30.0 + turn))
        state["list"][0] = torch.full((2,), 40.0 + turn)
        shard = saver.save(state)
        for name, start in (("model.weight", 10), ("model.bias", 20), ("x", 30), ("list.0", 40)):
            assert set(shard.tensors[name].flatten().tolist()) == {start + turn}
    state["x"].resize_(6).fill_(5.0)
    assert_captured(saver.save(state), "x", torch.full((6,), 5.0))
    model.double()
    assert saver.save(state).tensors["model.weight"].dtype == torch.float64


def test_ties_come_and_go_between_saves():
    saver = Saver()
    one, two = torch.ones(3), torch.zeros(3)
    state = {"a": one, "b": two}
    assert not saver.save(state).aliases
    state["b"] = one
    assert saver.save(state).aliases == {"b": "a"}
    state["b"] = one[:]  # the same memory
    assert saver.save(state).aliases == {"b": "a"}
    state["b"] = one.clone()
    shard = saver.save(state)
    assert not shard.aliases
    one.add_(1)
    assert_captured(shard, "b", torch.ones(3))


def test_structure_grows_shrinks_and_changes():
    saver = Saver()
    state = {"epoch": 0, "parts": [torch.full((2,), 0.0)]}
    for turn in range(1, 5):
        state["parts"].append(torch.full((turn,), float(turn)))
        state[f"extra {turn}"] = {"values": list(range(turn)), "w": torch.tensor(float(turn))}
        shard = saver.save(state)
        assert len(shard.tensors) == 2 * turn + 1
        assert_captured(shard, f"extra {turn}.w", torch.tensor(float(turn)))
    del state["parts"][:3], state["extra 2"]
    state["extra 1"] = torch.ones(1, dtype=torch.int8)  # a tensor where a dict was
    shard = saver.save(state)
    assert sorted(shard.tensors) == ["extra 1", "extra 3.w", "extra 4.w", "parts.0", "parts.1"]
    state["extra 1"] = "text"  # a value where a tensor was
    assert saver.save(state).tree()["extra 1"] == "text"
    state["extra 1"] = {}
    assert saver.save(state).tree()["extra 1"] == {}


def test_an_optimizer_gets_its_state_between_saves():
    saver = Saver()
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    state = {"optim": optimizer, "w": parameter}
    assert sorted(saver.save(state).tensors) == ["w"]
    parameter.sum().backward()
    optimizer.step()
    assert len(saver.save(state).tensors) == 4
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    shard = saver.save(state)
    other = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    other.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    load({"optim": other, "w": torch.zeros(2)}, shard)
    assert float(next(iter(other.state.values()))["step"]) == 1.0


@pytest.mark.parametrize("size", [1, 3])
def test_live_ties_of_strided_elements_are_compared(size):
    """A single element may have any stride, which a view as bytes does not take."""
    column = torch.arange(2.0 * size).reshape(size, 2)[:, 0]
    shard = Saver().save({"a": column, "b": column.clone()})
    live = torch.zeros(size, 2)[:, 0]
    load({"a": live, "b": live}, shard)
    assert torch.equal(live, column)
