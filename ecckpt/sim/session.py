"""One start of a run: who takes part, the store they meet over, and the launcher that watches."""

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
from ecckpt.sim.world import Process, Steps, Wait, World, sleep

_STORE_PATIENCE_S = 30.0
_STORE_S = 0.001


class Session:
    """What its ranks share: their store on the first rank's host, and their pace.

    ``wanted`` is what they restore.

    ``required``: they may not begin from scratch.
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
        hosts: dict[str, SimulatedHost],
        homes: list[str],
        placement: Placement,
        wanted: Wanted,
        required: bool,
    ) -> None:
        self.name = f"{number:016x}"
        self.run, self.rules, self.seed = run, rules, seed
        self.world, self.network, self.truth = world, network, truth
        self.hosts, self.homes, self.placement = hosts, homes, placement
        self.ranks = len(homes)
        self.wanted = wanted
        self.required = required
        self.nothing_left = False
        self.timeline = 0  # as rank 0 begins it
        self.values: dict[str, bytes] = {}  # of the store
        self._counters: Counter[str] = Counter()
        self._board: dict[str, dict[int, Any]] = defaultdict(dict)
        self._answers: dict[str, list[Any] | EcckptError] = {}
        self._waiting: dict[str, list[Process]] = defaultdict(list)
        self._paced: list[Process] = []
        self._local = Counter(homes)
        self._store_host = hosts[homes[0]]

    # -- what ranks know --------------------------------------------------------------------------

    def requests(self, rank: int) -> Requests:
        """The messages of a rank, made of the run's configuration and the cluster as it sees it."""
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
        idle = [node for node in self.hosts if not self._local[node]]
        cluster = Cluster(
            run=self.run,
            session=self.name,
            rank=rank,
            ranks=self.ranks,
            home=homes[rank],
            local_ranks=self._local[homes[rank]],
            homes=tuple(homes) if rank == 0 else (),
            share=tuple(idle[rank :: self.ranks]),
            address={node: node for node in self.hosts},
            placement=self.placement,
            memory_bytes=rules.budget_bytes,
        )
        return Requests(config, cluster, block_bytes=lambda _: BLOCK_BYTES)

    def content(self, shard: ShardId) -> bytes:
        """The state of a rank at that step."""
        return content_of(self.seed, shard, self.rules.shard_bytes)

    def pace(self) -> Wait:
        """Wait for the others, as training does, and for the length of a step."""

        def begin(process: Process) -> None:
            self._paced.append(process)
            if len(self._paced) == self.ranks:
                ready, self._paced = self._paced, []
                delay_s = self.world.rng.uniform(0.5, 1.5) * self.rules.step_s
                for each in ready:
                    jitter_s = self.world.rng.random() * 0.01
                    self.world.after(delay_s + jitter_s, each.resume, None)

        return begin

    # -- the store --------------------------------------------------------------------------------

    def add(self, key: str, amount: int) -> int:
        """The store's atomic counter."""
        self._counters[key] += amount
        return self._counters[key]

    def subtract(self, key: str, amount: int, unless: int) -> bool:
        """Subtract from a counter unless it is at a value."""
        if self._counters[key] == unless:
            return False
        self._counters[key] -= amount
        return True

    def agree(self, key: str, text: str) -> str:
        """The text that the first caller set."""
        return self.values.setdefault(key, text.encode()).decode()

    def put(self, key: str, value: bytes) -> None:
        """Set a value, and wake those who wait for it."""
        self.values[key] = value
        self._wake(key)

    def drop(self, key: str) -> None:
        """Remove a value or a counter."""
        self.values.pop(key, None)
        self._counters.pop(key, None)

    def wait_for(self, key: str, wait_s: float) -> Wait:
        """Wait until a key is set, at most so long."""

        def begin(process: Process) -> None:
            if key in self.values:
                self.world.after(self.world.rng.expovariate(1 / _STORE_S), process.resume, None)
                return
            self._waiting[key].append(process)
            self.world.after(wait_s, self._late, key, process, None)

        return begin

    def store(self, host: SimulatedHost, act: Callable[[], Any]) -> Steps:
        """Do something in the store, in one step. ``SaveFailed`` if it cannot be reached."""
        yield from self._reach(host)
        result = act()
        yield from self._reach(host)
        return result

    def _reach(self, host: SimulatedHost) -> Steps:
        waited_s = 0.0
        home = self._store_host
        while not (home.on and self.network.passes(host.node, home.node)):
            if waited_s >= _STORE_PATIENCE_S or not home.on:
                raise SaveFailed("the store cannot be reached")
            yield sleep(1.0)
            waited_s += 1.0
        yield sleep(self.world.rng.expovariate(1 / _STORE_S))

    def decide(
        self,
        host: SimulatedHost,
        rank: int,
        tag: str,
        payload: Any,
        lead: Callable[[list[Any]], Steps],
        *,
        timeout_s: float,
    ) -> Steps:
        """All ranks bring something, the first decides, each gets its part of it, or its error."""
        yield from self._reach(host)
        self._board[tag][rank] = payload
        self._wake(f"{tag}/all")
        if rank == 0:
            while len(self._board[tag]) < self.ranks:
                yield self._wait(f"{tag}/all", timeout_s)
            payloads = [self._board[tag][each] for each in range(self.ranks)]
            try:
                self._answers[tag] = yield from lead(payloads)
            except EcckptError as error:
                self._answers[tag] = error
            self._wake(tag)
        elif tag not in self._answers:
            yield self._wait(tag, 2 * timeout_s)
        answers = self._answers[tag]
        if isinstance(answers, EcckptError):
            raise answers
        return answers[rank]

    def _wait(self, key: str, timeout_s: float) -> Wait:
        late = RankTimeout(key, [], timeout_s=timeout_s)

        def begin(process: Process) -> None:
            self._waiting[key].append(process)
            self.world.after(timeout_s, self._late, key, process, late)

        return begin

    def _wake(self, key: str) -> None:
        for process in self._waiting.pop(key, ()):
            delay_s = self.world.rng.expovariate(1 / _STORE_S)
            self.world.after(delay_s, process.resume, None)

    def _late(self, key: str, process: Process, value: RankTimeout | None) -> None:
        if process in self._waiting.get(key, ()):
            self._waiting[key].remove(process)
            process.resume(value)
