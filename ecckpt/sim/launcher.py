"""The launcher of a simulated run, and the operator who starts it.

It starts sessions on the hosts it can reach, restarts all ranks when one ends, and now and then
restores an older generation or changes the number of ranks.
"""

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
from ecckpt.sim.truth.starts import TruthStarts
from ecckpt.sim.world import Actor, Steps, sleep


class Launcher(Actor):
    """Starts all ranks of a session, and a new session when a rank has ended.

    A run that cannot be restored any more begins from scratch under a new name. ``lost`` counts
    these, and ``truth`` is that of the current name. ``sizes`` are the numbers of ranks that a
    session may have. With ``strict`` a failed save is a violation.
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
        self.lost = -1  # the first run adds 1
        self.rules = rules
        self._earlier_counts = Counts()  # of lost runs
        self._strict = strict
        self._cluster, self._seed = cluster, seed
        self._code = Code(rules.k, rules.m, rules.k + rules.m)
        self._ranks, self._sizes = ranks, sizes
        self._sessions = 0
        self._homes: list[str] = []
        self.members: list[Trainer] = []  # of the current session
        self._ended: set[int] = set()  # ranks of the current session
        # Also trainers of earlier sessions that the launcher could not reach and that still run.
        self._started: list[Trainer] = []
        self._starts = TruthStarts()
        self.truth = self._new_run()

    @property
    def counts(self) -> Counts:
        """The counts of all runs so far."""
        counts = Counts()
        counts.add(self._earlier_counts)
        counts.add(self.truth.counts)
        return counts

    def kill_ranks(self, chosen: Callable[[Trainer], bool]) -> None:
        """Kill the chosen ranks, of any session."""
        for member in self._started:
            if chosen(member):
                member.kill()
        self._started = [member for member in self._started if member.alive]

    def holders(self, node: str) -> tuple[str, ...]:
        """The nodes that hold fragments for a node in the current session."""
        return self.session.placement.holders.get(node, ()) if self.session else ()

    def main(self) -> Steps:
        """The launcher's program: one session after another."""
        while True:
            all_hosts = self._cluster.hosts
            hosts = {node: host for node, host in all_hosts.items() if self._sees(host)}
            # A placement needs one more node than holders; budgets are for two ranks on a node.
            if len(hosts) <= self._code.holders or 2 * len(hosts) < self._ranks_now():
                yield sleep(2.0)
                continue
            if self.world.chance(self._cluster.network.faults.late_start):
                self._start_late(self._new_session(hosts))
            self.session = session = self._new_session(hosts)
            self._start_ranks(session)
            while not (self._ended or any(not member.alive for member in self.members)):
                yield sleep(1.0)
            self._kill_reachable()
            yield sleep(self.world.rng.uniform(0.5, 3.0))
            if session.nothing_left:
                self._help_restore(hosts)

    def _kill_reachable(self) -> None:
        """Kill the session's ranks. Some survive, and must be fenced off by the next session."""
        for member in self.members:
            frozen = member.stalled and self.world.chance(0.5)
            if not frozen and self._cluster.network.passes("launcher", member.host.node):
                member.kill()

    def _help_restore(self, hosts: Mapping[str, SimulatedHost]) -> None:
        """Nothing could be restored: make disks readable, or give up a run that is truly lost."""
        for host in hosts.values():
            host.restart_for_disk()
        if self.truth.safe is None or self.truth.is_lost():
            self._earlier_counts.add(self.truth.counts)
            self.kill_ranks(lambda _: True)
            for host in self._cluster.hosts.values():
                # A file that no agent can read may be of any run, so it would keep the new one from
                # beginning from scratch (docs/decisions/0013).
                host.remove_rejected_files()
            self.truth = self._new_run()

    def _start_ranks(self, session: Session) -> None:
        hosts, ended = session.hosts, self._ended = session.hosts, set()
        self.members = [
            Trainer(session, rank, hosts[home]) for rank, home in enumerate(session.homes)
        ]
        self._started += self.members
        for member in self.members:
            member.spawn(member.main(), ended=lambda _, rank=member.rank: ended.add(rank))  # type: ignore[misc]

    def _start_late(self, session: Session) -> None:
        """Start the ranks of a session that is replaced before it restores; they go on later."""
        late_s = self.world.rng.uniform(0.0, self._cluster.network.faults.late_start_s)
        for rank, home in enumerate(session.homes):
            trainer = Trainer(session, rank, session.hosts[home])
            self._started.append(trainer)
            trainer.spawn(trainer.main(after_s=late_s))

    def _new_run(self) -> Truth:
        """Give the run another name, as an operator does when nothing can be restored."""
        self.lost += 1
        return Truth(f"sim{self.lost + 1}", self.rules, strict=self._strict)

    def _sees(self, host: SimulatedHost) -> bool:
        """Whether the launcher can use a host: it reaches it, and the agent runs."""
        agent = host.agent
        passes = self._cluster.network.passes("launcher", host.node)
        return agent is not None and not agent.stalled and passes

    def _new_session(self, hosts: dict[str, SimulatedHost]) -> Session:
        self._sessions += 1
        nodes = [Node(host.node, host.domain) for host in hosts.values()]
        ranks = self._ranks_now()
        if self._homes and self.world.chance(self.rules.reshape):
            sizes = [size for size in self._sizes if size <= 2 * len(hosts)]
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
            starts=self._starts,
            hosts=hosts,
            homes=homes,
            placement=plan_placement(nodes, self._code),
            wanted=self._wanted(hosts),
            # Agents that answer know nothing of the disks of nodes that do not, so a restore that
            # finds nothing does not prove that there is nothing.
            required=self._cluster.disks and self.truth.counts.commits > 0,
        )

    def _ranks_now(self) -> int:
        """The number of ranks that a session has unless it is reshaped."""
        return len(self._homes) or self._ranks

    def _wanted(self, hosts: Mapping[str, SimulatedHost]) -> Wanted:
        """What the operator asks to restore: the newest, or now and then another generation.

        Also one that an earlier roll-back has abandoned.
        """
        if not self.world.chance(self.rules.roll_back):
            return Wanted()
        run = self.truth.run
        inventories = [
            host.records.get(run).inventory(node)
            for node, host in hosts.items()
            if host.records is not None
        ]
        plan = plan_recovery(run, inventories)
        restorable = [report.generation for report in plan.generations if report.state != "lost"]
        if not restorable:
            return Wanted()
        generation = self.world.rng.choice(restorable)
        if self.world.chance(0.5):
            return Wanted(step=generation.step)
        return Wanted(generation=generation)

    def _place(self, nodes: list[str], ranks: int) -> list[str]:
        """A home for each rank: the one it had if no other rank has it, else spread evenly."""
        homes: list[str] = []
        for home in [*self._homes, *[""] * ranks][:ranks]:
            homes.append(home if home in nodes and home not in homes else "")
        free = [node for node in nodes if node not in homes]
        self.world.rng.shuffle(free)
        free += nodes * ranks
        return [home or free.pop(0) for home in homes]
