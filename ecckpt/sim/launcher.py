"""What starts a run's sessions: the launcher that watches its ranks, and the people behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ecckpt.client.restore.protocol import Wanted
from ecckpt.policy.placement import Code, Node, plan_placement
from ecckpt.policy.survival import plan_recovery
from ecckpt.sim.hosts.host import SimulatedCluster, SimulatedHost
from ecckpt.sim.run_config import Rules
from ecckpt.sim.session import Session
from ecckpt.sim.trainer import Trainer
from ecckpt.sim.truth.counts import Counts
from ecckpt.sim.truth.ledger import Truth
from ecckpt.sim.world import Actor, Steps, sleep


class Launcher(Actor):
    """Starts the ranks, and all of them again when one has ended.

    ``sizes`` are the numbers of ranks that there may be. What can be restored no more is begun
    again under another name: ``lost`` counts that, and ``truth`` is of the run as it is called now.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        rules: Rules,
        *,
        seed: int,
        ranks: int,
        sizes: list[int],
        strict: bool,
    ) -> None:
        super().__init__(cluster.world)
        self.session: Session | None = None
        self.lost = -1
        self.rules = rules
        self._before = Counts()
        self._strict = strict
        self._cluster, self._seed = cluster, seed
        self._code = Code(rules.k, rules.m, rules.k + rules.m)
        self._ranks, self._sizes = ranks, sizes
        self._sessions = 0
        self._homes: list[str] = []
        self.members: list[Trainer] = []  # of the session
        self._failed: set[int] = set()
        self._started: list[Trainer] = []  # those of ended sessions that were out of reach, too
        self.truth = self._new_run()

    @property
    def counts(self) -> Counts:
        """Of all runs so far."""
        counts = Counts()
        counts.add(self._before)
        counts.add(self.truth.counts)
        return counts

    def end_ranks(self, chosen: Callable[[Trainer], bool]) -> None:
        """Kill those ranks, of whatever session."""
        for member in self._started:
            if chosen(member):
                member.kill()
        self._started = [member for member in self._started if member.alive]

    def holders(self, node: str) -> tuple[str, ...]:
        """Who holds for a node now."""
        return self.session.placement.holders.get(node, ()) if self.session else ()

    def main(self) -> Steps:
        """The program."""
        rng, network = self.world.rng, self._cluster.network
        while True:
            hosts = {node: each for node, each in self._cluster.hosts.items() if self._sees(each)}
            # There is memory for two ranks on each.
            if len(hosts) <= self._code.holders or 2 * len(hosts) < self._ranks_now():
                yield sleep(2.0)
                continue
            self.session = session = self._start(hosts)
            self._begin(session)
            while not (self._failed or any(not member.alive for member in self.members)):
                yield sleep(1.0)
            for member in self.members:
                frozen = member.stalled and self.world.chance(0.5)
                if not frozen and network.passes("launcher", member.host.node):
                    member.kill()
            yield sleep(rng.uniform(0.5, 3.0))
            for host in hosts.values():
                if session.nothing_left:
                    host.see_to_disk()
            if session.nothing_left and (self.truth.safe is None or self.truth.is_lost()):
                self._before.add(self.truth.counts)
                self.end_ranks(lambda _: True)
                for host in self._cluster.hosts.values():
                    host.tidy()  # or they would stop the new run (decision 13)
                self.truth = self._new_run()

    def _begin(self, session: Session) -> None:
        hosts, failed = session.hosts, self._failed = session.hosts, set()
        self.members = [
            Trainer(session, rank, hosts[home]) for rank, home in enumerate(session.homes)
        ]
        self._started += self.members
        for member in self.members:
            member.spawn(member.main(), ended=lambda _, rank=member.rank: failed.add(rank))  # type: ignore[misc]

    def _new_run(self) -> Truth:
        """What a person does when nothing is left: give the run another name."""
        self.lost += 1
        return Truth(f"sim{self.lost + 1}", self.rules, strict=self._strict)

    def _sees(self, host: SimulatedHost) -> bool:
        agent = host.agent
        passes = self._cluster.network.passes("launcher", host.node)
        return agent is not None and not agent.stalled and passes

    def _start(self, hosts: dict[str, SimulatedHost]) -> Session:
        self._sessions += 1
        nodes = [Node(host.node, host.domain) for host in hosts.values()]
        ranks = self._ranks_now()
        if self._homes and self.world.chance(self.rules.reshape):
            sizes = [each for each in self._sizes if each <= 2 * len(hosts)]
            ranks = self.world.rng.choice(sizes or [ranks])
        homes = self._homes = self._place(list(hosts), ranks)
        return Session(
            self._sessions,
            seed=self._seed,
            run=self.truth.run,
            rules=self.rules,
            world=self.world,
            network=self._cluster.network,
            truth=self.truth,
            hosts=hosts,
            homes=homes,
            placement=plan_placement(nodes, self._code),
            wanted=self._wanted(hosts),
            # Nodes may be away, and the others know nothing of what is on their disks.
            required=self._cluster.disks and self.truth.counts.commits > 0,
        )

    def _ranks_now(self) -> int:
        return len(self._homes) or self._ranks

    def _wanted(self, hosts: Mapping[str, SimulatedHost]) -> Wanted:
        """What a person asks for who looks at what is there: the newest, or now and then another.

        Also what was left before by such a choice.
        """
        if not self.world.chance(self.rules.roll_back):
            return Wanted()
        run = self.truth.run
        inventories = [
            host.agent.core.ledgers.look(run).inventory(node)
            for node, host in hosts.items()
            if host.agent is not None
        ]
        plan = plan_recovery(run, inventories)
        there = [each.generation for each in plan.generations if each.state != "lost"]
        if not there:
            return Wanted()
        generation = self.world.rng.choice(there)
        if self.world.chance(0.5):
            return Wanted(step=generation.step)
        return Wanted(generation=generation)

    def _place(self, nodes: list[str], ranks: int) -> list[str]:
        """A home for each rank: where it was, if it can be there alone; else evenly."""
        homes: list[str] = []
        for home in [*self._homes, *[""] * ranks][:ranks]:
            homes.append(home if home in nodes and home not in homes else "")
        free = [node for node in nodes if node not in homes]
        self.world.rng.shuffle(free)
        free += nodes * ranks
        return [home or free.pop(0) for home in homes]
