"""How a trainer saves: the order of requests of ``saver.py``, with the rule of counting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ecckpt.client.save.commit_protocol import (
    POISON,
    Await,
    Count,
    Ended,
    GiveUp,
    Look,
    Pause,
    Protected,
    Share,
    Start,
    Step,
    Tell,
    Wake,
    give_up,
    key_of,
    see_through,
    wake_key_of,
)
from ecckpt.client.save.commit_protocol import Steps as Rule
from ecckpt.errors import EcckptError, SaveFailed, SaveSkipped, SaveTimedOut
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.save import Commit, Protect, Reserve, Stage, Target, Watch
from ecckpt.sim.world import Steps, Wait, sleep

if TYPE_CHECKING:
    from ecckpt.sim.trainer import Rank

_WATCH_S = 1.0
_SLICE_S = 10.0
_PAUSE_S = 0.25
_PATIENCE_S = 0.05
_COMMIT_TIMEOUT_S = 2.0
_COPY_S = 0.5

LOCAL_TIMEOUT_S = 10.0


@dataclass(eq=False, slots=True)
class Saving:
    """A save on its way. ``left``: the next may begin."""

    shard: ShardId
    deadline_s: float
    message: Protect | None = None
    counted: bool = True
    left: bool = False
    error: EcckptError | None = None


class SimulatedSaver:
    """The saves of one rank, one after another."""

    def __init__(self, rank: Rank) -> None:
        self.latest: Saving | None = None
        self._rank, self._host = rank, rank.host
        self._session, self._world = rank.session, rank.world
        self._given_up: list[Generation] = []

    @property
    def error(self) -> EcckptError | None:
        """Why the latest save failed, if it has."""
        return self.latest.error if self.latest else None

    def save(self, step: int) -> Steps:
        """Stage a step unless the one before is under way; the rest goes on by itself."""
        session = self._session
        generation = Generation(self._rank.timeline, step, session.name)
        shard = ShardId(session.run, generation, self._rank.rank)
        previous = self.latest
        self.latest = saving = Saving(shard, self._world.now_s + session.rules.save_timeout_s)
        try:
            if previous is not None and not previous.left:
                yield sleep(_PATIENCE_S)
                if not previous.left:
                    raise SaveSkipped(step, "", unfinished=previous.shard.generation.step, age_s=0)
            yield from self._stage(shard)
        except EcckptError as error:
            session.truth.failed(shard, error)
            saving.error = error
            if not isinstance(error, SaveSkipped):
                self._given_up.append(generation)
            self._rank.spawn(self._abandon(saving, previous))
            return
        saving.deadline_s = self._world.now_s + session.rules.save_timeout_s
        self.follow(saving, session.targets(self._host.node), counted=True)

    def _abandon(self, saving: Saving, previous: Saving | None) -> Steps:
        """Behind the save before, as the one thread of ``saving.Watcher`` does it."""
        while previous is not None and not previous.left:
            yield sleep(_PATIENCE_S)
        yield from self._go_through(saving, give_up(self._session.ranks))

    def _stage(self, shard: ShardId) -> Steps:
        session = self._session
        header = session.header(shard, self._host.node, self._rank.parent)
        slot = yield self._rank.own(
            Reserve(
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
        yield self._rank.own(Stage(header, slot.region))

    def follow(self, saving: Saving, targets: tuple[Target, ...], *, counted: bool) -> None:
        """See a staged shard through; without ``counted`` it only has to be protected."""
        rules = self._session.rules
        saving.counted = counted
        saving.message = Protect(
            saving.shard,
            self._rank.timeline,
            targets,
            rules.least if counted else 0,
            rules.budget_bytes,
            0.5 * rules.save_timeout_s,
            tuple(self._given_up),
        )
        rule = see_through(saving.shard, self._session.ranks, counted=counted)
        self._rank.spawn(self._go_through(saving, rule))

    def _go_through(self, saving: Saving, rule: Rule) -> Steps:
        try:
            step = next(rule)
            while True:
                try:
                    result = yield from self._do(step, saving)
                except EcckptError as error:
                    step = rule.throw(error)
                else:
                    step = rule.send(result)
        except StopIteration:
            saving.left = True

    def _do(self, step: Step, saving: Saving) -> Steps:
        shard, session = saving.shard, self._session
        match step:
            case Start():
                yield self._rank.own(saving.message)
            case Look(state):
                wait_s = min(_WATCH_S, self._left_s(saving, state))
                return (yield self._watch(Watch(shard, state, wait_s)))
            case Tell():
                yield self._rank.own(Commit(session.run, shard.generation))
            case Share():
                yield from self._tell_share(Commit(session.run, shard.generation))
            case Pause():
                yield sleep(min(_PAUSE_S, self._left_s(saving, "committed")))
            case Ended(error):
                self._ended(saving, error)
            case Count() | Wake() | Await() | GiveUp():
                return (yield from self._meet(step, saving))
            case Protected():
                pass
        return None

    def _meet(self, step: Count | Wake | Await | GiveUp, saving: Saving) -> Steps:
        session, generation = self._session, saving.shard.generation
        match step:
            case Count(counter, amount):
                key = key_of(counter, generation)
                return (yield from session.store(self._rank, lambda: session.add(key, amount)))
            case Await(counter):
                wait_s = min(_SLICE_S, self._left_s(saving, "protected"))
                yield session.wait_for(wake_key_of(counter, generation), wait_s)
            case Wake(counter):
                word = wake_key_of(counter, generation)
                try:
                    yield from session.store(self._rank, lambda: session.leave(word))
                except EcckptError:
                    return None
            case GiveUp():
                return (yield from self._give_up(key_of("count", generation)))
        return None

    def _give_up(self, counter: str) -> Steps:
        session = self._session

        def subtract() -> bool:
            if session.add(counter, 0) == session.ranks:
                return False
            session.add(counter, -POISON)
            return True

        try:
            return (yield from session.store(self._rank, subtract))
        except EcckptError:
            return True

    def _ended(self, saving: Saving, error: EcckptError | None) -> None:
        saving.error = error
        if not saving.counted:
            return
        if error is not None:
            self._given_up.append(saving.shard.generation)
            self._session.truth.failed(saving.shard, error)
            return
        self._given_up.clear()
        self._rank.archiver.committed(saving.shard.generation)
        self._rank.spawn(self._rank.guard())  # again: the agent may have been replaced
        self._session.truth.committed(self._host, saving.shard.generation)

    def _left_s(self, saving: Saving, state: str) -> float:
        left_s = saving.deadline_s - self._world.now_s
        if left_s <= 0:
            raise SaveTimedOut(f"{saving.shard}: still {state} at its deadline")
        return left_s

    def _tell_share(self, message: Commit) -> Steps:
        session = self._session
        idle = [node for node in session.hosts if not session.local_ranks(node)]
        for node in idle[self._rank.rank :: session.ranks]:
            try:
                yield session.hosts[node].ask(self._host.node, message, _COMMIT_TIMEOUT_S)
            except EcckptError:
                continue

    def _watch(self, message: Watch) -> Wait:
        def handle(agent: Any, answer: Callable[[Any], None]) -> None:
            agent.watch(message, answer)

        return self._host.call(self._host.node, handle, LOCAL_TIMEOUT_S + message.wait_s)
