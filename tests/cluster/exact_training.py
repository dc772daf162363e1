"""A training with everything that may make a resumed one differ: ``python exact_training.py``.

Arguments: root folder of an agent, folder for the results, modes (plain, torchdata, ddp, fsdp).
In each mode it runs once undisturbed, then once killed at steps 5, 10 and 15. Every start is a new
process (two for ddp and fsdp), forked from this one, which does nothing but import.
"""

import json
import os
import random
import signal
import socket
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # optimizers load it when they are made: once here, not in every process
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ecckpt

STEPS = 20
KILLS = (5, 10, 15)
SAMPLES, BATCH = 28, 4  # epochs of 7 steps: the saves before the kills lie within them


class Samples(torch.utils.data.Dataset):
    """Augmented with numbers from all three global generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(6) * float(np.random.rand()) * random.random()
        return torch.sin(torch.arange(6.0) * (index + 1)) + noise


class Batches:
    """Shuffled by a generator of its own."""

    def __init__(self, generator):
        self.samples, self.generator = Samples(), generator
        self.order, self.position = [], 0

    def draw(self):
        if self.position == len(self.order):
            self.order = torch.randperm(SAMPLES, generator=self.generator).tolist()
            self.position = 0
        chosen = self.order[self.position : self.position + BATCH]
        self.position += BATCH
        return torch.stack([self.samples[index] for index in chosen])

    def state_dict(self):
        return {"order": list(self.order), "position": self.position}

    def load_state_dict(self, state):
        self.order, self.position = state["order"], state["position"]


def stateful_loader():
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=0)


class Training:
    def __init__(self, mode, rank):
        torch.manual_seed(1)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 9),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(9, 1),
        )
        if mode == "ddp":
            net = DistributedDataParallel(net)
        elif mode == "fsdp":
            fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        self.model = net
        self.optim = torch.optim.AdamW(net.parameters(), lr=0.05)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.optim, 0.1, total_steps=STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        self.ema = {name: each.detach().clone() for name, each in net.named_parameters()}
        self.progress = {"step": -1, "losses": []}
        shuffling = torch.Generator().manual_seed(50 + rank)
        self.rng = ecckpt.RngState({"shuffling": shuffling})
        self.batches = stateful_loader() if mode == "torchdata" else Batches(shuffling)
        self.iterator = None
        torch.manual_seed(10 + rank)
        np.random.seed(20 + rank)
        random.seed(30 + rank)

    def state(self):
        names = ("model", "optim", "sched", "scaler", "ema", "progress", "rng", "batches")
        return {name: getattr(self, name) for name in names}

    def disturb(self):
        """What a new process has drawn by now is not what the killed one had."""
        torch.manual_seed(os.getpid())
        np.random.seed(os.getpid())
        random.seed(os.getpid())

    def begin(self):
        """Between restoring and the first step."""
        if not isinstance(self.batches, Batches):
            self.iterator = iter(self.batches)
        self.rng.rewind()

    def draw(self):
        if self.iterator is None:
            return self.batches.draw()
        batch = next(self.iterator, None)
        if batch is None:
            self.iterator = iter(self.batches)
            batch = next(self.iterator)
        return batch

    def step(self, step):
        loss = self.model(self.draw()).square().mean()
        self.progress["step"] = step
        self.progress["losses"].append(loss.item())
        # One overflow, so that the scaler skips a step and halves its scale.
        self.scaler.scale(loss * (float("inf") if step == 7 else 1.0)).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        self.optim.zero_grad()
        self.sched.step()
        with torch.no_grad():
            for name, each in self.model.named_parameters():
                self.ema[name].lerp_(each, 0.1)

    def facts(self):
        """Everything that a step changes, exactly."""
        tensors = [*self.model.parameters(), *self.ema.values()]
        for each in self.optim.state.values():
            tensors += each.values()
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        return {
            "loss": self.progress["losses"][-1].hex(),
            "scale": self.scaler.get_scale(),
            "rate": self.sched.get_last_lr()[0].hex(),
            "tensors": [part.detach().double().sum().item().hex() for part in parts],
        }


def run(mode, rank, out, *, root, kill):
    training = Training(mode, rank)
    if root is None:
        checkpointer, first = None, 0
    else:
        training.disturb()
        same = ["model", "optim", "ema"] if mode == "ddp" else []
        checkpointer = ecckpt.Checkpointer(mode, root=root, every_steps=2, replicated=same)
        restored = checkpointer.restore(training.state())
        if restored is None:  # a first start: as the undisturbed training
            training = Training(mode, rank)
        first = restored.step + 1 if restored else 0
    training.begin()
    with out.open("a") as file:
        for step in range(first, STEPS):
            training.step(step)
            file.write(json.dumps({"start": kill, "step": step} | training.facts()) + "\n")
            file.flush()
            if checkpointer and checkpointer.due(step):
                handle = checkpointer.save(step, training.state(), patience_s=30)
                assert handle.wait(30), handle.error
            if step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
    if checkpointer:
        checkpointer.close()


def start(mode, out, *, root=None, kill=-1):
    """One start of all ranks; they all end, in the way they should."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = 2 if mode in ("ddp", "fsdp") else 1
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)
                torch.set_num_threads(1)
                if ranks > 1:
                    at = f"tcp://127.0.0.1:{port}"
                    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=ranks)
                run(mode, rank, Path(f"{out}.{rank}"), root=root, kill=kill)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [-signal.SIGKILL if kill >= 0 else 0] * ranks, ends


def try_mode(mode, root, folder):
    """Whether the training ran to its end both times; says on stderr what went wrong."""
    try:
        start(mode, f"{folder}/{mode}.undisturbed")
        for kill in (*KILLS, -1):
            start(mode, f"{folder}/{mode}.killed", root=root, kill=kill)
    except AssertionError:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    agent_root, results, *modes = sys.argv[1:]
    outcomes = [try_mode(each, agent_root, results) for each in modes]
    sys.exit(not all(outcomes))
