"""Save and restore over real agents: what is kept, what is refused, what a restart finds."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ecckpt
from ecckpt.client.cluster.local_agent import local_client
from ecckpt.client.save.commit_protocol import CommitProtocol
from ecckpt.errors import (
    InvalidConfig,
    InvalidMessage,
    NothingToRestore,
    StateMismatch,
    TooFewAgents,
    WrongOrder,
)
from ecckpt.protocol.agent_client import shard_path
from ecckpt.protocol.http import request
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.runs import run_status
from tests.support.worlds import World, same_state, states_for


def test_first_start_finds_nothing_and_the_next_one_finds_the_save(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=1)
    with World(cluster6, code=(3, 2)) as world:
        assert world.restore(states) == [None] * 6
        assert [each.timeline for each in world.checkpointers] == [1] * 6
        assert all(handle.wait(30) for handle in world.save(4, states))
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        found = world.restore(blank)
        assert [each.timeline for each in world.checkpointers] == [2] * 6
    assert [(each.step, each.source, each.pulled_bytes) for each in found] == [(4, "home", 0)] * 6
    assert all(map(same_state, blank, states))


def test_lost_nodes_are_replaced_and_the_margin_comes_back(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=2)
    with World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(4, states))
    cluster6.kill("n1", "n3", "n5")
    cluster6.replace("n1", "n3", "n5")
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        found = world.restore(blank)
        assert [each.source for each in found] == ["home", "peers"] * 3
        assert all(each.reprotection.wait(30) for each in found)
    assert all(map(same_state, blank, states))
    # The full margin is back: any other three may go now.
    lost = [cluster6.nodes[index] for index in (0, 1, 2)]
    cluster6.kill(*lost)
    cluster6.replace(*lost)
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        assert [each.step for each in world.restore(blank)] == [4] * 6
    assert all(map(same_state, blank, states))


def test_a_save_that_one_rank_missed_is_passed_over_by_all(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=3)
    newer = states_for(6, seed=4)
    with World(cluster6, code=(3, 2), save_timeout_s=2.0) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(4, states))
        handles = [
            world.checkpointers[rank].save(5, newer[rank], patience_s=30) for rank in range(5)
        ]
        for handle in handles:
            with pytest.raises(ecckpt.EcckptError, match=r"5\.|rank"):
                handle.wait(30)
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        found = world.restore(blank)
    assert {each.step for each in found} == {4}
    (why,) = found[0].rejected.values()
    assert "rank 5: nothing of it was found" in why
    assert all(map(same_state, blank, states))


def test_all_ranks_staged_but_nothing_committed_is_still_restorable(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=5)
    with World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        world.save(9, states)  # nobody waits: the agents finish it without the trainers
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        assert {each.step for each in world.restore(blank)} == {9}


def test_going_back_and_on_makes_a_newer_timeline(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=6)
    with World(cluster1) as world:
        world.restore([state])
        assert world.save(5000, [state])[0].wait(30)
    with World(cluster1) as world:
        assert world.restore([state])[0].step == 5000
        state["progress"]["step"] = -1
        assert world.save(400, [state])[0].wait(30)
    with World(cluster1) as world:
        (found,) = world.restore([state])
        assert (found.step, found.timeline) == (400, 3)
        with pytest.raises(NothingToRestore, match="test"):
            world.restore([state], step=5000)


def test_restoring_a_given_step(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=6)
    with World(cluster1) as world:
        world.restore([state])
        assert world.save(3, [state])[0].wait(30)
    with World(cluster1) as world:
        assert world.restore([state], step=3)[0].step == 3
        with pytest.raises(NothingToRestore):
            world.restore([state], step=4)


def test_a_roll_back_holds_until_something_newer_is_asked_for_by_name(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,), (new,) = states_for(1, seed=3), states_for(1, seed=9)
    with World(cluster1) as world:
        world.restore([old])
        assert world.save(3, [old])[0].wait(30)
        # Nobody counts and tells: so both steps stay.
        see_through = CommitProtocol.see_through
        monkeypatch.setattr(
            CommitProtocol,
            "see_through",
            lambda self, save: see_through(self, replace(save, counted=False)),
        )
        assert world.checkpointers[0].save(9, new, patience_s=30).wait(30)
    monkeypatch.undo()

    def restart(**wanted: Any) -> tuple[int, dict[str, str]]:
        (state,) = states_for(1, seed=0)
        with World(cluster1) as world:  # and crash before the next save
            (found,) = world.restore([state], **wanted)
        assert same_state(state, old if found.step == 3 else new)
        return found.step, dict(found.rejected)

    assert restart() == (9, {})
    assert restart(step=3)[0] == 3
    step, rejected = restart()
    ((newest, why),) = rejected.items()
    assert (step, newest.split(".")[1]) == (3, "9")
    assert "left by going back to 1.3." in why
    cluster1.restart("n0")
    assert restart()[0] == 3
    assert restart(generation=newest)[0] == 9
    assert restart() == (9, {})
    with World(cluster1) as world, pytest.raises(InvalidConfig, match="give one of them"):
        world.restore([old], step=3, generation=newest)
    with World(cluster1) as world, pytest.raises(InvalidMessage, match="no generation"):
        world.restore([old], generation="newest")


def test_saves_of_one_session_are_never_mistaken_for_each_other(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=6)
    with World(cluster1) as world:
        world.restore([state])
        assert world.save(5, [state])[0].wait(30)
        first = world.checkpointers[0].timeline
        port = (cluster1.root("n0") / "port").read_text()
        world.await_slots()  # or the rank would start an agent, too
        cluster1.kill("n0")  # all memory of the run is gone, but not what the store has counted
        cluster1.root("n0").mkdir(mode=0o700)
        (cluster1.root("n0") / "port").write_text(port)
        cluster1.start()
        assert world.restore([state]) == [None]
        assert world.checkpointers[0].timeline == first + 1
        assert world.save(5, [state])[0].wait(30)


def test_a_restart_that_finds_only_ruins_says_so(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=7)
    with World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(1, states))
    cluster6.kill("n0", "n1", "n2", "n3")
    cluster6.replace("n0", "n1", "n2", "n3")
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        with pytest.raises(NothingToRestore, match="4 of 6 shards lost") as caught:
            world.restore(blank)
        assert "another name" in str(caught.value)
    assert all(map(same_state, blank, states_for(6, seed=0)))


def test_required_wants_something(cluster1: LocalCluster) -> None:
    with World(cluster1) as world, pytest.raises(NothingToRestore):
        world.restore(states_for(1, seed=0), resume="required")


def test_a_state_that_does_not_fit_changes_nothing_on_any_rank(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=8)
    with World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(1, states))
    blank = states_for(6, seed=0)
    blank[2]["weights"] = torch.zeros(7)
    with (
        World(cluster6, code=(3, 2)) as world,
        pytest.raises(StateMismatch, match=r"rank 2.*weights"),
    ):
        world.restore(blank)
    expected = states_for(6, seed=0)
    assert all(same_state(blank[rank], expected[rank]) for rank in (0, 1, 3, 4, 5))


class Watching:
    """Has nothing to save, and knows whether the garbage collector was on when it was restored."""

    collecting: bool | None = None

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.collecting = gc.isenabled()


def test_the_garbage_collector_waits_for_a_restore(cluster1: LocalCluster) -> None:
    watching = Watching()
    with World(cluster1) as world:
        world.restore([{"watching": watching}])
        assert all(handle.wait(30) for handle in world.save(1, [{"watching": watching}]))
    assert watching.collecting is None
    with World(cluster1) as world:
        world.restore([{"watching": watching}])
    assert watching.collecting is False
    assert gc.isenabled()
    with World(cluster1) as world, pytest.raises(StateMismatch):
        world.restore([{"another": torch.zeros(1)}])
    assert gc.isenabled()


def test_what_ranks_had_for_themselves_fits_no_other_world_size(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=8)
    with World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(1, states))
    with (
        World(cluster6, ranks=4, agents=cluster6.addresses(), code=(3, 2)) as world,
        pytest.raises(
            StateMismatch, match=r"rank 5 of the 6 that saved; 4 ranks restore"
        ) as caught,
    ):
        world.restore(states_for(4, seed=0))
    assert "progress.rank: differs between rank 0" in str(caught.value)
    assert "weights: differs between rank 0" in str(caught.value)


def test_memory_is_recycled_and_stays_bounded(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=9, elements=1_000_000)
    client = cluster1.client("n0")
    worker = client.node().pid
    used, files = set(), set()

    def descriptors() -> int:
        return len(list(Path(f"/proc/{worker}/fd").iterdir()))

    with World(cluster1) as world:
        world.restore([state])
        for step in range(12):
            assert world.save(step, [state])[0].wait(30)
            if step == 3:
                before = descriptors()
            if step > 3:
                used.add(run_status(client)["used_bytes"])
                files.add(len(list((cluster1.root("n0") / "regions").iterdir())))
    assert len(used) == 1
    assert len(files) == 1
    deadline_s = time.monotonic() + 20  # requests in flight end; a leak of one a save would not
    while descriptors() > before + 3 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert descriptors() <= before + 3


def test_runs_side_by_side_do_not_touch_each_other(cluster1: LocalCluster) -> None:
    (one,), (two,) = states_for(1, seed=10), states_for(1, seed=11)
    with World(cluster1, run="one") as first, World(cluster1, run="two") as second:
        first.restore([one])
        second.restore([two])
        for step in range(4):
            assert first.save(step, [one])[0].wait(30)
        assert second.save(2, [two])[0].wait(30)
    blank = states_for(1, seed=0)
    with World(cluster1, run="two") as second:
        assert second.restore(blank)[0].step == 2
    assert same_state(blank[0], two)
    with World(cluster1, run="one") as first:
        assert first.restore(blank)[0].step == 3
    assert same_state(blank[0], one)


def test_a_shard_read_over_http_is_a_safetensors_file(
    cluster1: LocalCluster, tmp_path: Path
) -> None:
    (state,) = states_for(1, seed=12)
    with World(cluster1) as world:
        world.restore([state])
        (handle,) = world.save(1, [state])
        assert handle.wait(30)
        assert handle.generation is not None
    client = cluster1.client("n0")
    (shard,) = {header.shard for header in client.call(INVENTORY, "test").headers}
    assert shard.generation == handle.generation
    status, body = request(
        client.address, "GET", f"{shard_path(shard)}/shard", timeout_s=10, limit_bytes=1 << 24
    )
    assert status == 200
    path = tmp_path / "shard.safetensors"
    path.write_bytes(body)
    assert torch.equal(load_file(path)["weights"], state["weights"])


def test_what_is_changed_after_save_is_not_in_it(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=13)
    (expected,) = states_for(1, seed=13)
    with World(cluster1) as world:
        world.restore([state])
        (handle,) = world.save(1, [state])
        state["weights"].add_(1)
        state["progress"]["step"] = 99
        assert handle.wait(30)
    blank = states_for(1, seed=0)
    with World(cluster1) as world:
        world.restore(blank)
    assert same_state(blank[0], expected)


def test_calls_in_the_wrong_order(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=14)
    with World(cluster1) as world:
        with pytest.raises(WrongOrder, match="restore"):
            world.save(1, [state])
        world.restore([state])
        assert world.save(5, [state])[0].wait(30)
        with pytest.raises(WrongOrder, match="step 5 is not after step 5"):
            world.save(5, [state])
        (checkpointer,) = world.checkpointers
        assert checkpointer.due(0)
        assert "process crashes only" in checkpointer.promise


def test_alone_without_torch_distributed_or_an_agent(tmp_path: Path) -> None:
    """One process, one node: the agent is started, outlives its trainer, and is stopped by hand."""
    root = Path(f"/dev/shm/ecckpt-alone-{os.getpid()}")
    program = tmp_path / "train.py"
    program.write_text(
        "import torch, ecckpt\n"
        "state = {'w': torch.zeros(5), 'p': {'n': 0}}\n"
        "ckpt = ecckpt.Checkpointer('alone')\n"
        "restored = ckpt.restore(state)\n"
        "print('restored', restored.step if restored else None, state['p']['n'], flush=True)\n"
        "state['p']['n'] += 1\n"
        "ckpt.save(restored.step + 1 if restored else 0, state, patience_s=30)\n"
        # No close(): leaving the program must not lose the save.
    )
    environment = os.environ | {"ECCKPT_ROOT": str(root), "ECCKPT_NODE": "here"}

    def start() -> str:
        done = subprocess.run(
            [sys.executable, str(program)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        assert start() == "restored None 0"
        # In a session of its own: what ends the trainer's process group does not end it.
        assert os.getsid(local_client(root).node().pid) != os.getsid(0)
        assert start() == "restored 0 1"
        assert start() == "restored 1 2"
    finally:
        stop = [sys.executable, "-m", "ecckpt", "agent", "--stop", "--root", str(root)]
        assert subprocess.run(stop, check=False).returncode == 0
        shutil.rmtree(root)


def test_mistakes_of_the_caller_are_named(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=1)
    with World(cluster1) as world:
        (checkpointer,) = world.checkpointers
        world.restore([state])
        step = torch.tensor(100)
        handle = checkpointer.save(step, state)  # type: ignore[arg-type]
        step += 1
        assert handle.wait(30)
        assert handle.step == 100
        for wrong in (9.5, None, True):
            with pytest.raises(TypeError, match="whole number"):
                checkpointer.save(wrong, state)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"save\(step, state\)"):
            checkpointer.save(state, 1)  # type: ignore[arg-type]
        with pytest.raises(InvalidConfig, match="between 0"):
            checkpointer.save(-1, state)
        child = os.fork()
        if child == 0:
            found = 1
            try:
                checkpointer.save(101, state)
            except WrongOrder as error:
                checkpointer.close()  # does nothing here
                found = 0 if "forked from" in str(error) else 2
            finally:
                os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert checkpointer.save(102, state).wait(30)
    for call in (
        lambda: checkpointer.save(103, state),
        lambda: checkpointer.restore(state),
        lambda: checkpointer.ticket(103),
    ):
        with pytest.raises(WrongOrder, match=r"\(\) after close\(\)"):
            call()


def test_a_run_starts_without_an_agent_that_is_gone(
    cluster6: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = cluster6.addresses()
    with World(cluster6, ranks=2, agents=addresses[2:], code=(2, 1)) as world:
        world.restore(states_for(2, seed=0))
        assert all(handle.wait(30) for handle in world.save(1, states_for(2, seed=1)))
    cluster6.kill("n5")
    unknown = "no-such-host.invalid:7421"
    with World(cluster6, ranks=2, agents=[*addresses[2:], unknown], code=(2, 1)) as world:
        states = states_for(2, seed=0)
        assert world.restore(states)[0].step == 1
        assert same_state(states[1], states_for(2, seed=1)[1])
        assert set(world.checkpointers[0]._cluster.missing) == {addresses[5], unknown}
        assert all(handle.wait(30) for handle in world.save(2, states))
    lines = [record.message for record in caplog.records]
    assert sum("starts without a node" in line for line in lines) == 2


def test_a_start_from_scratch_says_so_and_hides_nothing(
    cluster1: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    gone = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
    with World(cluster1, agents=gone[:1]) as world:
        assert world.restore(states_for(1, seed=0)) == [None]
    assert any("it begins from scratch" in record.message for record in caplog.records)
    # Three that do not answer may have all of a run, and another start may have them.
    with World(cluster1, agents=gone) as world, pytest.raises(TooFewAgents, match="1 of 4 agents"):
        world.restore(states_for(1, seed=0))


class Touchy:
    """An object whose state cannot be checked on one rank."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to set."""

    def check_state_dict(self, state: dict[str, int]) -> list[str]:
        if self._fails:
            raise AttributeError("no such thing as n")
        return []


def test_an_error_of_an_object_is_one_on_all_ranks(cluster6: LocalCluster) -> None:
    with World(cluster6, ranks=2) as world:
        states: list[dict[str, Any]] = [{"o": Touchy(fails=False)} for _ in range(2)]
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(1, states))
    with World(cluster6, ranks=2) as world:
        states = [{"o": Touchy(fails=rank == 1)} for rank in range(2)]
        found = []

        def restore(rank: int) -> None:
            try:
                world.checkpointers[rank].restore(states[rank])
            except StateMismatch as error:
                found.append(str(error))

        world.each(restore)
    assert len(found) == 2
    assert all("rank 1: AttributeError: no such thing as n" in text for text in found)
