"""All memory of all nodes is gone; what is on their disks comes back, byte for byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ecckpt
from ecckpt.cli import main
from ecckpt.client.cluster import local_agent as agents
from ecckpt.errors import AgentUnreachable, NothingToRestore, SaveSkipped
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, parse_superblock
from ecckpt.format.ids import Generation
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.media import frozen, small_ext4, small_tmpfs
from tests.support.runs import run_status
from tests.support.worlds import World, same_state, states_for


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Six nodes with disks."""
    with LocalCluster(nodes=6, disk=tmp_path) as cluster:
        yield cluster


def inventories(cluster: LocalCluster) -> list[Inventory]:
    return [cluster.client(node).call(INVENTORY, "test") for node in cluster.nodes]


def await_true(what: Callable[[], bool], *, but: type[Exception] = AssertionError) -> None:
    """Wait until it is so; ``but`` may be raised meanwhile."""
    deadline_s = time.monotonic() + 30
    while True:
        with suppress(but):
            if what():
                return
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def on_disk(cluster: LocalCluster) -> dict[Generation, int]:
    """Files on all disks, by generation."""
    found: dict[Generation, int] = {}
    for inventory in inventories(cluster):
        for header in inventory.disk:
            found[header.shard.generation] = found.get(header.shard.generation, 0) + 1
    return found


def save_all(world: World, *steps: int) -> list[Generation]:
    """Save states whose seed is the step; wait until each is on disk."""
    made = []
    for step in steps:
        handles = world.save(step, states_for(world.ranks, seed=step))
        assert all(handle.wait(30) for handle in handles)
        generation = handles[0].generation
        assert generation is not None
        await_true(lambda g=generation: world.checkpointers[-1].stored() == g)
        made.append(generation)
    return made


def restored_step(cluster: LocalCluster, **wanted: object) -> tuple[int, str]:
    """What a restart comes back to, on all ranks, and from where; its bytes are compared."""
    states = states_for(len(cluster.nodes), seed=0)
    with World(cluster, code=(3, 2)) as world:
        found = world.restore(states, **wanted)
    (step,) = {each.step for each in found}
    assert all(map(same_state, states, states_for(len(cluster.nodes), seed=step)))
    return step, ",".join(sorted({each.source for each in found}))


def test_everything_comes_back_after_a_loss_of_power(cluster: LocalCluster) -> None:
    with World(cluster, code=(3, 2), keep=2) as world:
        world.restore(states_for(6, seed=0))
        first, old, new = save_all(world, 4, 5, 6)
    # 6 homes and 30 fragments of each that is kept; the oldest is gone.
    await_true(lambda: on_disk(cluster) == {old: 36, new: 36})
    cluster.cut_power()
    cluster.start()
    for inventory in inventories(cluster):
        assert not inventory.headers
        assert inventory.stored == (old, new)
    assert restored_step(cluster) == (6, "peers")
    assert restored_step(cluster) == (6, "home")  # it is in memory again
    # What is kept on disk can be gone back to, and that holds through another loss of power.
    assert restored_step(cluster, step=5) == (5, "peers")
    assert restored_step(cluster) == (5, "home")
    cluster.cut_power()
    cluster.start()
    assert restored_step(cluster) == (5, "peers")
    # Some fragments out of memory, some from disk, and three nodes lost with both.
    cluster.cut_power("n1", "n2")
    cluster.start(["n1", "n2"])
    cluster.kill("n0", "n4", "n5")
    cluster.replace("n0", "n4", "n5")
    assert restored_step(cluster)[0] == 5
    with pytest.raises(NothingToRestore, match=str(first)):
        restored_step(cluster, generation=first)


def rot(cluster: LocalCluster) -> None:
    """Damage every fragment in all memory, within home copies too."""
    for node in cluster.nodes:
        for path in (cluster.root(node) / "regions").iterdir():
            with path.open("r+b") as file:
                header = parse_superblock(file.read(SUPERBLOCK_BYTES), path.name)
                for index in range(header.k if header and header.index == HOME else 1):
                    file.seek(SUPERBLOCK_BYTES + index * (header.fragment_bytes if header else 0))
                    file.write(b"rot")


def test_what_has_rotted_in_all_memory_comes_from_the_disks(cluster: LocalCluster) -> None:
    with World(cluster, code=(3, 2)) as world:
        world.restore(states_for(6, seed=0))
        (generation,) = save_all(world, 1)
        await_true(lambda: on_disk(cluster) == {generation: 36})
    rot(cluster)
    opened = ecckpt.open("test", agents=cluster.addresses())
    for rank, state in enumerate(states_for(6, seed=1)):
        assert torch.equal(opened.as_rank(rank)["weights"], state["weights"])
    assert restored_step(cluster) == (1, "peers")


