"""Under torchrun: workers that are killed come back from their own node's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from ecckpt.policy.survival import plan_recovery
from ecckpt.protocol.agent_client import shard_path
from ecckpt.protocol.http import request
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster

PROGRAM = """
import json, os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import ecckpt

roots, agents, out = sys.argv[1].split(","), sys.argv[2].split(","), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

torch.manual_seed(1)
mesh = init_device_mesh("cpu", (2,))
# 5 rows over 2 ranks are uneven; one row leaves rank 1 with an empty shard.
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Dropout(0.2), torch.nn.Linear(5, 1))
fully_shard(model, mesh=mesh)
optim = torch.optim.AdamW(model.parameters(), lr=0.1)
torch.manual_seed(10 + rank)
progress = {"step": -1, "losses": []}
state = {"model": model, "optim": optim, "rng": ecckpt.RngState(), "progress": progress}

ckpt = ecckpt.Checkpointer(
    "crash", root=roots[rank], agents=agents, code=(1, 1), every_steps=2
)
restored = ckpt.restore(state)
for step in range(restored.step + 1 if restored else 0, 8):
    loss = model(torch.randn(3, 7)).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    progress["step"] = step
    progress["losses"].append(loss.item())
    if ckpt.due(step):
        ckpt.save(step, state, patience_s=60).wait(60)
    if "crash" in sys.argv and first_start and step == 5 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
ckpt.close()
weights = [each.to_local().flatten().tolist() for each in model.parameters()]
with open(f"{out}.{rank}", "w") as file:
    json.dump({
        "restored": restored and [restored.step, restored.timeline, restored.source,
                                  restored.pulled_bytes],
        "losses": [each.hex() for each in progress["losses"]],
        "weights": weights,
    }, file)
dist.destroy_process_group()
"""


def _run(tmp_path: Path, cluster: LocalCluster, name: str, *words: str) -> list[dict[str, object]]:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    roots = ",".join(str(cluster.root(node)) for node in cluster.nodes[:2])
    out = tmp_path / name
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1", str(program), roots]
    # The third node has no rank: it is known by its address, and holds fragments.
    command += [",".join(cluster.addresses()), str(out), *words]
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.long
def test_killed_workers_restart_from_home_copies_bit_for_bit(tmp_path: Path) -> None:
    with LocalCluster(nodes=3) as cluster:
        crashed = _run(tmp_path, cluster, "crashed", "crash")
        plan = plan_recovery(
            "crash", [cluster.client(node).call(INVENTORY, "crash") for node in cluster.nodes]
        )
        assert plan.chosen is not None
        assert (plan.chosen.generation.timeline, plan.chosen.generation.step) == (2, 6)
        assert plan.chosen.margin == 2
        shard = plan.chosen.shards[0].header
        assert shard is not None
        status, body = request(
            cluster.client("n0").address,
            "GET",
            f"{shard_path(shard.shard)}/shard",
            timeout_s=10,
            limit_bytes=1 << 24,
        )
        assert status == 200
        assert load(body)["model.0.weight"].shape == torch.Size([3, 7])  # rank 0's rows of 5
    with LocalCluster(nodes=3) as cluster:
        calm = _run(tmp_path, cluster, "calm")
    for one, other in zip(crashed, calm, strict=True):
        assert one["restored"] == [4, 2, "home", 0]
        assert other["restored"] is None
        assert one["losses"] == other["losses"]
        assert one["weights"] == other["weights"]
