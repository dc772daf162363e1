"""What goes on after a restore is what would have gone on: layouts, ties, names, hooks, dtypes."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ecckpt.errors import StateMismatch, UnsupportedState
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import load
from ecckpt.state.snapshot.plan import plan_shard


def shard_of(state: Any) -> Any:
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return read_shard(memoryview(target))


def there_and_back(saved: Any, live: Any) -> Any:
    load(live, shard_of(saved))
    return live


# -- layouts --------------------------------------------------------------------------------------

FUSED = {
    "adam": lambda params: torch.optim.Adam(params, 0.05, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, 0.05, fused=True, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.05, fused=True),
    "foreach": lambda params: torch.optim.Adam(params, 0.05, foreach=True),
}
LAYOUTS = {
    "channels last": lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(5, 3).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "plain": lambda: torch.randn(4, 3),
}


def _step(param: nn.Parameter, optimizer: torch.optim.Optimizer, seed: int) -> None:
    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    param.grad = torch.empty_like(param).copy_(noise)
    optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", FUSED)
def test_moments_have_the_layout_of_their_parameter(kind: str, layout: str) -> None:
    param = nn.Parameter(LAYOUTS[layout]())
    optimizer = FUSED[kind]([param])
    _step(param, optimizer, 1)
    saved = shard_of({"param": param, "optim": optimizer})
    again = nn.Parameter(torch.empty_like(param).zero_())
    new = FUSED[kind]([again])
    load({"param": again, "optim": new}, saved)
    for key, value in optimizer.state[param].items():
        assert new.state[again][key].stride() == value.stride(), key
    for seed in (2, 3):
        _step(param, optimizer, seed)
        _step(again, new, seed)
    assert torch.equal(param, again)


class Keeper:
    """An object that keeps whatever tensors it is given."""

    def __init__(self, **kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def test_tensors_of_objects_keep_their_layout() -> None:
    made = {name.replace(" ", "_"): make() for name, make in LAYOUTS.items()}
    live = there_and_back({"ema": Keeper(**made)}, {"ema": Keeper()})["ema"].kept
    for name, tensor in made.items():
        assert live[name].stride() == tensor.stride(), name
        assert torch.equal(live[name], tensor)


def test_expanded_and_strided_views_come_back_whole_and_plain() -> None:
    made = {"expanded": torch.ones(1).expand(3, 2), "every_other": torch.arange(10.0)[::2]}
    live = there_and_back({"o": Keeper(**made)}, {"o": Keeper()})["o"].kept
    for name, tensor in made.items():
        assert live[name].is_contiguous()
        assert torch.equal(live[name], tensor)


# -- gradients and inference mode ------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_parameters_that_are_not_contiguous_are_filled_in_any_mode(mode: Any) -> None:
    def state(value: float) -> dict[str, Any]:
        base = torch.full((4, 6), value)
        return {
            "transposed": nn.Parameter(base.clone().t()),
            "sliced": nn.Parameter(base.clone()[:, ::2]),
            "last": nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
            "list": [nn.Parameter(base.clone().t())],
        }

    saved, live = shard_of(state(1.0)), state(0.0)
    with mode():
        load(live, saved)
    assert torch.equal(live["transposed"], torch.ones(6, 4))
    assert torch.equal(live["sliced"], torch.ones(4, 3))
    assert torch.equal(live["list"][0], torch.ones(6, 4))
    assert live["transposed"].requires_grad
    assert live["transposed"].grad_fn is None


def test_a_restore_in_inference_mode_leaves_no_inference_tensors() -> None:
    def training() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = training()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    again, new = training()
    ema = Keeper()
    with torch.inference_mode():
        there_and_back(
            {"model": model, "optim": optimizer, "ema": Keeper(w=torch.ones(2))},
            {"model": again, "optim": new, "ema": ema},
        )
    assert not ema.kept["w"].is_inference()
    again(torch.ones(1, 2)).sum().backward()
    new.step()


# -- optimizers -----------------------------------------------------------------------------------


class Soap(torch.optim.Optimizer):
    """Keeps state of other dtypes than its parameters, nested, and things that are no tensors."""

    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param] = {
                "step": 3,
                "GG": [torch.full((3,), 1.001), None],
                "deep": {"count": torch.tensor([2**24 + 1]), "pair": (torch.ones(2).double(), 1)},
                "window": deque([torch.full((2,), 1.001)], maxlen=3),
                "mode": "soap",
                "array": np.arange(3),
                "exp_avg": torch.full((2,), 1.001),
            }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return type(one) is type(other) and all(map(_same, one, other)) and len(one) == len(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("stepped", [False, True])
def test_nested_state_of_an_optimizer_comes_back_as_it_was(stepped: bool) -> None:
    def training() -> tuple[nn.Linear, Soap]:
        model = nn.Linear(2, 2).bfloat16()
        return model, Soap(model.parameters(), {"lr": 1.0})

    model, optimizer = training()
    optimizer.step()
    again, new = training()
    if stepped:
        new.step()
        new.state[again.weight]["mode"] = "other"
    there_and_back({"model": model, "optim": optimizer}, {"model": again, "optim": new})
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert _same(optimizer.state[one], new.state[other])


def _named(order: str, **options: Any) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    params = {name: nn.Parameter(torch.zeros(2)) for name in order}
    return params, torch.optim.AdamW(list(params.items()), lr=0.1, **options)


def _stepped(order: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    params, optimizer = _named(order)
    for at, name in enumerate(sorted(params)):
        params[name].grad = torch.full((2,), float(at + 1))
    optimizer.step()
    return params, optimizer


def test_moments_follow_the_names_of_parameters() -> None:
    params, optimizer = _stepped("abc")
    again, new = _named("cab")
    there_and_back({"p": params, "o": optimizer}, {"p": again, "o": new})
    for name in "abc":
        assert torch.equal(
            new.state[again[name]]["exp_avg"], optimizer.state[params[name]]["exp_avg"]
        )
    assert new.param_groups[0]["param_names"] == ["c", "a", "b"]


def test_groups_in_another_order_follow_their_names() -> None:
    def groups(order: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
        params = {name: nn.Parameter(torch.zeros(2)) for name in "ab"}
        decay = {"a": 0.5, "b": 0.0}
        made = [{"params": [(name, params[name])], "weight_decay": decay[name]} for name in order]
        return params, torch.optim.AdamW(made, lr=0.1)

    params, optimizer = groups("ab")
    again, new = groups("ba")
    new.param_groups[0]["weight_decay"] = new.param_groups[1]["weight_decay"] = 9.0
    there_and_back({"p": params, "o": optimizer}, {"p": again, "o": new})
    decays = {group["param_names"][0]: group["weight_decay"] for group in new.param_groups}
    assert decays == {"a": 0.5, "b": 0.0}


def test_a_load_hook_that_maps_names_maps_none_twice() -> None:
    def by_name(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        saved, live = state["param_groups"][0], optimizer.param_groups[0]
        at = dict(zip(saved["param_names"], saved["params"], strict=True))
        numbers = zip(saved["params"], live["param_names"], strict=True)
        moved = {number: state["state"][at[name]] for number, name in numbers}
        return {
            "state": moved,
            "param_groups": [{**saved, "param_names": live["param_names"]}],
        }

    params, optimizer = _stepped("ab")
    again, new = _named("ba")
    new.register_load_state_dict_pre_hook(by_name)
    there_and_back({"p": params, "o": optimizer}, {"p": again, "o": new})
    assert torch.equal(new.state[again["a"]]["exp_avg"], optimizer.state[params["a"]]["exp_avg"])


def test_other_names_are_refused_by_name() -> None:
    optimizer, new = _stepped("ab")[1], _named("ax")[1]
    with pytest.raises(StateMismatch, match=r"parameters b saved, x here"):
        load({"o": new}, shard_of({"o": optimizer}))


# -- modules --------------------------------------------------------------------------------------


class Derived(nn.Module):
    """Keeps something that is made of a parameter when that is loaded."""

    def __init__(self, value: float, how: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([value]), requires_grad=False)
        self.inverse = 1 / self.scale.detach()
        if how == "post-hook":
            self.register_load_state_dict_post_hook(lambda module, keys: module.refresh())
        elif how == "pre-hook":
            self.register_load_state_dict_pre_hook(
                lambda module, state, prefix, *rest: setattr(
                    module, "inverse", 1 / state[f"{prefix}scale"].clone()
                )
            )

    def refresh(self) -> None:
        self.inverse = 1 / self.scale.detach()


class OwnFrom(Derived):
    def _load_from_state_dict(self, *args: Any) -> None:  # type: ignore[override]
        super()._load_from_state_dict(*args)
        self.refresh()


class OwnLoad(Derived):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        result = super().load_state_dict(*args, **options)
        self.refresh()
        return result


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: Derived(value, "post-hook"),
        lambda value: Derived(value, "pre-hook"),
        lambda value: OwnFrom(value, ""),
    ],
)
def test_modules_that_act_on_a_load_are_loaded(make: Any, nested: bool) -> None:
    saved, live = make(2.0), make(4.0)
    inner, scale = live, live.scale
    if nested:
        saved, live = (nn.Sequential(nn.Linear(1, 1), each) for each in (saved, live))
    there_and_back({"m": saved}, {"m": live})
    assert inner.inverse.item() == 0.5
    assert inner.scale is scale


def test_a_module_with_its_own_load_state_dict_is_loaded_by_it() -> None:
    live = OwnLoad(4.0, "")
    there_and_back({"m": OwnLoad(2.0, "")}, {"m": live})
    assert (live.scale.item(), live.inverse.item()) == (2.0, 0.5)


class Renamed(nn.Module):
    """Calls a parameter otherwise than it was called when it was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.zeros(2))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}new"] = state.pop(f"{prefix}old")


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.ones(2))