def test_one_node_keeps_its_run_through_a_loss_of_power(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalCluster(nodes=1, disk=tmp_path) as cluster:
        with World(cluster, keep=2) as world:
            world.restore(states_for(1, seed=0))
            generation = save_all(world, 1, 2)[-1]
        root, (address,) = str(cluster.root("n0")), cluster.addresses()
        assert main(["status", "--root", root]) == 0
        assert f"on disk: stored everywhere {generation}, here 2 files" in capsys.readouterr().out
        assert main(["plan-restore", "test", address, "--without-memory"]) == 1
        assert f"* {generation}  recoverable" in capsys.readouterr().out
        cluster.cut_power()
        newest = next((tmp_path / "n0" / "files").glob("test~*@1.2.*@home.ecckpt"))
        raw = bytearray(newest.read_bytes())
        raw[100] ^= 1
        newest.write_bytes(raw)
        cluster.start()
        with World(cluster) as world:
            states = states_for(1, seed=0)
            assert world.restore(states)[0].step == 1
        assert same_state(states[0], states_for(1, seed=1)[0])
        status = run_status(cluster.client("n0"))
        assert "CRC32C" in status["rejected"][f"disk/{newest.name}"]
        assert newest.read_bytes() == raw


@pytest.mark.long
def test_a_full_disk_costs_its_own_redundancy_and_is_reported(tmp_path: Path) -> None:
    """One of six disks is too small; another cannot be written at all."""
    disks = tmp_path / "disks"
    (disks / "n1").mkdir(parents=True, mode=0o700)
    (disks / "n2").write_text("no folder")
    with (
        small_tmpfs(disks / "n1", "256k"),
        LocalCluster(nodes=6, disk=disks) as cluster,
        World(cluster, code=(3, 2), disk_bytes=1 << 40) as world,
    ):
        world.restore(states_for(6, seed=0))
        old, new = save_all(world, 1, 2)
        problems = {node: cluster.client(node).status() for node in ("n1", "n2", "n3")}
        runs = {node: run_status(cluster.client(node)) for node in problems}
        assert "bytes wanted" in runs["n1"]["disk_problems"][0]
        assert "disk" in problems["n2"]["disk"]["problem"]
        assert runs["n2"]["disk_files"] == 0
        assert runs["n3"]["disk_problems"] == []
        await_true(lambda: old not in on_disk(cluster))
        assert 20 < on_disk(cluster)[new] < 36
        world.close()
        cluster.cut_power()
        cluster.start()
        assert restored_step(cluster) == (2, "peers")


@pytest.mark.long
def test_a_frozen_disk_keeps_no_save_waiting_and_catches_up(tmp_path: Path) -> None:
    with (
        small_ext4(tmp_path, mib=64) as mounted,
        LocalCluster(nodes=1, disk=mounted) as cluster,
        World(cluster) as world,
    ):
        world.restore(states_for(1, seed=0))
        (first,) = save_all(world, 1)
        with frozen(mounted):
            for step in range(2, 6):
                (handle,) = world.save(step, states_for(1, seed=step))
                assert handle.wait(10)
                status = run_status(cluster.client("n0"))
            assert status["disk_waiting_bytes"] > 0
            assert world.checkpointers[0].stored() == first
        await_true(lambda: world.checkpointers[0].stored() == handle.generation)
        world.close()
        cluster.cut_power()
        cluster.start()
        states = states_for(1, seed=0)
        with World(cluster) as later:
            assert later.restore(states)[0].step == 5
        assert same_state(states[0], states_for(1, seed=5)[0])
        cluster.cut_power()


@pytest.mark.long
def test_an_agent_that_a_trainer_starts_again_has_its_disk(tmp_path: Path) -> None:
    with LocalCluster(nodes=1, disk=tmp_path) as cluster, World(cluster) as world:
        world.restore(states_for(1, seed=0))
        (first,) = save_all(world, 1)
        cluster.cut_power()
        (handle,) = world.save(2, states_for(1, seed=2), patience_s=0)
        with pytest.raises((AgentUnreachable, SaveSkipped)):  # the slot was there already, or not
            handle.wait(30)
        await_true(lambda: cluster.client("n0").node().node == "n0", but=AgentUnreachable)
        assert inventories(cluster)[0].stored == (first,)
        cluster.start()  # for its end: the cluster knows only agents that it has started itself
    for _, each in agents._started:
        each.wait(10)


def test_a_disk_of_somebody_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalCluster(nodes=1, disk=tmp_path) as cluster:
        root = cluster.root("n0").parent / "other"
        arguments = ["agent", "--root", str(root), "--node", "n0", "--disk", str(tmp_path)]
        assert main(arguments) == 1
        assert f"{tmp_path}/n0: an agent already runs here" in capsys.readouterr().err
        (tmp_path / "n9").mkdir(mode=0o755)
        arguments[2], arguments[4] = str(root.with_name("another")), "n9"
        assert main(arguments) == 2
        assert "is not private" in capsys.readouterr().err


def test_without_disks_nothing_is_asked_of_them(cluster1: LocalCluster) -> None:
    with World(cluster1) as world:
        world.restore(states_for(1, seed=0))
        for step in (1, 2):
            assert all(each.wait(30) for each in world.save(step, states_for(1, seed=step)))
        assert world.checkpointers[0].stored() is None
    status = cluster1.client("n0").status()
    assert status["disk"] == {"folder": "", "problem": ""}
    assert run_status(cluster1.client("n0"))["disk_files"] == 0
