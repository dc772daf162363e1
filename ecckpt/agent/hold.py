"""Holding fragments of other nodes' shards: queue, pull, prove every block, seal, answer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ecckpt import wire
from ecckpt.agent.actions import Action, Allocate, Post, Pull, Recycle, Reply, Seal, Taking
from ecckpt.agent.ledger import Entry
from ecckpt.agent.ledgers import Ledgers
from ecckpt.errors import Fenced, InvalidMessage, RequestRefused
from ecckpt.fragment import HOME, parse_table
from ecckpt.generation import ShardId

if TYPE_CHECKING:
    from ecckpt.tiers.memory import Region

PULLS = 4
_QUEUE_LIMIT = 4096
_TRIES = 2  # a flipped bit on the way deserves a second try, not a third


class Holder:
    """What this node was asked to hold: so many fragments at a time, the others wait."""

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._waiting: deque[Taking] = deque()
        self._pulling: list[Taking] = []

    def coming(self, shard: ShardId) -> list[int]:
        """Fragments of a shard that are not here yet, but on their way."""
        takings = [taking.message.header for taking in (*self._waiting, *self._pulling)]
        return sorted({header.index for header in takings if header.shard == shard})

    def start(self, message: wire.Hold) -> list[Action]:
        """Queue the work; ``Held`` goes to the source when it is done."""
        header = message.header
        if header.index == HOME:
            raise InvalidMessage("a home copy is fetched, not held")
        self._ledgers.look(header.shard.run).check(message.writer)
        table = parse_table(message.table, header, f"table of {header.shard}")
        queued = len(self._waiting) + len(self._pulling)
        if queued >= _QUEUE_LIMIT:
            raise RequestRefused(self._ledgers.node, 503, f"{queued} fragments are queued")
        admitted = self._ledgers.admit(header.shard.run, message.writer, header)
        self._waiting.append(Taking(message, table))
        return [*admitted, Reply(wire.Done()), *self._next()]

    def allocated(self, taking: Taking, region: Region) -> list[Action]:
        """There is room for the fragment."""
        taking.region = region
        return [Pull(taking)]

    def pulled(self, taking: Taking, bad_blocks: int) -> list[Action]:
        """Its bytes are here."""
        header, region = taking.message.header, taking.region
        assert region is not None
        taking.tries += 1
        if bad_blocks and taking.tries < _TRIES:
            return [Pull(taking)]
        if bad_blocks:
            return self._end(
                taking,
                f"fragment {header.index} of {header.shard} from {taking.message.source}: "
                f"{bad_blocks} of {header.rows} blocks fail their CRC32C",
            )
        try:
            admitted = self._ledgers.admit(header.shard.run, taking.message.writer)
        except Fenced as error:
            return self._end(taking, str(error))
        entry = Entry(header, region, taking.table)
        taking.region = None
        return [*admitted, Seal(entry), *self._ledgers.enter(entry), *self._end(taking, "")]

    def failed(self, taking: Taking, error: Exception) -> list[Action]:
        """There is no room, or the bytes cannot be had."""
        return self._end(taking, str(error))

    def _next(self) -> list[Action]:
        """Begin what is queued, as far as places are free."""
        actions: list[Action] = []
        while self._waiting and len(self._pulling) < PULLS:
            self._pulling.append(self._waiting.popleft())
            actions += self._begin(self._pulling[-1])
        return actions

    def _begin(self, taking: Taking) -> list[Action]:
        message, header = taking.message, taking.message.header
        run = header.shard.run
        actions = self._ledgers.discard(run, header.shard.rank, message.discard)
        present = self._ledgers.look(run).find(header.shard, header.index)
        if present is not None and present.header.same_shard(header):
            return actions + self._end(taking, "")
        ledger = self._ledgers.look(run)
        if message.repair and ledger.is_outdated(header.shard.generation, ledger.committed):
            return actions + self._end(taking, f"{ledger.committed} is committed")
        what = f"fragment {header.index} of {header.shard}"
        size_bytes, budget_bytes = header.file_bytes, message.memory_bytes
        allocate = Allocate(run, size_bytes, budget_bytes, what, taking, again=message.repair)
        return [*actions, allocate]

    def _end(self, taking: Taking, problem: str) -> list[Action]:
        shard, index = taking.message.header.shard, taking.message.header.index
        actions: list[Action] = []
        if taking.region is not None:
            actions.append(Recycle(shard.run, taking.region))
            taking.region = None
        self._pulling.remove(taking)
        answer = wire.Held(shard, index, self._ledgers.node, problem)
        return [*actions, Post(taking.message.source, answer), *self._next()]
