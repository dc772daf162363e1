"""Many tensors, looked at together: nothing that one by one would show is passed over."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from ecckpt.errors import StateMismatch
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import check, load
from ecckpt.state.reshard.saved_shard import SavedShard
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.state.tensors.boxes import Common
from ecckpt.state.tensors.columns import TOGETHER
from tests.support.reshaping import PartReader

COUNT = 2 * TOGETHER + 7


def bytes_of(state):
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return target


def shard_of(state):
    return read_shard(memoryview(bytes_of(state)))


def numbers(start=0):
    return {f"t{index}": torch.arange(3.0) + index + start for index in range(COUNT)}


def blank():
    return {name: torch.zeros(3) for name in numbers()}


def assert_filled(live, saved):
    assert all(torch.equal(live[name], each) for name, each in saved.items())


def test_one_of_another_kind_among_them_is_filled_as_well():
    saved = numbers()
    saved |= {"square": torch.arange(9.0).reshape(3, 3), "z": torch.ones(2, dtype=torch.complex64)}
    saved |= {"empty": torch.ones(0, 3), "t5": torch.tensor([[0.0], [-0.0], [torch.nan]])}
    live = blank() | {"square": torch.zeros(3, 3).t(), "z": torch.zeros(2, dtype=torch.complex64)}
    live["z"] = live["z"].conj()
    live |= {"empty": torch.ones(0, 3), "t5": torch.zeros(3, 2)[:, :1]}
    live["t7"] = nn.Parameter(torch.zeros(3))
    with torch.inference_mode():
        live["t9"] = torch.zeros(3)
        load(live, shard_of(saved))
    assert torch.equal(live.pop("t5"), saved.pop("t5")) is False  # there is a NaN in it
    assert_filled(live, saved)
    assert live["t7"].requires_grad


def test_problems_come_in_the_order_of_the_state():
    saved, live = numbers(), blank()
    live["t1"] = torch.zeros(4)
    live["t2"] = [torch.zeros(1)]
    live["t600"] = live["t3"]
    live["t700"] = torch.zeros(3, dtype=torch.float64)
    live["t1000"] = torch.zeros(1).expand(3)
    del live["t4"]
    live["more"] = 1
    with pytest.raises(StateMismatch) as caught:
        check(live, shard_of(saved))
    assert list(caught.value.problems) == [
        "more: missing in the saved state",
        "t4: saved, but not in this state",
        "t1: saved with shape [3], here [4]",
        "t2: a tensor saved, list here",
        "t600: the same memory as t3 here, saved with other values",
        "t700: saved as torch.float32, here torch.float64",
        "t1000: expanded here, but saved with elements that differ",
    ]
    assert not any(live[f"t{index}"].any() for index in range(10, 500))


def test_what_is_tied_is_seen_wherever_it_is():
    saved, live = numbers(), blank()
    for other in ("t1", "t510", "t520", f"t{COUNT - 1}"):
        live[other], saved[other] = live["t0"], saved["t0"]
    live["t30"] = live["t31"][:]
    saved["t30"] = saved["t31"] + 0  # stored twice, and the same
    load(live, shard_of(saved))
    assert_filled(live, saved)
    saved["t520"] = saved["t520"] + 1
    with pytest.raises(StateMismatch, match="t520: the same memory as t0 here"):
        check(live, shard_of(saved))


def test_parts_that_overlap_are_filled_in_the_order_of_the_state():
    base = torch.zeros(5)
    live = blank() | {"hi": base[2:], "lo": base[:3]}
    saved = numbers() | {"hi": torch.full((3,), 1.0), "lo": torch.full((3,), 2.0)}
    load(live, shard_of(saved))
    assert base.tolist() == [2.0, 2.0, 2.0, 1.0, 1.0]


def test_a_graph_that_kept_a_tensor_is_not_used_with_new_values():
    live = blank()
    weight = torch.ones(3, requires_grad=True)
    kept = (weight * live["t4"]).sum()
    load(live, shard_of(numbers()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_views_are_made_for_whoever_asks_and_nothing_restored_keeps_the_buffer():
    plan = plan_shard({"a": numbers(), "list": list(numbers().values())})
    buffer = np.zeros(plan.shard_bytes, np.uint8)
    plan.write(memoryview(buffer))
    shard = read_shard(memoryview(buffer))
    assert shard.tensors["a.t3"] is shard.tensors["a.t3"]
    assert "a.t3" in shard.tensors
    assert "a.x" not in shard.tensors
    assert len(shard.tensors) == 2 * COUNT
    live = {"a": blank(), "list": list(blank().values())}
    check(live, shard)()
    gone = weakref.ref(buffer)
    del shard, buffer
    gc.collect()
    assert gone() is None
    assert_filled(live["a"], numbers())
    assert_filled(dict(zip(numbers(), live["list"], strict=True)), numbers())


def test_wholes_and_boxes_of_a_saved_shard_are_copied_alike():
    square = torch.arange(9.0).reshape(3, 3)
    reader = PartReader(bytes_of({"w": square, "tied": square, "empty": torch.ones(0, 3)}))
    saved = SavedShard(reader)
    raw, turned, corner = torch.zeros(3, 3), torch.zeros(3, 3).t(), torch.zeros(2, 4)
    all_of_it = Common((0, 0), (0, 0), (3, 3))
    saved.plan_copy("w", all_of_it, raw)
    saved.plan_copy("tied", all_of_it, raw)
    saved.plan_copy("tied", all_of_it, turned)
    saved.plan_copy("w", Common((1, 1), (0, 2), (2, 2)), corner)
    saved.plan_copy("empty", Common((0, 0), (0, 0), (0, 3)), torch.zeros(0, 3))
    read_bytes = reader.read_bytes
    saved.copy_planned()
    saved.release()
    assert reader.read_bytes == read_bytes + square.nbytes
    assert torch.equal(raw, square)
    assert torch.equal(turned, square)
    assert corner.tolist() == [[0, 0, 4, 5], [0, 0, 7, 8]]
    raw.zero_()
    saved.copy_planned()  # nothing is planned any more
    assert not raw.any()
    assert saved.dtype("tied") == torch.float32
