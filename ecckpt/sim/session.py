"""One start of a run: who takes part, the store they meet over, and the launcher that watches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from ecckpt.client.restore.protocol import Wanted
from ecckpt.errors import EcckptError, SaveFailed
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.placement import Placement
from ecckpt.protocol.messages.save import Target
from ecckpt.sim.hosts.host import SimulatedHost
from ecckpt.sim.hosts.network import SimulatedNetwork
from ecckpt.sim.run_config import Rules, content_of
from ecckpt.sim.trainer import Rank
from ecckpt.sim.truth.ledger import Truth
from ecckpt.sim.world import Actor, Failure, Process, Steps, Wait, World, sleep

_STORE_PATIENCE_S = 30.0
_STORE_S = 0.001


class Session:
    """Ranks and their store, which lives on the first rank's host; ``wanted`` is what it is for.

    ``required``: it may not begin from scratch.
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
        self.members = [Rank(self, rank, hosts[home]) for rank, home in enumerate(homes)]
        self._failed: set[int] = set()
        self._counters: Counter[str] = Counter()
        self._board: dict[str, dict[int, Any]] = defaultdict(dict)
        self._answers: dict[str, Any] = {}
        self._waiting: dict[str, list[Process]] = defaultdict(list)
        self._words: set[str] = set()
        self._paced: list[Process] = []
        self._local = Counter(homes)

    def begin(self) -> None:
        """Start the ranks."""
        for member in self.members:
            member.spawn(member.main(), ended=lambda _, rank=member.rank: self._failed.add(rank))  # type: ignore[misc]

    @property
    def failed(self) -> bool:
        """Whether a rank has ended or died."""
        return bool(self._failed) or any(not member.alive for member in self.members)

    # -- what ranks know --------------------------------------------------------------------------

    def local_ranks(self, node: str) -> int:
        """How many ranks have their home there."""
        return self._local[node]

    def targets(self, node: str) -> tuple[Target, ...]:
        """The holders of a home's fragments."""
        holders = self.placement.holders[node]
        return tuple(Target(index, each, each) for index, each in enumerate(holders))

    def header(self, shard: ShardId, home: str, parent: Generation | None) -> Header:
        """Of a shard that is about to be saved."""
        return self.rules.header(shard, ranks=self.ranks, home=home, parent=parent)

    def content(self, shard: ShardId) -> bytes:
        """The state of a rank at that step."""
        return content_of(self.seed, shard, self.rules.shard_bytes)

    def pace(self, member: Rank) -> Wait:
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

    def add(self, counter: str, amount: int) -> int:
        """The store's atomic counter."""
        self._counters[counter] += amount
        return self._counters[counter]

    def leave(self, word: str) -> None:
        """Leave a word, and wake those who wait for it."""
        self._words.add(word)
        self._wake(word)

    def wait_for(self, word: str, wait_s: float) -> Wait:
        """Wait until that word is left, at most so long."""

        def begin(process: Process) -> None:
            if word in self._words:
                self.world.after(self.world.rng.expovariate(1 / _STORE_S), process.resume, None)
                return
            self._waiting[word].append(process)
            self.world.after(wait_s, self._stop_waiting, word, process)

        return begin

    def _stop_waiting(self, word: str, process: Process) -> None:
        if process in self._waiting.get(word, ()):
            self._waiting[word].remove(process)
            process.resume(None)

    def store(self, member: Rank, act: Callable[[], Any]) -> Steps:
        """Do something in the store, in one step. ``SaveFailed`` if it cannot be reached."""
        yield from self._reach(member)
        result = act()
        yield from self._reach(member)
        return result

    def _reach(self, member: Actor) -> Steps:
        home = self.members[0].host
        waited_s = 0.0
        while not (home.on and self.network.passes(member.host.node, home.node)):  # type: ignore[attr-defined]
            if waited_s >= _STORE_PATIENCE_S or not home.on:
                raise SaveFailed("the store cannot be reached")
            yield sleep(1.0)
            waited_s += 1.0
        yield sleep(self.world.rng.expovariate(1 / _STORE_S))

    def decide(
        self, member: Rank, tag: str, payload: Any, lead: Callable[[list[Any]], Steps]
    ) -> Steps:
        """All ranks bring something, the first decides, each gets its part of it."""
        timeout_s = self.rules.restore_timeout_s
        try:
            yield from self._reach(member)
        except EcckptError as error:
            raise Failure(str(error)) from error
        self._board[tag][member.rank] = payload
        self._wake(f"{tag}/all")
        if member.rank == 0:
            if len(self._board[tag]) < self.ranks:
                yield self._wait(f"{tag}/all", timeout_s)
                while len(self._board[tag]) < self.ranks:
                    yield self._wait(f"{tag}/all", timeout_s)
            payloads = [self._board[tag][rank] for rank in range(self.ranks)]
            self._answers[tag] = yield from lead(payloads)
            self._wake(tag)
        elif tag not in self._answers:
            yield self._wait(tag, 2 * timeout_s)
        return self._answers[tag][member.rank]

    def _wait(self, key: str, timeout_s: float) -> Wait:
        def begin(process: Process) -> None:
            self._waiting[key].append(process)
            self.world.after(timeout_s, self._late, key, process)

        return begin

    def _wake(self, key: str) -> None:
        for process in self._waiting.pop(key, ()):
            delay_s = self.world.rng.expovariate(1 / _STORE_S)
            self.world.after(delay_s, process.resume, None)

    def _late(self, key: str, process: Process) -> None:
        if process in self._waiting.get(key, ()):
            self._waiting[key].remove(process)
            process.resume(Failure(f"nobody answered {key} in time"))
