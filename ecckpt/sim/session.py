"""One session of a simulated run: its ranks, their placement, and the store they meet over.

``Launcher`` makes a session, ``Trainer`` takes part in it, and ``SimulatedPerformer`` performs the
effects on the ranks' store with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from ecckpt.client.cluster.members import Cluster
from ecckpt.client.cluster.requests import Requests
from ecckpt.client.config import ClusterConfig
from ecckpt.client.restore.protocol import Wanted
from ecckpt.errors import EcckptError, RankTimeout, SaveFailed
from ecckpt.format.ids import ShardId
from ecckpt.policy.placement import Placement
from ecckpt.sim.hosts.host import SimulatedHost
from ecckpt.sim.hosts.network import SimulatedNetwork
from ecckpt.sim.run_config import BLOCK_BYTES, Rules, content_of
from ecckpt.sim.truth.ledger import Truth
from ecckpt.sim.truth.starts import TruthStarts
from ecckpt.sim.world import Process, Steps, Wait, World, sleep

_STORE_PATIENCE_S = 30.0  # a call to an unreachable store fails after this
_STORE_S = 0.001  # the mean time of a call to the store


class Session:
    """What the ranks of one session share.

    The store is on the host of rank 0, and is gone with it. ``wanted`` is what the ranks restore;
    with ``required`` they may not begin from scratch.
    """

    def __init__(
        self,
        number: int,
        *,
        seed: int,
        run: str,
        rules: Rules,
        world: World,
        network: SimulatedNetwork,
        truth: Truth,
        starts: TruthStarts,
        hosts: dict[str, SimulatedHost],
        homes: list[str],
        placement: Placement,
        wanted: Wanted,
        required: bool,
    ) -> None:
        self.name = f"{number:016x}"
        self.run, self.rules, self.seed = run, rules, seed
        self.world, self.network, self.truth = world, network, truth
        self.starts = starts
        self.hosts, self.homes, self.placement = hosts, homes, placement
        self.ranks = len(homes)
        self.wanted = wanted
        self.required = required
        self.nothing_left = False  # becomes True when a restore of the newest finds nothing
        self.started_s = world.now_s
        self.timeline = 0  # set when rank 0 has planned a restore
        self.values: dict[str, bytes] = {}  # of the store
        # By host: until when its connection to the store is broken.
        self.broken_until_s: defaultdict[str, float] = defaultdict(float)
        self._counters: Counter[str] = Counter()
        self._payloads: dict[str, dict[int, Any]] = defaultdict(dict)  # of exchanges, by rank
        self._answers: dict[str, list[Any] | EcckptError] = {}
        self._waiting: dict[str, list[Process]] = defaultdict(list)
        self._at_step_end: list[Process] = []
        self._ranks_at = Counter(homes)
        self._store_host = hosts[homes[0]]

    # -- what ranks know and do together ----------------------------------------------------------

    def requests(self, rank: int) -> Requests:
        """The requests of a rank, made from the run's configuration and the cluster."""
        rules, homes = self.rules, self.homes
        config = ClusterConfig(
            run=self.run,
            code=(rules.k, rules.m),
            min_margin=rules.min_margin,
            every_steps=1,
            save_timeout_s=rules.save_timeout_s,
            restore_timeout_s=rules.restore_timeout_s,
            disk_every=rules.disk_every,
            keep=rules.keep,
        )
        idle = [node for node in self.hosts if not self._ranks_at[node]]
        cluster = Cluster(
            run=self.run,
            session=self.name,
            rank=rank,
            ranks=self.ranks,
            home=homes[rank],
            local_ranks=self._ranks_at[homes[rank]],
            homes=tuple(homes) if rank == 0 else (),
            share=tuple(idle[rank :: self.ranks]),
            address={node: node for node in self.hosts},
            placement=self.placement,
            memory_bytes=rules.budget_bytes,
            started_s=self.started_s,
        )
        return Requests(config, cluster, block_bytes=lambda _: BLOCK_BYTES)

    def content(self, shard: ShardId) -> bytes:
        """The bytes that a rank saves as its shard."""
        return content_of(self.seed, shard, self.rules.shard_bytes)

    def next_step(self) -> Wait:
        """Wait until all ranks have come here, then for the length of a training step.

        As the collectives of a training step do.
        """

        def begin(process: Process) -> None:
            self._at_step_end.append(process)
            if len(self._at_step_end) == self.ranks:
                ready, self._at_step_end = self._at_step_end, []
                delay_s = self.world.rng.uniform(0.5, 1.5) * self.rules.step_s
                for waiting in ready:
                    jitter_s = self.world.rng.random() * 0.01
                    self.world.after(delay_s + jitter_s, waiting.resume, None)

        return begin

    # -- the store --------------------------------------------------------------------------------

    def add(self, key: str, amount: int) -> int:
        """Add to an atomic counter of the store; return its new value."""
        self._counters[key] += amount
        return self._counters[key]

    def subtract(self, key: str, amount: int, unless: int) -> bool:
        """Subtract from a counter unless it is at ``unless``; return whether it was done."""
        if self._counters[key] == unless:
            return False
        self._counters[key] -= amount
        return True

    def agree(self, key: str, text: str) -> str:
        """Set a text unless the key has one; return the text that the first caller set."""
        return self.values.setdefault(key, text.encode()).decode()

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key and wake the processes that wait for it."""
        self.values[key] = value
        self._wake(key)

    def drop(self, key: str) -> None:
        """Remove a value or a counter."""
        self.values.pop(key, None)
        self._counters.pop(key, None)

    def wait_for(self, key: str, wait_s: float) -> Wait:
        """Wait until a key has a value, at most ``wait_s``."""

        def begin(process: Process) -> None:
            if key in self.values:
                self.world.after(self.world.rng.expovariate(1 / _STORE_S), process.resume, None)
                return
            self._waiting[key].append(process)
            self.world.after(wait_s, self._time_out, key, process, None)

        return begin

    def store(self, host: SimulatedHost, act: Callable[[], Any]) -> Steps:
        """Perform ``act`` on the store atomically, from a host.

        Raises ``SaveFailed`` if the store cannot be reached.
        """
        yield from self._reach_store(host)
        result = act()
        # The answer may be lost too: then the caller does not know that the store has changed.
        yield from self._reach_store(host)
        return result

    def _reach_store(self, host: SimulatedHost) -> Steps:
        waited_s = 0.0
        store_host = self._store_host
        faults = self.network.faults
        if faults.store_break and self.world.chance(faults.store_break):
            self.broken_until_s[host.node] = self.world.now_s + self.world.rng.uniform(
                0.0, faults.store_break_s
            )
        if self.world.now_s < self.broken_until_s[host.node]:
            raise SaveFailed("the connection to the store is broken")
        while not (store_host.on and self.network.passes(host.node, store_host.node)):
            if waited_s >= _STORE_PATIENCE_S or not store_host.on:
                raise SaveFailed("the store cannot be reached")
            yield sleep(1.0)
            waited_s += 1.0
        yield sleep(self.world.rng.expovariate(1 / _STORE_S))

    def exchange(
        self,
        host: SimulatedHost,
        rank: int,
        tag: str,
        payload: Any,
        decide: Callable[[list[Any]], Steps],
        *,
        timeout_s: float,
    ) -> Steps:
        """Give rank 0 the payloads of all ranks; ``decide`` makes one answer per rank of them.

        All ranks call this with the same tag. An ``EcckptError`` of ``decide`` is raised on all
        ranks. Raises ``RankTimeout`` if a rank does not come in time.
        """
        yield from self._reach_store(host)
        self._payloads[tag][rank] = payload
        self._wake(f"{tag}/all")
        if rank == 0:
            while len(self._payloads[tag]) < self.ranks:
                yield self._wait(f"{tag}/all", timeout_s)
            payloads = [self._payloads[tag][member] for member in range(self.ranks)]
            try:
                self._answers[tag] = yield from decide(payloads)
            except EcckptError as error:
                self._answers[tag] = error
            self._wake(tag)
        elif tag not in self._answers:
            # Twice as long, since rank 0 may take the whole timeout before it decides.
            yield self._wait(tag, 2 * timeout_s)
        answers = self._answers[tag]
        if isinstance(answers, EcckptError):
            raise answers
        return answers[rank]

    def _wait(self, key: str, timeout_s: float) -> Wait:
        error = RankTimeout(key, [], timeout_s=timeout_s)

        def begin(process: Process) -> None:
            self._waiting[key].append(process)
            self.world.after(timeout_s, self._time_out, key, process, error)

        return begin

    def _wake(self, key: str) -> None:
        """Wake the processes that wait for a key, each after the time of a store call."""
        for process in self._waiting.pop(key, ()):
            delay_s = self.world.rng.expovariate(1 / _STORE_S)
            self.world.after(delay_s, process.resume, None)

    def _time_out(self, key: str, process: Process, value: RankTimeout | None) -> None:
        """Resume a process with ``value`` if it still waits for the key."""
        if process in self._waiting.get(key, ()):
            self._waiting[key].remove(process)
            process.resume(value)
