"""One seed, one cluster: a time of faults, then a time of quiet in which everything must be well.

Everything is drawn from the seed: the code, the sizes, the faults and when they come. So a seed and
a commit give the same events, which ``Outcome.digest`` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ecckpt.agent.sizes import steady_bytes
from ecckpt.generation import Generation, ShardId
from ecckpt.placement import Code, Node, plan_placement
from ecckpt.sim.faults import NONE, Faults, draw
from ecckpt.sim.host import Host
from ecckpt.sim.network import Network
from ecckpt.sim.rank import header_for
from ecckpt.sim.session import Rules, Session
from ecckpt.sim.truth import Truth, Violation
from ecckpt.sim.world import Actor, Steps, World, sleep

_CALM_S = 15.0  # until something is committed
_FAULTS_S = 60.0
_QUIET_S = 300.0
_CODES = ((1, 1), (2, 1), (3, 2), (4, 2))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed. ``violation`` is empty if every promise was kept."""

    seed: int
    nodes: int
    ranks: int
    code: str
    faults: Faults
    violation: str
    kind: str
    lost: int
    commits: int
    restores: int
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
        self.network = Network(self.world)
        k, m = rng.choice([each for each in _CODES if sum(each) < nodes])
        most = max(1, nodes - k - m - 1)
        self.ranks = min(rng.choice([2, 3, 4, 8, 16, nodes // 2]), most)
        self.code = Code(k, m, k + m)
        shard_bytes = rng.choice([1, 700, 3000, 9000])
        header = header_for(
            ShardId("sim", Generation(1, 0, "0" * 16), 0),
            ranks=self.ranks,
            k=k,
            m=m,
            shard_bytes=shard_bytes,
            home="n0",
            parent=None,
        )
        need_bytes = steady_bytes(header, local_ranks=2, holders=k + m)
        self.budget_bytes = int(need_bytes * rng.choice([1.0, 1.5, 4.0]))
        self.rules = Rules(
            k,
            m,
            min_margin=rng.choice([0, 0, 1]),
            shard_bytes=shard_bytes,
            budget_bytes=self.budget_bytes,
            step_s=rng.choice([4.0, 8.0]),
            save_timeout_s=rng.choice([20.0, 60.0]),
            restore_timeout_s=rng.choice([20.0, 40.0]),
            guarded=rng.random() < 0.5,
        )
        self.runs = 0
        self.unsafe = 0
        self.witness = self.truth = self._new_run()
        racks = rng.choice([nodes, max(1, nodes // 4)])
        self.hosts = {f"n{at}": Host(f"n{at}", f"rack{at % racks}", self) for at in range(nodes)}
        self.session: Session | None = None
        self.injected = 0
        self._commits = self._restores = 0
        self._launcher = Actor(self.world)
        self._sessions = 0
        self._homes: list[str] = []
        self._quiet = False

    def run(self) -> Outcome:
        """Let it happen. A violation ends it."""
        violation, kind = "", ""
        try:
            self._live()
        except Violation as found:
            violation, kind = f"at {self.world.now_s:.3f} s: {found}", found.kind
        world, truth = self.world, self.truth
        return Outcome(
            self.seed,
            len(self.hosts),
            self.ranks,
            str(self.code),
            self.faults,
            violation,
            kind,
            self.runs - 1,
            self._commits + truth.commits,
            self._restores + truth.restores,
            self.injected + self.network.injected,
            world.events,
            world.now_s,
            world.digest,
        )

    def _live(self) -> None:
        for host in self.hosts.values():
            host.start()
        self._launcher.spawn(self._launch())
        self.world.run(_CALM_S)
        self._begin_faults()
        self.world.run(_CALM_S + _FAULTS_S)
        self._end_faults()
        since = self._commits + self.truth.commits
        end_s = self.world.now_s + _QUIET_S
        self.world.run(end_s, ended=lambda: self._is_well(since))
        if not self._is_well(since):
            raise Violation(
                "liveness", f"{_QUIET_S:g} s after the last fault there is no whole generation"
            )

    def _is_well(self, since: int) -> bool:
        return self._commits + self.truth.commits > since and self.truth.is_whole()

    def _new_run(self) -> Truth:
        """What a person does when nothing is left: give the run another name."""
        self.runs += 1
        k, m = self.rules.k, self.rules.m
        least = min(k + self.rules.min_margin, k + m)
        return Truth(f"sim{self.runs}", ranks=self.ranks, least=least, survived=m + 1)

    # -- the launcher -----------------------------------------------------------------------------

    def _launch(self) -> Steps:
        """Start the ranks, and all of them again when one has ended."""
        while True:
            hosts = {node: host for node, host in self.hosts.items() if self._answers(host)}
            if len(hosts) <= self.code.holders:
                yield sleep(2.0)
                continue
            self.session = session = self._session(hosts)
            session.begin()
            while not session.failed:
                yield sleep(1.0)
            for member in session.members:
                frozen = member.stalled and self.world.chance(0.5)
                if not frozen and self.network.passes("launcher", member.host.node):
                    member.kill()
            yield sleep(self.world.rng.uniform(0.5, 3.0))
            if session.nothing_left and (self.truth.safe is None or self.truth.is_lost()):
                self.unsafe += self.truth.safe is None
                self._commits += self.truth.commits
                self._restores += self.truth.restores
                for host in self.hosts.values():
                    host.tidy()  # or they would stop the new run (decision 13)
                self.witness = self.truth = self._new_run()

    def _answers(self, host: Host) -> bool:
        agent = host.agent
        return (
            agent is not None and not agent.stalled and self.network.passes("launcher", host.node)
        )

    def _session(self, hosts: dict[str, Host]) -> Session:
        self._sessions += 1
        placement = plan_placement([Node(h.node, h.domain) for h in hosts.values()], self.code)
        homes = self._homes = self._place(list(hosts))
        return Session(
            self._sessions,
            seed=self.seed,
            run=self.truth.run,
            rules=self.rules,
            world=self.world,
            network=self.network,
            truth=self.truth,
            hosts=hosts,
            homes=homes,
            placement=placement,
        )

    def _place(self, nodes: list[str]) -> list[str]:
        """A home for each rank: where it was, if it can be there alone; else evenly."""
        homes: list[str] = []
        for home in self._homes or [""] * self.ranks:
            homes.append(home if home in nodes and home not in homes else "")
        free = [node for node in nodes if node not in homes]
        self.world.rng.shuffle(free)
        free += nodes * self.ranks
        return [home or free.pop(0) for home in homes]

    # -- faults -----------------------------------------------------------------------------------

    def _begin_faults(self) -> None:
        self.network.faults = self.faults
        for every_s, inject in (
            (self.faults.partition_every_s, self._cut),
            (self.faults.agent_kill_every_s, self._kill_agent),
            (self.faults.agent_stall_every_s, self._stall_agent),
            (self.faults.host_loss_every_s, self._lose_hosts),
            (self.faults.rank_kill_every_s, self._kill_rank),
            (self.faults.rank_stall_every_s, self._stall_rank),
            (self.faults.rot_every_s, self._rot),
            (self.faults.full_every_s, self._fill),
        ):
            if every_s:
                self._again(every_s, inject)

    def _again(self, every_s: float, inject: Callable[[], None]) -> None:
        def happen() -> None:
            if not self._quiet:
                inject()
                self.injected += 1
                self._again(every_s, inject)

        self.world.after(self.world.rng.expovariate(1 / every_s), happen)

    def _end_faults(self) -> None:
        self._quiet = True
        self.network.faults = NONE
        self.network.mend()
        for host in self.hosts.values():
            host.memory.full = False

    def _host(self) -> Host:
        return self.hosts[self.world.rng.choice(list(self.hosts))]

    def _cut(self) -> None:
        rng = self.world.rng
        few = rng.sample(list(self.hosts), rng.choice([1, 1, 2, len(self.hosts) // 3 or 1]))
        nodes = frozenset(few)
        self.network.cut(nodes, one_way=self.world.chance(self.faults.one_way))
        self.world.after(self.faults.partition_s, self.network.heal, nodes)

    def _kill_agent(self) -> None:
        host = self._host()
        host.kill_agent()
        self.world.after(self.world.rng.uniform(0.0, 3.0), host.start)

    def _stall_agent(self) -> None:
        host = self._host()
        if host.agent is not None:
            host.agent.stall(self.world.rng.uniform(0.0, self.faults.stall_s))

    def _lose_hosts(self) -> None:
        hosts = [self._host()]
        if self.world.chance(self.faults.burst):  # several of one group at once
            others = [self.hosts[node] for node in self._holders(hosts[0].node)]
            hosts += self.world.rng.sample(others, min(len(others), self.code.m))
        for host in hosts:
            self._lose(host)

    def _holders(self, node: str) -> tuple[str, ...]:
        return self.session.placement.holders.get(node, ()) if self.session else ()

    def _lose(self, host: Host) -> None:
        if not host.on:
            return
        host.lose()
        if self.session is not None:
            for member in self.session.members:
                if member.host is host:
                    member.kill()

        def back() -> None:
            host.on = True
            host.start()

        self.world.after(self.world.rng.uniform(0.0, self.faults.away_s), back)

    def _kill_rank(self) -> None:
        if self.session is not None:
            self.world.rng.choice(self.session.members).kill()

    def _stall_rank(self) -> None:
        if self.session is not None:
            member = self.world.rng.choice(self.session.members)
            member.stall(self.world.rng.uniform(0.0, self.faults.stall_s))

    def _rot(self) -> None:
        self.truth.rot(self.world.rng, self.hosts)

    def _fill(self) -> None:
        host = self._host()
        host.memory.full = True

        def drain() -> None:
            host.memory.full = False

        self.world.after(self.world.rng.uniform(1.0, 20.0), drain)


def simulate(seed: int, nodes: int, faults: Faults | None = None) -> Outcome:
    """Run one seed on so many nodes; the faults are drawn from it unless they are given."""
    return Simulation(seed, nodes, faults).run()
