"""Simulate one seed: a cluster under faults, then a quiet time in which all must become well.

Everything is drawn from the seed: the code, the sizes, the faults and their times. So the same seed
and commit give the same events, and ``SimulationOutcome.digest`` is a hash over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.retention import Keep
from ecckpt.policy.sizing import steady_bytes
from ecckpt.sim.faults import Faults, draw
from ecckpt.sim.hosts.host import SimulatedHost
from ecckpt.sim.hosts.interfaces import FragmentPuller, Witness
from ecckpt.sim.hosts.network import SimulatedNetwork
from ecckpt.sim.hosts.pulling import Puller
from ecckpt.sim.injector import Injector
from ecckpt.sim.launcher import Launcher
from ecckpt.sim.run_config import Rules
from ecckpt.sim.truth.counts import Counts
from ecckpt.sim.truth.violation import Violation
from ecckpt.sim.world import World

_CALM_S = 15.0  # before the first fault, so that something is committed that can be lost
_FAULTS_S = 60.0
_QUIET_S = 300.0  # all must be well by then; longer than every timeout of a save or a restore
_CHECK_EVERY_S = 1.0
_CODES = ((1, 1), (2, 1), (3, 2), (4, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """What became of one seed.

    Attributes:
        violation: the broken promise; empty if none was.
        kind: of the violation.
        lost: how many runs lost more than they promise to survive, and began anew.
        injected: how many faults were injected.
    """

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
    """A cluster of ``nodes`` hosts, drawn from a seed; a ``SimulatedCluster``."""

    def __init__(self, seed: int, nodes: int, faults: Faults | None = None) -> None:
        rng = Random(seed)  # noqa: S311  (no secrets here)
        self.seed = seed
        self.faults = draw(rng) if faults is None else faults
        self.world = World(seed)
        self.network = SimulatedNetwork(self.world)
        k, m = rng.choice([code for code in _CODES if sum(code) < nodes])
        most = max(1, nodes - k - m - 1)
        sizes = [min(size, most) for size in (2, 3, 4, 8, 16, nodes // 2)]
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
            f"n{number}": SimulatedHost(f"n{number}", f"rack{number % racks}", self)
            for number in range(nodes)
        }
        self._injector = Injector(self, self.launcher, self.faults)

    @property
    def witness(self) -> Witness:
        """The truth of the run that is current now."""
        return self.launcher.truth

    def puller(self, node: str) -> FragmentPuller:
        """Something that pulls fragments to that node."""
        return Puller(node, self.world, self.network, self.hosts)

    def run(self) -> SimulationOutcome:
        """Run the simulation; it ends at the first violation."""
        violation, kind = "", ""
        try:
            self._run_phases()
        except Violation as error:
            violation, kind = f"at {self.world.now_s:.3f} s: {error}", error.kind
        world = self.world
        return SimulationOutcome(
            seed=self.seed,
            nodes=len(self.hosts),
            ranks=self.ranks,
            rules=self.rules,
            faults=self.faults,
            violation=violation,
            kind=kind,
            lost=self.launcher.lost,
            counts=self.launcher.counts,
            injected=self._injector.injected + self.network.injected,
            events=world.events,
            simulated_s=world.now_s,
            digest=world.digest,
        )

    def _run_phases(self) -> None:
        for host in self.hosts.values():
            host.start()
        self.launcher.spawn(self.launcher.main())
        self.world.run(_CALM_S)
        self._injector.begin()
        self.world.run(_CALM_S + _FAULTS_S)
        self._injector.end()
        before = self.launcher.counts
        end_s = self.world.now_s + _QUIET_S
        while self.world.now_s < end_s and not self._is_well(before):
            self.world.run(self.world.now_s + _CHECK_EVERY_S)
        if not self._is_well(before):
            text = f"{_QUIET_S:g} s after the last fault no new generation is committed and whole"
            raise Violation("liveness", text)

    def _is_well(self, before: Counts) -> bool:
        """Whether a generation was committed since ``before`` and is whole.

        With disks, a generation was also stored since then.
        """
        now = self.launcher.counts
        if now.commits <= before.commits or (self.disks and now.stored <= before.stored):
            return False
        return self.launcher.truth.is_whole()


def _draw_rules(rng: Random, k: int, m: int) -> Rules:
    """The rules of a run. Budgets are what two ranks on a node need, or more."""
    rules = Rules(
        k=k,
        m=m,
        min_margin=rng.choice([0, None, 1]),
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
        # Tickets make no replica check: the DCP writer itself compares what ranks have in common.
        replicated=rng.random() < 0.3 and not tickets,
    )
    any_shard = ShardId("sim", Generation(1, 0, "0" * 16), 0)
    header = rules.header(any_shard, ranks=1, home="n0", parent=None)
    need_bytes = steady_bytes(header, local_ranks=2, holders=k + m)
    stored_bytes = 2 * (header.file_bytes + (k + m) * header.at(0).file_bytes)
    return replace(
        rules,
        budget_bytes=int(need_bytes * rng.choice([1.0, 1.5, 4.0])),
        disk_bytes=(rules.keep.last + 2) * stored_bytes * rng.choice([1, 4]),
    )


def simulate(seed: int, nodes: int, faults: Faults | None = None) -> SimulationOutcome:
    """Run one seed on a cluster of ``nodes`` hosts; ``faults`` replace those that it draws."""
    return Simulation(seed, nodes, faults).run()
