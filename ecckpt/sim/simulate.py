"""One seed, one cluster: a time of faults, then a time of quiet in which everything must be well.

Everything is drawn from the seed: the code, the sizes, the faults and when they come. So a seed and
a commit give the same events, which ``Outcome.digest`` tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from ecckpt.agent.core.sizing import steady_bytes
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.retention import Keep
from ecckpt.sim.faults import Faults, draw
from ecckpt.sim.hosts.host import SimulatedHost, Witness
from ecckpt.sim.hosts.network import SimulatedNetwork
from ecckpt.sim.injector import Injector
from ecckpt.sim.launcher import Launcher
from ecckpt.sim.run_config import Rules
from ecckpt.sim.truth.counts import Counts
from ecckpt.sim.truth.violation import Violation
from ecckpt.sim.world import World

_CALM_S = 15.0  # until something is committed
_FAULTS_S = 60.0
_QUIET_S = 300.0
_LOOK_S = 1.0
_CODES = ((1, 1), (2, 1), (3, 2), (4, 2))


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """What became of a seed. ``violation`` is empty if every promise was kept."""

    seed: int
    nodes: int
    ranks: int
    rules: Rules
    faults: Faults
    violation: str
    kind: str
    lost: int
    counts: Counts
    injected: int
    events: int
    simulated_s: float
    digest: int


class Simulation:
    """A cluster of so many nodes, made from a seed."""

    def __init__(self, seed: int, nodes: int, faults: Faults | None = None) -> None:
        rng = Random(seed)  # noqa: S311  (no secrets here)
        self.seed = seed
        self.faults = draw(rng) if faults is None else faults
        self.world = World(seed)
        self.network = SimulatedNetwork(self.world)
        k, m = rng.choice([each for each in _CODES if sum(each) < nodes])
        most = max(1, nodes - k - m - 1)
        sizes = [min(each, most) for each in (2, 3, 4, 8, 16, nodes // 2)]
        self.ranks = rng.choice(sizes)
        self.rules = _draw_rules(rng, k, m)
        self.budget_bytes = self.rules.budget_bytes
        self.disks = bool(self.rules.disk_every)
        self.launcher = Launcher(
            self,
            self.rules,
            seed=seed,
            ranks=self.ranks,
            sizes=sizes,
            strict=self.faults.of_disks_alone,
        )
        racks = rng.choice([nodes, max(1, nodes // 4)])
        self.hosts = {
            f"n{at}": SimulatedHost(f"n{at}", f"rack{at % racks}", self) for at in range(nodes)
        }
        self._injector = Injector(self, self.launcher, self.faults)

    @property
    def witness(self) -> Witness:
        """Who watches the run as it is called now."""
        return self.launcher.truth

    def run(self) -> SimulationOutcome:
        """Let it happen. A violation ends it."""
        violation, kind = "", ""
        try:
            self._live()
        except Violation as found:
            violation, kind = f"at {self.world.now_s:.3f} s: {found}", found.kind
        world = self.world
        return SimulationOutcome(
            self.seed,
            len(self.hosts),
            self.ranks,
            self.rules,
            self.faults,
            violation,
            kind,
            self.launcher.lost,
            self.launcher.counts,
            self._injector.injected + self.network.injected,
            world.events,
            world.now_s,
            world.digest,
        )

    def _live(self) -> None:
        for host in self.hosts.values():
            host.start()
        self.launcher.spawn(self.launcher.main())
        self.world.run(_CALM_S)
        self._injector.begin()
        self.world.run(_CALM_S + _FAULTS_S)
        self._injector.end()
        since = self.launcher.counts
        end_s = self.world.now_s + _QUIET_S
        while self.world.now_s < end_s and not self._is_well(since):
            self.world.run(self.world.now_s + _LOOK_S)
        if not self._is_well(since):
            raise Violation(
                "liveness", f"{_QUIET_S:g} s after the last fault there is no whole generation"
            )

    def _is_well(self, since: Counts) -> bool:
        now = self.launcher.counts
        if now.commits <= since.commits or (self.disks and now.stored <= since.stored):
            return False
        return self.launcher.truth.is_whole()


def _draw_rules(rng: Random, k: int, m: int) -> Rules:
    rules = Rules(
        k,
        m,
        min_margin=rng.choice([0, 0, 1]),
        shard_bytes=rng.choice([1, 700, 3000, 9000]),
        budget_bytes=0,
        step_s=rng.choice([4.0, 8.0]),
        save_timeout_s=rng.choice([20.0, 60.0]),
        restore_timeout_s=rng.choice([20.0, 40.0]),
        guarded=rng.random() < 0.5,
        roll_back=rng.choice([0.0, 0.0, 0.5]),
        reshape=rng.choice([0.0, 0.0, 0.5]),
        disk_every=rng.choice([0, 0, 1, 2]),
        disk_bytes=0,
        keep=Keep(rng.choice([1, 2, 3])),
        tickets=(tickets := rng.random() < 0.2),
        # A writer that saves by tickets compares what ranks have in common by itself.
        replicated=rng.random() < 0.3 and not tickets,
    )
    some = ShardId("sim", Generation(1, 0, "0" * 16), 0)
    header = rules.header(some, ranks=1, home="n0", parent=None)
    need_bytes = steady_bytes(header, local_ranks=2, holders=k + m)
    stored_bytes = 2 * (header.file_bytes + (k + m) * header.at(0).file_bytes)
    return replace(
        rules,
        budget_bytes=int(need_bytes * rng.choice([1.0, 1.5, 4.0])),
        disk_bytes=(rules.keep.last + 2) * stored_bytes * rng.choice([1, 4]),
    )


def simulate(seed: int, nodes: int, faults: Faults | None = None) -> SimulationOutcome:
    """Run one seed on so many nodes; the faults are drawn from it unless they are given."""
    return Simulation(seed, nodes, faults).run()