def test_a_pre_hook_that_renames_keys_decides_what_fits() -> None:
    live = Renamed()
    there_and_back({"m": Old()}, {"m": live})
    assert torch.equal(live.new, torch.ones(2))
    with pytest.raises(StateMismatch, match=r"(?s)m: .*size mismatch"):
        load({"m": Renamed()}, shard_of({"m": OrderedDict(old=torch.ones(3))}))


class PlainDict(nn.Linear):
    """Its state is a plain dict of copies."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: value.clone() for name, value in super().state_dict().items()}


def test_a_module_whose_state_is_a_plain_dict_of_copies() -> None:
    saved, live = PlainDict(2, 2), PlainDict(2, 2)
    there_and_back({"m": saved}, {"m": live})
    assert torch.equal(live.weight, saved.weight)


def test_an_observer_takes_its_own_shapes() -> None:
    from torch.ao.quantization.observer import PerChannelMinMaxObserver

    saved, live = PerChannelMinMaxObserver(), PerChannelMinMaxObserver()
    saved(torch.randn(4, 3))
    there_and_back({"m": nn.Sequential(saved)}, {"m": nn.Sequential(live)})
    assert torch.equal(live.min_val, saved.min_val)


def test_a_lazy_module_takes_what_was_saved() -> None:
    saved = nn.LazyLinear(2)
    saved(torch.ones(1, 3))
    live = nn.LazyLinear(2)
    there_and_back({"m": nn.Sequential(saved)}, {"m": nn.Sequential(live)})
    assert torch.equal(live.weight, saved.weight)
    with pytest.raises(UnsupportedState, match="m"):
        plan_shard({"m": nn.LazyLinear(2)})


# -- ties -----------------------------------------------------------------------------------------


def test_one_memory_in_an_objects_state_stays_one() -> None:
    step = torch.zeros(())
    saved = Keeper(a={"step": step}, b={"step": step}, c=torch.zeros(()))
    live = there_and_back({"o": saved}, {"o": Keeper()})["o"].kept
    live["a"]["step"] += 1
    assert live["b"]["step"].item() == 1
    assert live["c"].item() == 0


def test_groups_of_an_optimizer_share_their_lr_tensor() -> None:
    def training() -> torch.optim.Optimizer:
        lr = torch.tensor(0.1)
        groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for _ in range(2)]
        return torch.optim.Adam(groups, foreach=False)

    live = training()
    there_and_back({"o": training()}, {"o": live})
    live.param_groups[0]["lr"].fill_(0.5)
    assert live.param_groups[1]["lr"].item() == 0.5


# -- containers and values ------------------------------------------------------------------------

LATER = {
    "none": (None, torch.tensor(0.5)),
    "inf": (math.inf, torch.tensor(0.5)),
    "number": (0, torch.arange(3)),
    "empty dict": ({}, {"grad": torch.ones(2), "n": 1}),
    "empty list": ([], [torch.ones(2), torch.zeros(1)]),
    "nested": ({"best": None, "all": []}, {"best": torch.ones(1), "all": [torch.ones(2)]}),
    "longer": ([1.0], [1.0, 2.0]),
    "more keys": ({"a": 1}, {"a": 2, "b": 3}),
    "none to dict": (None, {"a": [torch.ones(1)]}),
    "tuple": ((), (torch.ones(1), 2)),
}


@pytest.mark.parametrize("name", LATER)
def test_a_plain_value_takes_the_form_that_was_saved(name: str) -> None:
    template, saved = LATER[name]
    live = there_and_back({"w": torch.ones(1), "x": saved}, {"w": torch.zeros(1), "x": template})
    assert _same(live["x"], saved)
    if template == {} or template == []:
        assert live["x"] is template


def test_what_a_template_has_and_was_not_saved_is_refused_everywhere() -> None:
    for saved, live in (
        ({"lr": 0.5}, {"lr": 0.1, "new_flag": True}),
        ({"lr": 0.5, "w": torch.ones(1)}, {"lr": 0.1, "new_flag": True, "w": torch.ones(1)}),
    ):
        with pytest.raises(StateMismatch, match=r"opts.new_flag: missing in the saved state"):
            load({"opts": live}, shard_of({"opts": saved}))
        assert live["lr"] == 0.1


def test_a_tensor_of_the_template_takes_no_value() -> None:
    with pytest.raises(StateMismatch, match="x: a tensor here"):
        load({"x": torch.ones(1)}, shard_of({"x": 1.0}))


# -- memory that is too short ---------------------------------------------------------------------


def test_a_storage_that_is_too_short_is_refused_by_path() -> None:
    short = torch.arange(10.0)
    short.untyped_storage().resize_(8)
    for tensor in (short, torch.arange(10.0)[2:]):
        if tensor is not short:
            tensor.untyped_storage().resize_(8)
        with pytest.raises(UnsupportedState, match=r"a\.b.*storage"):
            plan_shard({"a": {"b": tensor, "c": torch.ones(3)}})
    empty = torch.arange(10.0)
    empty.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedState, match="storage"):
        plan_shard({"a": empty})
