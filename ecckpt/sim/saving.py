"""How a trainer saves: the order of requests of ``checkpointer.py``, with the rule of counting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ecckpt import wire
from ecckpt.counting import (
    POISON,
    Count,
    GiveUp,
    Look,
    Protected,
    Start,
    Step,
    Tell,
    counter_of,
    see_through,
)
from ecckpt.errors import EcckptError, SaveFailed, SaveTimedOut
from ecckpt.fragment import SUPERBLOCK_BYTES
from ecckpt.generation import Generation, ShardId
from ecckpt.sim.world import Steps, Wait, sleep

if TYPE_CHECKING:
    from ecckpt.sim.rank import Rank

_WATCH_S = 1.0
_COMMIT_TIMEOUT_S = 2.0
_COPY_S = 0.5

LOCAL_TIMEOUT_S = 10.0


@dataclass(eq=False, slots=True)
class Saving:
    """A save on its way."""

    shard: ShardId
    deadline_s: float
    done: bool = False
    error: EcckptError | None = None


class Saver:
    """The saves of one rank, one after another."""

    def __init__(self, rank: Rank) -> None:
        self.latest: Saving | None = None
        self._rank, self._host = rank, rank.host
        self._session, self._world = rank.session, rank.world
        self._given_up: list[Generation] = []

    def save(self, step: int) -> Steps:
        """Stage a step, behind the one before; the rest goes on by itself."""
        session = self._session
        generation = Generation(self._rank.timeline, step, session.name)
        shard = ShardId(session.run, generation, self._rank.rank)
        previous, deadline_s = self.latest, self._world.now_s + session.rules.save_timeout_s
        try:
            while previous is not None and not previous.done:
                if self._world.now_s > deadline_s:
                    raise SaveTimedOut(f"the save before {shard} is still not finished")
                yield sleep(0.05)
            if previous is not None and previous.error is None:
                self._given_up.clear()
            elif previous is not None:
                self._given_up.append(previous.shard.generation)
            yield from self._stage(shard)
        except EcckptError as error:
            self.latest = Saving(shard, deadline_s, True, error)
            self._rank.spawn(self._give_up(shard))
            return
        saving = Saving(shard, self._world.now_s + session.rules.save_timeout_s)
        self.latest = saving
        self.follow(saving, session.targets(self._host.node), counted=True)

    def _stage(self, shard: ShardId) -> Steps:
        session = self._session
        header = session.header(shard, self._host.node, self._rank.parent)
        slot = yield self._rank.own(
            wire.Reserve(
                header,
                session.rules.budget_bytes,
                session.local_ranks(self._host.node),
                session.placement.code.holders,
                tuple(self._given_up),
            )
        )
        region = self._host.memory.files.get(slot.path)
        if region is None:
            raise SaveFailed(f"{shard}: the slot is gone")
        view = region.view  # mapped: it stays writable, whatever becomes of the file
        yield sleep(_COPY_S * self._world.rng.random())
        data = session.content(shard)
        session.truth.writes(self._host, region)
        session.truth.saved(shard, data, session.ranks)
        payload = view[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + header.payload_bytes]
        payload[: len(data)] = data
        payload[len(data) :] = bytes(len(payload) - len(data))
        yield self._rank.own(wire.Stage(header, slot.region))

    def follow(self, saving: Saving, targets: tuple[wire.Target, ...], *, counted: bool) -> None:
        """See a staged shard through; without ``counted`` it only has to be protected."""
        rules = self._session.rules
        message = wire.Protect(
            saving.shard,
            self._rank.timeline,
            targets,
            rules.least if counted else 0,
            rules.budget_bytes,
            0.5 * rules.save_timeout_s,
            tuple(self._given_up),
        )
        self._rank.spawn(self._see_through(saving, message, counted=counted))

    def _see_through(self, saving: Saving, message: wire.Protect, *, counted: bool) -> Steps:
        steps = see_through(saving.shard, self._session.ranks, counted=counted)
        try:
            step = next(steps)
            while True:
                try:
                    result = yield from self._do(step, saving, message)
                except EcckptError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            saving.error, saving.done = end.value, True
        if counted and saving.error is None:
            self._rank.spawn(self._rank.guard())  # again: the agent may have been replaced
            self._session.truth.committed(self._host, saving.shard.generation)

    def _do(self, step: Step, saving: Saving, message: wire.Protect) -> Steps:
        shard, session = saving.shard, self._session
        match step:
            case Start():
                yield self._rank.own(message)
            case Look(state):
                left_s = saving.deadline_s - self._world.now_s
                if left_s <= 0:
                    raise SaveTimedOut(f"{shard}: still {state} at its deadline")
                return (yield self._watch(wire.Watch(shard, state, False, min(_WATCH_S, left_s))))
            case Count(amount):
                counter = counter_of(shard.generation)
                return (yield from session.store(self._rank, lambda: session.add(counter, amount)))
            case Tell(everybody=True):
                yield from self._tell_all(wire.Commit(session.run, shard.generation))
            case Tell():
                yield self._rank.own(wire.Commit(session.run, shard.generation))
            case GiveUp():
                return (yield from self._give_up(shard))
            case Protected():
                pass
        return None

    def _give_up(self, shard: ShardId) -> Steps:
        session, counter = self._session, counter_of(shard.generation)

        def give_up() -> bool:
            if session.add(counter, 0) == session.ranks:
                return False
            session.add(counter, -POISON)
            return True

        try:
            return (yield from session.store(self._rank, give_up))
        except EcckptError:
            return True

    def _tell_all(self, message: wire.Commit) -> Steps:
        others = [host for host in self._session.hosts.values() if host is not self._host]
        for host in (self._host, *others):
            try:
                yield host.ask(self._host.node, message, _COMMIT_TIMEOUT_S)
            except EcckptError:
                continue

    def _watch(self, message: wire.Watch) -> Wait:
        def handle(agent: Any, answer: Callable[[Any], None]) -> None:
            agent.watch(message, answer)

        return self._host.call(self._host.node, handle, LOCAL_TIMEOUT_S + message.wait_s)
