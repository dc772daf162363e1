"""Optimizers and whole trainings: what continues is what would have gone on, bit for bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ecckpt.errors import StateMismatch
from ecckpt.state.file.shard import read_shard
from ecckpt.state.load.load import check, load
from ecckpt.state.rng import RngState
from ecckpt.state.snapshot.plan import plan_shard


def shard_of(state):
    plan = plan_shard(state)
    target = bytearray(plan.shard_bytes)
    plan.write(memoryview(target))
    return read_shard(memoryview(target))


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SCHEDULERS = {
    "step": lambda optim: lr_scheduler.StepLR(optim, 2),
    "cosine": lambda optim: lr_scheduler.CosineAnnealingLR(optim, 10),
    "onecycle": lambda optim: lr_scheduler.OneCycleLR(optim, 0.1, total_steps=30),
    "plateau": lambda optim: lr_scheduler.ReduceLROnPlateau(optim, patience=1),
    "lambda": lambda optim: lr_scheduler.LambdaLR(optim, lambda epoch: 0.9**epoch),
    "sequential": lambda optim: lr_scheduler.SequentialLR(
        optim,
        [lr_scheduler.ConstantLR(optim, 0.1), lr_scheduler.ExponentialLR(optim, 0.9)],
        milestones=[3],
    ),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.01),
    "tensor lr": lambda params: torch.optim.Adam(params, torch.tensor(0.01), foreach=False),
    "lbfgs": lambda params: torch.optim.LBFGS(params, 0.1, max_iter=3),
}


class Training:
    """A small training with everything that must be restored; ``losses`` is its trace."""

    def __init__(self, optimizer="adam", scheduler="step", seed=0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1)
        )
        self.optim = OPTIMIZERS[optimizer](self.model.parameters())
        self.sched = SCHEDULERS[scheduler](self.optim)
        self.generator = torch.Generator().manual_seed(seed)
        self.losses = []

    def state(self):
        return {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "rng": RngState({"data": self.generator}),
            "losses": self.losses,
        }

    def run(self, steps):
        for _ in range(steps):
            inputs = torch.randn(6, 4, generator=self.generator)
            inputs = inputs * random.random() + float(np.random.rand())

            def closure(inputs=inputs):
                self.optim.zero_grad()
                loss = self.model(inputs).square().mean()
                loss.backward()
                return loss

            loss = self.optim.step(closure)
            plateau = isinstance(self.sched, lr_scheduler.ReduceLROnPlateau)
            self.sched.step(*[loss.item()] if plateau else [])
            self.losses.append(loss.item())
        return self


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(name, "step") for name in OPTIMIZERS if name not in ("tensor lr",)]
    + [("adam", name) for name in SCHEDULERS]
    + [("tensor lr", "cosine")],
)
@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step")
def test_a_restored_training_continues_bit_for_bit(optimizer, scheduler):
    straight = Training(optimizer, scheduler).run(10)
    first = Training(optimizer, scheduler).run(5)
    shard = shard_of(first.state())
    first.run(2)  # what happens after the save is not in it
    resumed = Training(optimizer, scheduler, seed=1)
    load(resumed.state(), shard)
    assert len(resumed.losses) == 5
    resumed.run(5)
    assert resumed.losses == straight.losses
    for one, other in zip(
        straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    assert repr(straight.optim.state_dict()) == repr(resumed.optim.state_dict())
    assert straight.sched.state_dict().keys() == resumed.sched.state_dict().keys()


def test_each_save_holds_one_step_only():
    training = Training()
    saves = []
    previous = None
    for step in range(1, 9):
        training.run(1)
        plan = plan_shard(training.state(), previous=previous)
        target = bytearray(plan.shard_bytes)
        plan.write(memoryview(target))
        previous = plan
        weights = [tensor.clone() for tensor in training.model.state_dict().values()]
        saves.append((step, target, weights))
    for step, target, weights in saves:
        tree = read_shard(memoryview(target)).tree()
        assert {entry["step"].data.item() for entry in tree["optim"].state["state"].values()} == {
            step
        }
        assert len(tree["losses"]) == step
        for stored, weight in zip(tree["model"].state.values(), weights, strict=True):
            assert torch.equal(stored.data, weight)


def trained(make, sizes=(3,), dtype=torch.float32):
    params = [nn.Parameter(torch.randn(size, dtype=dtype)) for size in sizes]
    optimizer = make(params)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    return optimizer


def test_a_new_adam_really_gets_its_state():
    saved = trained(torch.optim.Adam, (3, 2))
    live = torch.optim.Adam([nn.Parameter(torch.zeros(size)) for size in (3, 2)], lr=9.0)
    load({"optim": live}, shard_of({"optim": saved}))
    assert repr(live.state_dict()) == repr(saved.state_dict())
    assert len(live.state) == 2
    assert live.param_groups[0]["lr"] == 0.001


def test_a_used_adam_goes_back_to_new():
    new = torch.optim.Adam([nn.Parameter(torch.zeros(3))])
    live = trained(torch.optim.Adam)
    load({"optim": live}, shard_of({"optim": new}))
    assert not live.state_dict()["state"]


def test_moments_keep_their_dtype_beside_other_parameters():
    saved = trained(torch.optim.Adam, dtype=torch.bfloat16)
    for entry in saved.state.values():
        entry["exp_avg"] = entry["exp_avg"].float() + 1e-6
    live = torch.optim.Adam([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])
    load({"optim": live}, shard_of({"optim": saved}))
    (one,), (other,) = saved.state.values(), live.state.values()
    assert other["exp_avg"].dtype == torch.float32
    assert torch.equal(one["exp_avg"], other["exp_avg"])
    assert other["exp_avg_sq"].dtype == torch.bfloat16


def problems(live, saved):
    before = repr(live.state_dict())
    with pytest.raises(StateMismatch) as caught:
        check({"optim": live}, shard_of({"optim": saved}))
    assert repr(live.state_dict()) == before
    return list(caught.value.problems)


def test_groups_parameters_and_options_must_match():
    saved = trained(torch.optim.Adam, (3, 2))
    adam = torch.optim.Adam
    one = nn.Parameter(torch.zeros(3))
    assert problems(adam([one]), saved) == [
        "optim.param_groups.0: 2 parameters saved, 1 here",
        "optim.state.1: saved for a parameter that this optimizer does not have",
    ]
    groups = [{"params": [one]}, {"params": [nn.Parameter(torch.zeros(2))]}]
    assert problems(adam(groups), saved) == ["optim: 1 parameter groups saved, 2 here"]
    assert problems(trained(adam, (3, 4)), saved) == [
        "optim.state.1.exp_avg: saved with shape [2], here [4]",
        "optim.state.1.exp_avg_sq: saved with shape [2], here [4]",
    ]
    assert "optim.param_groups.0.betas: an option of this optimizer, missing in the saved one" in (
        problems(adam([one]), trained(torch.optim.SGD))
    )
