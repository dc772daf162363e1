"""Saved by four ranks, nodes lost, restored by three and by two: real processes, real agents."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ecckpt
from ecckpt.errors import StateMismatch
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.forked import preload, run_ranks
from tests.support.worlds import World

pytestmark = pytest.mark.long


def _build(mesh: DeviceMesh, seed: int, rows: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    # 5 rows are uneven on any of these worlds; one row leaves ranks with an empty shard.
    layers = torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1, bias=False)
    model = torch.nn.Sequential(*layers)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    big = torch.arange(rows * 1024, dtype=torch.float32).reshape(-1, 1024) * seed
    return {
        "model": model,
        "optim": optim,
        "progress": {"step": -1},
        "big": distribute_tensor(big, mesh, [Shard(0)], src_data_rank=None),
        "copy": distribute_tensor(big[:50] + 1, mesh, [Replicate()], src_data_rank=None),
        "rng": ecckpt.RngState(),
    }


def _train(state: dict[str, Any], step: int) -> None:
    state["model"](torch.full((3, 7), step + 1.0)).square().mean().backward()
    state["optim"].step()
    state["optim"].zero_grad()
    state["progress"]["step"] = step


def _digests(state: dict[str, Any]) -> dict[str, str]:
    tensors = {f"model.{name}": t for name, t in state["model"].state_dict().items()}
    for number, entry in state["optim"].state_dict()["state"].items():
        tensors |= {f"optim.{number}.{name}": t for name, t in entry.items()}
    tensors |= {"big": state["big"], "copy": state["copy"]}
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    raw = {name: tensor.contiguous().numpy().tobytes() for name, tensor in full.items()}
    return {name: hashlib.sha256(each).hexdigest() for name, each in raw.items()}


@dataclass(frozen=True)
class Plan:
    """What a start of the program does: saves at world 4, or restores at smaller ones."""

    roots: list[str]
    agents: list[str]
    code: tuple[int, int]
    worlds: list[int]
    save: bool
    rows: int = 2048

    def checkpointer(self, rank: int, world: int) -> ecckpt.Checkpointer:
        store = dist.PrefixStore(f"world {world}", dist.distributed_c10d._get_default_store())
        return ecckpt.Checkpointer(
            "reshard",
            root=self.roots[rank],
            agents=self.agents,
            code=self.code,
            store=store,
            rank=rank,
            world_size=world,
            restore_timeout_s=60,
        )

    def act(self, rank: int) -> dict[int, dict[str, Any]]:
        """What a rank has found, by the number of ranks."""
        found = {}
        for world in self.worlds:
            mesh = DeviceMesh("cpu", list(range(world)))
            if rank < world:
                found[world] = self._be(rank, world, mesh)
        dist.barrier()
        return found

    def _be(self, rank: int, world: int, mesh: DeviceMesh) -> dict[str, Any]:
        state = _build(mesh, 1 if self.save else 2, self.rows)
        with self.checkpointer(rank, world) as ckpt:
            restored = ckpt.restore(state)
            if self.save:
                for step in range(3):
                    _train(state, step)
                torch.manual_seed(rank)
                random.seed(rank)
                ckpt.save(2, state, patience_s=60).wait(60)
            one = {"digests": _digests(state), "step": state["progress"]["step"]}
            if restored:
                parts = [t.to_local().nbytes for t in (state["big"], *state["model"].parameters())]
                one |= {
                    "from": [restored.step, restored.source, restored.saved_by, restored.reseeded],
                    "pulled": restored.pulled_bytes,
                    "needed": sum(parts),
                    "rebuilt": restored.rebuilt_fragments,
                    "draw": torch.rand(()).item(),
                }
            if world == 2:  # the new world goes on: it commits, and comes back to its own
                _train(state, 3)
                ckpt.save(3, state, patience_s=60).wait(60)
                after = _digests(state)
                again = ckpt.restore(state)
                assert again is not None
                # From peers, since each of the two stored half of what is replicated.
                assert (again.step, again.source, again.saved_by) == (3, "peers", 2)
                assert _digests(state) == after
        return one


def test_fsdp2_on_four_ranks_comes_back_on_three_and_on_two(tmp_path: Path) -> None:
    preload()
    with LocalCluster(nodes=6) as cluster:
        roots = [str(cluster.root(node)) for node in cluster.nodes]
        plan = Plan(roots, cluster.addresses(), (3, 2), [4], save=True)
        saved = run_ranks(tmp_path, 4, plan.act, timeout_s=100)
        expected = saved[0][4]["digests"]
        # Two homes and a holder: m + 1. Of the lost homes' shards, fragments are left.
        cluster.kill("n1", "n2", "n5")
        roots = [str(cluster.root(node)) for node in ("n3", "n0", "n4")]
        plan = Plan(roots, cluster.addresses(), (1, 1), [3, 2], save=False)
        found = run_ranks(tmp_path, 3, plan.act, timeout_s=100)
    for world in (3, 2):
        ranks = [each[world] for each in found[:world]]
        for each in ranks:
            assert each["digests"] == expected
            assert (each["step"], each["from"]) == (
                2,
                [2, "peers", 4, ("rng: python", "rng: torch")],
            )
            assert each["pulled"] >= each["needed"]
        assert any(each["rebuilt"] for each in ranks)
        assert len({each["draw"] for each in ranks}) == world  # as when they were saved


def _alike(ranks: int, value: float) -> list[dict[str, object]]:
    return [{"weights": torch.full((300_000,), value), "lr": value} for _ in range(ranks)]


def test_what_all_ranks_had_alike_goes_to_any_number_of_ranks() -> None:
    with LocalCluster(nodes=6) as cluster:
        with World(cluster, ranks=4, agents=cluster.addresses(), code=(3, 2)) as world:
            world.restore(_alike(4, 0.0))
            assert all(handle.wait(30) for handle in world.save(1, _alike(4, 3.5)))
        cluster.kill("n0", "n1", "n4")
        cluster.replace("n0", "n1", "n4")
        blank = _alike(6, 0.0)
        with World(cluster, code=(3, 2)) as world:
            found = world.restore(blank)
            assert {(each.step, each.saved_by, each.reseeded) for each in found} == {(1, 4, ())}
            assert all(each.reprotection.wait(30) for each in found)
            assert all(handle.wait(30) for handle in world.save(2, blank))
            kept = {
                each.shard.generation.step
                for each in cluster.client("n2").call(INVENTORY, "test").headers
            }
            assert kept == {2}  # the old world's generation stayed until the new one's commit
        assert all(each["lr"] == 3.5 and (each["weights"] == 3.5).all() for each in blank)
        with World(cluster, ranks=1, agents=cluster.addresses(), code=(3, 2)) as world:
            blank[0]["extra"] = 1
            with pytest.raises(StateMismatch, match="extra: missing in the saved state"):
                world.restore(blank[:1])
