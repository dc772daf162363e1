"""Injects the faults of a simulated cluster, at random times and places."""

from __future__ import annotations

from collections.abc import Callable

from ecckpt.sim.faults import NONE, Faults
from ecckpt.sim.hosts.host import SimulatedCluster, SimulatedHost
from ecckpt.sim.hosts.platter import Platter
from ecckpt.sim.launcher import Launcher


class Injector:
    """Injects faults from ``begin`` to ``end``; ``injected`` counts them."""

    def __init__(self, cluster: SimulatedCluster, launcher: Launcher, faults: Faults) -> None:
        self.injected = 0
        self._cluster, self._launcher, self._faults = cluster, launcher, faults
        self._world, self._rng = cluster.world, cluster.world.rng
        self._ended = False

    def begin(self) -> None:
        """Begin to inject."""
        faults = self._faults
        self._cluster.network.faults = faults
        for every_s, inject in (
            (faults.partition_every_s, self._partition),
            (faults.agent_kill_every_s, self._kill_agent),
            (faults.agent_stall_every_s, self._stall_agent),
            (faults.host_loss_every_s, self._lose_hosts),
            (faults.rank_kill_every_s, self._kill_rank),
            (faults.rank_stall_every_s, self._stall_rank),
            (faults.rot_every_s, self._rot),
            (faults.full_every_s, self._fill),
            *(self._disk_faults() if self._cluster.disks else ()),
        ):
            if every_s:
                self._repeat(every_s, inject)

    def end(self) -> None:
        """Inject nothing more, and end all faults that last.

        Hosts that are down come back by themselves; agents that could not read their disk are
        restarted.
        """
        self._ended = True
        self._cluster.network.faults = NONE
        self._cluster.network.heal_all()
        self._cluster.network.block_bulk("", 0.0)
        for host in self._cluster.hosts.values():
            host.memory.full = False
            if host.platter is not None:
                host.platter.mend()
            host.restart_for_disk()

    def _disk_faults(self) -> list[tuple[float, Callable[[], None]]]:
        faults = self._faults
        return [
            (faults.power_every_s, self._cut_power),
            (faults.disk_rot_every_s, self._rot_disk),
            (faults.disk_full_every_s, self._fill_disk),
            (faults.disk_sick_every_s, self._sicken_disk),
            (faults.disk_slow_every_s, self._slow_disk),
        ]

    def _repeat(self, every_s: float, inject: Callable[[], None]) -> None:
        """Inject after a random time, again and again."""

        def happen() -> None:
            if not self._ended:
                inject()
                self.injected += 1
                self._repeat(every_s, inject)

        self._world.after(self._rng.expovariate(1 / every_s), happen)

    def _random_host(self) -> SimulatedHost:
        return self._cluster.hosts[self._rng.choice(list(self._cluster.hosts))]

    def _partition(self) -> None:
        hosts, network = list(self._cluster.hosts), self._cluster.network
        count = self._rng.choice([1, 1, 2, len(hosts) // 3 or 1])
        nodes = frozenset(self._rng.sample(hosts, count))
        network.cut(nodes, one_way=self._world.chance(self._faults.one_way))
        self._world.after(self._faults.partition_s, network.heal, nodes)

    def _kill_agent(self) -> None:
        host = self._random_host()
        host.kill_agent()
        self._world.after(self._rng.uniform(0.0, 3.0), host.start)

    def _stall_agent(self) -> None:
        host = self._random_host()
        if host.agent is not None:
            host.agent.stall(self._rng.uniform(0.0, self._faults.stall_s))

    def _lose_hosts(self) -> None:
        hosts = [self._random_host()]
        if self._world.chance(self._faults.burst):  # also some hosts that hold fragments for it
            holders = self._launcher.holders(hosts[0].node)
            hosts += [
                self._cluster.hosts[node]
                for node in self._rng.sample(holders, min(len(holders), self._launcher.rules.m))
            ]
        for host in hosts:
            self._fail(host, disk=not self._world.chance(self._faults.reboot))

    def _cut_power(self) -> None:
        for host in self._cluster.hosts.values():
            self._fail(host, disk=False)

    def _fail(self, host: SimulatedHost, *, disk: bool) -> None:
        """Fail a host and kill its ranks; it comes back after a while."""
        if not host.on:
            return
        host.fail(disk=disk)
        self._launcher.kill_ranks(lambda member: member.host is host)

        def come_back() -> None:
            host.on = True
            host.start()
            if self._faults.bulk and self._world.chance(self._faults.bulk):
                self._block_bulk(host)

        self._world.after(self._rng.uniform(0.0, self._faults.away_s), come_back)

    def _kill_rank(self) -> None:
        if self._launcher.session is not None:
            self._rng.choice(self._launcher.members).kill()

    def _stall_rank(self) -> None:
        if self._launcher.session is not None:
            member = self._rng.choice(self._launcher.members)
            member.stall(self._rng.uniform(0.0, self._faults.stall_s))

    def _rot(self) -> None:
        self._launcher.truth.rot(self._rng, self._cluster.hosts)

    def _fill(self) -> None:
        memory = self._random_host().memory
        memory.full = True

        def drain() -> None:
            memory.full = False

        self._world.after(self._rng.uniform(1.0, 20.0), drain)

    def _block_bulk(self, host: SimulatedHost) -> None:
        """Block fragments from and to a host, unless another host is blocked."""
        network = self._cluster.network
        if not network.bulk_blocked() and not self._ended:
            blocked_s = self._rng.uniform(0.0, self._faults.bulk_s)
            network.block_bulk(host.node, self._world.now_s + blocked_s)

    # -- faults of disks --------------------------------------------------------------------------

    def _random_platter(self) -> Platter:
        platter = self._random_host().platter
        assert platter is not None
        return platter

    def _rot_disk(self) -> None:
        self._launcher.truth.rot_disk(self._rng, self._cluster.hosts)

    def _fill_disk(self) -> None:
        platter = self._random_platter()
        platter.full = True
        self._mend_later(platter)

    def _sicken_disk(self) -> None:
        platter = self._random_platter()
        platter.sick = True
        self._mend_later(platter)

    def _slow_disk(self) -> None:
        platter = self._random_platter()
        platter.slow_s = self._faults.disk_slow_s
        self._mend_later(platter)

    def _mend_later(self, platter: Platter) -> None:
        """End the faults of a disk after a while."""
        self._world.after(self._rng.uniform(1.0, 20.0), platter.mend)
