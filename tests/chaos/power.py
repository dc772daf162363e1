"""Power cut at any moment, from one seed: ``python tests/chaos/power.py SEED ROUNDS``.

Six ranks on six nodes with disks, RS(3, 2). A round is one start of the run: restore, then saves
that go to disk behind it, until the power of all nodes is cut: their agents end and their memory is
gone, whatever was being written. Then up to three nodes lose their disks, too. What must hold:
a restore finds what was said to be stored, or something newer, the same on all ranks, and the bytes
that were saved. Nodes are only lost when the generation to come back to has all its files on disk.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from ecckpt.errors import NothingToRestore
from ecckpt.format.ids import Generation
from ecckpt.policy.survival import Inventory, plan_recovery
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.worlds import World, same_state, states_for

_FILES = 6 + 6 * 5


class PowerCampaign:
    """One cluster, and what is known of its run."""

    def __init__(self, cluster: LocalCluster, seed: int, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self._say = say
        self._contents: dict[tuple[int, int], int] = {}
        self._newest: Generation | None = None  # that was said to be stored
        self._run = "test"

    def round(self) -> None:
        """Start, restore, save, cut the power, lose disks."""
        options = {"save_timeout_s": 2.0, "restore_timeout_s": 30.0}
        keep = self._random.choice([1, 1, 2])
        world = World(self._cluster, run=self._run, code=(3, 2), keep=keep, **options)
        try:
            step = self._restore(world)
            self._save_until_the_cut(world, step)
        except NothingToRestore as error:
            if self._newest is not None:
                raise
            # Cut off while its very first generation was written: said, not passed over in silence.
            self._run += "x"
            self._say(f"{error}")
            self._cluster.cut_power()
        finally:
            world.close()
        whole = self._count_after_the_cut()
        self._lose(self._random.randint(0, 3) if whole else 0)

    def _restore(self, world: World) -> int:
        states = states_for(6, seed=0)
        found = world.restore(states)
        if found[0] is None:
            assert self._newest is None, f"{self._newest} was stored, and nothing was found"
            return 0
        (generation,) = {each.generation for each in found}
        assert self._newest is None or generation >= self._newest, (generation, self._newest)
        seed = self._contents[generation.timeline, generation.step]
        assert all(map(same_state, states, states_for(6, seed=seed))), generation
        self._say(f"restored {generation}, stored was {self._newest}")
        return generation.step

    def _save_until_the_cut(self, world: World, step: int) -> None:
        cut = threading.Timer(self._random.uniform(0.0, 0.8), self._cluster.cut_power)
        timeline = world.checkpointers[0].timeline
        assert timeline is not None
        cut.start()
        while cut.is_alive():
            step += 1
            seed = self._random.randrange(1 << 30)
            self._contents[timeline, step] = seed
            handles = world.save(step, states_for(6, seed=seed))
            if self._random.random() < 0.7:
                for handle in handles:
                    handle.wait_done(2.0)
            self._note_stored(world)
            if self._random.random() < 0.3:
                time.sleep(self._random.uniform(0, 0.1))
        cut.join()

    def _note_stored(self, world: World) -> None:
        try:
            stored = world.checkpointers[self._random.randrange(6)].stored()
        except OSError:  # the power is gone
            return
        if stored is not None and (self._newest is None or stored > self._newest):
            self._newest = stored

    def _count_after_the_cut(self) -> bool:
        """Power is back: whether what a restore will come to has all its files on disk."""
        # The ranks of this test live on, and may have started agents again: these go, too.
        self._cluster.start()
        self._cluster.cut_power()
        self._cluster.start()
        inventories = self._inventories()
        assert not any(each.headers for each in inventories)
        chosen = plan_recovery(self._run, inventories).chosen
        if chosen is None:
            assert self._newest is None, f"{self._newest} was stored"
            return False
        assert self._newest is None or chosen.generation >= self._newest
        files = [h for each in inventories for h in each.disk]
        return sum(h.shard.generation == chosen.generation for h in files) == _FILES

    def _inventories(self) -> list[Inventory]:
        return [
            self._cluster.client(node).call(INVENTORY, self._run) for node in self._cluster.nodes
        ]

    def _lose(self, count: int) -> None:
        lost = self._random.sample(self._cluster.nodes, count)
        self._cluster.kill(*lost)
        self._cluster.replace(*lost)
        if lost:
            self._say(f"lost {', '.join(lost)}")


def run(seed: int, rounds: int, say: Callable[[str], None]) -> None:
    """So many rounds from one seed; an assertion says what did not hold."""
    with (
        tempfile.TemporaryDirectory(prefix="ecckpt-power-") as disks,
        LocalCluster(nodes=6, disk=Path(disks)) as cluster,
    ):
        campaign = PowerCampaign(cluster, seed, say)
        for number in range(rounds):
            say(f"round {number} of seed {seed}")
            campaign.round()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    run(int(sys.argv[1]), int(sys.argv[2]), print)
