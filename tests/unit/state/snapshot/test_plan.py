"""Planning costs little when nothing but contents changed, however many tensors there are."""

import gc
import time

import pytest
import torch
from torch import nn

from ecckpt.errors import UnsupportedState
from ecckpt.state.snapshot.plan import plan_shard

TENSORS = 20_000
LIMIT_S = 0.1


def planned(state, previous=None):
    plan = plan_shard(state, previous=previous)
    plan.write(memoryview(bytearray(plan.shard_bytes)))
    return plan


def test_20000_unchanged_tensors_are_planned_in_100_ms():
    state = {"weights": {f"layer{index}.weight": torch.zeros(8) for index in range(TENSORS)}}
    plan = planned(state)
    times_s = []
    for _ in range(7):
        started_s = time.thread_time()  # of this thread alone: other work here does not count
        plan = plan_shard(state, previous=plan)
        times_s.append(time.thread_time() - started_s)
    assert min(times_s) < LIMIT_S


def test_the_collector_goes_on_after_planning():
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            plan_shard({"w": torch.ones(1)})
            with pytest.raises(UnsupportedState):
                plan_shard({"w": object()})
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def test_an_unchanged_state_keeps_its_layout():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state = {"model": model, "tied": model[0].weight, "int": {1: torch.zeros(2)}}
    first = planned(state)
    with torch.no_grad():
        model[0].weight.add_(1)
    second = planned(state, first)
    assert second._layout is first._layout
    state["tied"] = model[0].weight.clone()
    assert plan_shard(state, previous=second)._layout is not first._layout
