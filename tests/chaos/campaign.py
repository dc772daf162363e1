"""Random faults against real agents, from one seed: ``python tests/chaos/campaign.py SEED ROUNDS``.

A round is one start of a run of six ranks on six nodes with RS(3, 2): restore, a few saves under
faults, close, then lose as many nodes as the newest committed generation survives. What must hold:

- all ranks end a save alike: committed on all, or failed on all;
- a restore finds the newest committed generation or a newer one, the same on all ranks, and the
  bytes that were saved;
- nothing committed is lost while its margin lasts;
- a restore that finds only what failed saves have left says so, if nothing was ever committed: then
  the run goes on under another name, as its error says.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from ecckpt import errors
from ecckpt.client.handles import SaveHandle
from ecckpt.policy.survival import plan_recovery
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.worlds import World, same_state, states_for

Step = tuple[int, int]  # timeline, step

FAULTS = ("none", "none", "kill worker", "restart agent", "stop agent", "do not wait")
STOPPED_S = 1.5


class Campaign:
    """One cluster, and what is known of its run."""

    def __init__(self, cluster: LocalCluster, seed: int, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self._say = say
        self._contents: dict[Step, int] = {}  # what was saved: the seed of the states
        self._committed: Step | None = None
        self._timeline = 0
        self._runs = 0

    def round(self) -> None:
        """Start, restore, save under faults, end, lose nodes."""
        settings = {"code": (3, 2), "save_timeout_s": 20, "restore_timeout_s": 20}
        with World(self._cluster, run=self._run, **settings) as world:
            step = self._restore(world)
            if step is None:
                self._runs += 1
                return
            pending: list[SaveHandle] = []
            for _ in range(self._random.randint(1, 3)):
                step += self._random.randint(1, 5)
                pending = self._save(world, step)
        self._settle(pending)
        self._lose()

    @property
    def _run(self) -> str:
        return f"test{self._runs or ''}"

    def _restore(self, world: World) -> int | None:
        states = states_for(6, seed=0)
        try:
            found = world.restore(states)
        except errors.NothingToRestore as error:
            if self._committed is not None:
                raise
            self._say(f"nothing was ever committed: {error}")
            return None
        self._timeline = world.checkpointers[0].timeline
        if found[0] is None:
            assert self._committed is None
            return 0
        assert len({each.generation for each in found}) == 1
        key = (found[0].generation.timeline, found[0].step)
        assert self._committed is None or key >= self._committed
        assert all(map(same_state, states, states_for(6, seed=self._contents[key])))
        assert all(each.reprotection.wait_done(30) for each in found)
        self._committed = key
        self._say(f"restored {key} from {[each.source for each in found]}")
        return found[0].step

    def _save(self, world: World, step: int) -> list[SaveHandle]:
        content = len(self._contents) + 1
        self._contents[self._timeline, step] = content
        fault = self._random.choice(FAULTS)
        victim = self._random.choice(self._cluster.nodes)
        delay_s = 0.05 * self._random.random()
        thread = threading.Thread(target=self._disturb, args=(fault, victim, delay_s))
        thread.start()
        handles = world.save(step, states_for(6, seed=content))
        if fault != "do not wait":
            self._settle(handles)
        thread.join()
        self._say(f"save {step}, fault: {fault} {victim}: {handles[0]}")
        return handles

    def _settle(self, handles: list[SaveHandle]) -> None:
        assert all(handle.wait_done(60) for handle in handles)
        outcomes = {handle.committed for handle in handles}
        assert len(outcomes) == 1, f"committed on some ranks, failed on others: {handles}"
        if outcomes == {True}:
            self._committed = (self._timeline, handles[0].step)

    def _disturb(self, fault: str, victim: str, delay_s: float) -> None:
        time.sleep(delay_s)
        if fault == "kill worker":
            os.kill(self._cluster.client(victim).node().pid, signal.SIGKILL)
        elif fault == "restart agent":
            self._cluster.restart(victim)
        elif fault == "stop agent":
            os.killpg(self._cluster.pid(victim), signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.killpg(self._cluster.pid(victim), signal.SIGCONT)

    def _lose(self) -> None:
        clients = map(self._cluster.client, self._cluster.nodes)
        plan = plan_recovery(self._run, [client.call(INVENTORY, self._run) for client in clients])
        margins = {
            (report.generation.timeline, report.generation.step): report.margin
            for report in plan.generations
        }
        if self._committed is None:
            return
        margin = max(margins[key] for key in margins if key >= self._committed)
        assert margin >= 0, f"{self._committed} was committed: {margins}"
        count = min(self._random.randint(0, 3), margins.get(self._committed, margin))
        lost = self._random.sample(self._cluster.nodes, max(0, count))
        if lost:
            self._cluster.kill(*lost)
            self._cluster.replace(*lost)
        self._say(f"lost {lost}, margins were {margins}")


def run(seed: int, rounds: int, say: Callable[[str], None]) -> None:
    """Run a campaign; an ``AssertionError`` or an ``EcckptError`` is a fault found."""
    with LocalCluster(nodes=6) as cluster:
        campaign = Campaign(cluster, seed, say)
        for number in range(rounds):
            say(f"seed {seed}, round {number}")
            try:
                campaign.round()
            except errors.EcckptError as error:
                raise AssertionError(f"seed {seed}, round {number}: {error}") from error


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), lambda text: print(text, flush=True))
