"""A trainer: restores with the others, then saves, step after step, until it dies.

Its decisions are the real ones: ``counting.py`` for a save, ``recovery.py`` and ``ordering.py`` for
a restore. What is written down again here is the order of requests of ``restoring.Restorer`` and
of ``checkpointer.Checkpointer``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import shake_128
from typing import TYPE_CHECKING, Any

from ecckpt import wire
from ecckpt.agent.coding import bad_blocks, data_views
from ecckpt.counting import (
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
from ecckpt.counting import Steps as Rule
from ecckpt.errors import (
    CorruptFragment,
    EcckptError,
    Fenced,
    MemoryBudgetTooSmall,
    NoRoomToRestore,
    SaveFailed,
    SaveSkipped,
    SaveTimedOut,
    TmpfsFull,
)
from ecckpt.fragment import HOME, SUPERBLOCK_BYTES, Header, fragment_bytes_for
from ecckpt.generation import Generation, ShardId
from ecckpt.ordering import Outcome, Way, guard_of, judge, next_timeline, passes_over, way_home
from ecckpt.recovery import Inventory, plan_recovery
from ecckpt.sim.host import Host, answering
from ecckpt.sim.world import Actor, Failure, Steps, Wait, sleep, together

if TYPE_CHECKING:
    from ecckpt.sim.session import Session

_WATCH_S = 1.0
_SLICE_S = 10.0
_PAUSE_S = 0.25
_PATIENCE_S = 0.05
_COMMIT_TIMEOUT_S = 2.0
_COPY_S = 0.5
_LOCAL_TIMEOUT_S = 10.0


@dataclass(eq=False, slots=True)
class Saving:
    """A save on its way. ``left``: the next may begin."""

    shard: ShardId
    deadline_s: float
    message: wire.Protect | None = None
    counted: bool = True
    done: bool = False
    left: bool = False
    error: EcckptError | None = None


class Rank(Actor):
    """One process of a session, at home on a host."""

    def __init__(self, session: Session, rank: int, host: Host) -> None:
        super().__init__(session.world)
        self.session, self.rank, self.host = session, rank, host
        self.latest: Saving | None = None
        self._given_up: list[Generation] = []
        self._timeline = 0
        self._parent: Generation | None = None
        self._mapped: memoryview | None = None

    def main(self) -> Steps:
        """The program."""
        step = yield from self._restore()
        self.spawn(self._guard())
        while True:
            yield self.session.pace(self)
            yield from self._save(step)
            step += 1

    def _guard(self) -> Steps:
        """Have this node's agent watch over its home copies."""
        session = self.session
        if not session.rules.guarded:
            return
        guard = guard_of(
            session.run,
            self.host.node,
            session.placement,
            {node: node for node in session.hosts},
            writer=self._timeline,
            local_ranks=session.local_ranks(self.host.node),
            memory_bytes=session.rules.budget_bytes,
            timeout_s=0.5 * session.rules.save_timeout_s,
        )
        try:
            yield self._own(guard)
        except EcckptError:
            return

    # -- save -------------------------------------------------------------------------------------

    def _save(self, step: int) -> Steps:
        session = self.session
        generation = Generation(self._timeline, step, session.name)
        shard = ShardId(session.run, generation, self.rank)
        previous = self.latest
        self.latest = saving = Saving(shard, self.world.now_s + session.rules.save_timeout_s)
        try:
            if previous is not None and not previous.left:
                yield sleep(_PATIENCE_S)
                if not previous.left:
                    raise SaveSkipped(step, "", unfinished=previous.shard.generation.step, age_s=0)
            yield from self._stage(shard)
        except EcckptError as error:
            saving.error, saving.done = error, True
            if not isinstance(error, SaveSkipped):
                self._given_up.append(generation)
            self.spawn(self._abandon(saving, previous))
            return
        saving.deadline_s = self.world.now_s + session.rules.save_timeout_s
        self._follow(saving, session.targets(self.host.node), counted=True)

    def _abandon(self, saving: Saving, previous: Saving | None) -> Steps:
        """Behind the save before, as the one thread of ``saving.Watcher`` does it."""
        while previous is not None and not previous.left:
            yield sleep(_PATIENCE_S)
        yield from self._go_through(saving, give_up(self.session.ranks))

    def _stage(self, shard: ShardId) -> Steps:
        session = self.session
        header = session.header(shard, self.host.node, self._parent)
        slot = yield self._own(
            wire.Reserve(
                header,
                session.rules.budget_bytes,
                session.local_ranks(self.host.node),
                session.placement.code.holders,
                tuple(self._given_up),
            )
        )
        region = self.host.memory.files.get(slot.path)
        if region is None:
            raise SaveFailed(f"{shard}: the slot is gone")
        view = region.view  # mapped: it stays writable, whatever becomes of the file
        yield sleep(_COPY_S * self.world.rng.random())
        data = session.content(shard)
        session.truth.writes(self.host, region)
        session.truth.saved(shard, data)
        payload = view[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + header.payload_bytes]
        payload[: len(data)] = data
        payload[len(data) :] = bytes(len(payload) - len(data))
        yield self._own(wire.Stage(header, slot.region))

    def _follow(self, saving: Saving, targets: tuple[wire.Target, ...], *, counted: bool) -> None:
        code, rules = self.session.placement.code, self.session.rules
        saving.counted = counted
        saving.message = wire.Protect(
            saving.shard,
            self._timeline,
            targets,
            min(code.k + rules.min_margin, code.holders) if counted else 0,
            rules.budget_bytes,
            0.5 * rules.save_timeout_s,
            tuple(self._given_up),
        )
        rule = see_through(saving.shard, self.session.ranks, counted=counted)
        self.spawn(self._go_through(saving, rule))

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
        shard, session = saving.shard, self.session
        match step:
            case Start():
                yield self._own(saving.message)
            case Look(state):
                wait_s = min(_WATCH_S, self._left_s(saving, state))
                return (yield self._watch(wire.Watch(shard, state, False, wait_s)))
            case Tell():
                yield self._own(wire.Commit(session.run, shard.generation))
            case Share():
                yield from self._tell_share(wire.Commit(session.run, shard.generation))
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
        session, generation = self.session, saving.shard.generation
        match step:
            case Count(counter, amount):
                key = key_of(counter, generation)
                return (yield from session.store(self, lambda: session.add(key, amount)))
            case Await(counter):
                wait_s = min(_SLICE_S, self._left_s(saving, "protected"))
                yield session.wait_for(wake_key_of(counter, generation), wait_s)
            case Wake(counter):
                wake_key = wake_key_of(counter, generation)
                try:
                    yield from session.store(self, lambda: session.leave(wake_key))
                except EcckptError:
                    return None
            case GiveUp():
                return (yield from self._give_up(key_of("count", generation)))
        return None

    def _give_up(self, counter: str) -> Steps:
        session = self.session

        def subtract() -> bool:
            if session.add(counter, 0) == session.ranks:
                return False
            session.add(counter, -POISON)
            return True

        try:
            return (yield from session.store(self, subtract))
        except EcckptError:
            return True

    def _ended(self, saving: Saving, error: EcckptError | None) -> None:
        saving.error, saving.done = error, True
        if not saving.counted:
            return
        if error is not None:
            self._given_up.append(saving.shard.generation)
        else:
            self._given_up.clear()
            self.spawn(self._guard())  # again: the agent may have been replaced
            self.session.truth.committed(self.host, saving.shard.generation)

    def _left_s(self, saving: Saving, state: str) -> float:
        left_s = saving.deadline_s - self.world.now_s
        if left_s <= 0:
            raise SaveTimedOut(f"{saving.shard}: still {state} at its deadline")
        return left_s

    def _tell_share(self, message: wire.Commit) -> Steps:
        session = self.session
        idle = [node for node in session.hosts if not session.local_ranks(node)]
        for node in idle[self.rank :: session.ranks]:
            try:
                yield session.hosts[node].ask(self.host.node, message, _COMMIT_TIMEOUT_S)
            except EcckptError:
                continue

    def _own(self, request: Any) -> Wait:
        return self.host.ask(self.host.node, request, _LOCAL_TIMEOUT_S)

    def _watch(self, message: wire.Watch) -> Wait:
        def handle(agent: Any, answer: Callable[[Any], None]) -> None:
            agent.watch(message, answer)

        return self.host.call(self.host.node, handle, _LOCAL_TIMEOUT_S + message.wait_s)

    # -- restore ----------------------------------------------------------------------------------

    def _restore(self) -> Steps:
        session = self.session
        for attempt in range(20):
            way, timeline = yield from session.decide(
                self, f"{attempt}/order", None, lambda _: self._lead_order()
            )
            self._timeline = timeline
            if way is None:
                return 0
            data, outcome = None, Outcome("ok", "")
            try:
                data = yield from self._bring(way, timeline)
            except (MemoryBudgetTooSmall, TmpfsFull) as error:
                outcome = Outcome("room", str(error))
            except EcckptError as error:
                outcome = Outcome("bad", f"rank {self.rank}: {error}")
                yield from self._await_agent()
            generation = way.header.shard.generation
            lead = self._lead_verdict(generation)
            if (yield from session.decide(self, f"{attempt}/verdict", outcome, lead)):
                assert data is not None
                start = f"{timeline}.{session.name}"
                session.truth.loaded(start, self.rank, generation, data)
                self._parent = generation
                if way.repair:
                    timeout_s = session.rules.save_timeout_s
                    saving = Saving(way.header.shard, self.world.now_s + timeout_s)
                    self._follow(saving, way.repair, counted=False)
                return generation.step + 1
        raise Failure("20 generations were refused")

    def _lead_order(self) -> Steps:
        session = self.session
        if not session.timeline:
            found = plan_recovery(session.run, (yield from self._inventories()))
            session.timeline = next_timeline(found, 0)
            yield from self._each_peer(
                wire.Fence(session.run, session.timeline, None, found.roll_backs)
            )
        plan = yield from self._plan()
        if session.silent and not session.asked_again and passes_over(plan):
            session.asked_again = True
            session.silent.clear()
            yield from self._each_peer(wire.Fence(session.run, session.timeline, None, ()))
            plan = yield from self._plan()
        if not session.refusals.refused:
            chosen = plan.chosen.generation if plan.chosen else None
            session.truth.chosen(chosen, session.answering)
        if plan.chosen is None:
            if plan.generations or plan.ruins or session.silent:
                session.nothing_left = True
                raise Failure("nothing to restore")
            session.truth.begins(session.timeline, None)
            return [(None, session.timeline)] * session.ranks
        address = {node: node for node in session.hosts}
        return [
            (
                way_home(shard, session.homes[shard.rank], session.placement, address),
                session.timeline,
            )
            for shard in plan.chosen.shards
        ]

    def _plan(self) -> Steps:
        session = self.session
        inventories = yield from self._inventories()
        session.answering = {inventory.node for inventory in inventories}
        return plan_recovery(session.run, inventories, refused=session.refusals.refused)

    def _lead_verdict(self, generation: Generation) -> Callable[[list[Outcome]], Steps]:
        def lead(outcomes: list[Outcome]) -> Steps:
            session = self.session
            try:
                verdict = judge(outcomes)
            except NoRoomToRestore as error:
                raise Failure(str(error)) from error
            if verdict.failed and session.refusals.fail(generation, verdict.failed):
                session.truth.refused(generation, session.answering, verdict.failed)
            if verdict.go:
                fence = wire.Fence(session.run, session.timeline, generation, ())
                yield from self._each_peer(fence)
                session.truth.begins(session.timeline, generation)
            return [verdict.go] * len(outcomes)

        return lead

    def _inventories(self) -> Steps:
        run = self.session.run

        def look(agent: Any) -> Inventory:
            return agent.core.ledgers.look(run).inventory(agent.node)  # type: ignore[no-any-return]

        return (
            yield from self._ask_each(
                lambda host: host.call(
                    self.host.node, answering(look), self.session.rules.patience_s
                )
            )
        )

    def _each_peer(self, message: wire.Fence) -> Steps:
        patience_s = self.session.rules.patience_s
        return (
            yield from self._ask_each(lambda host: host.ask(self.host.node, message, patience_s))
        )

    def _ask_each(self, ask: Callable[[Host], Wait]) -> Steps:
        """Answers of all agents; one that does not answer is not asked again in this restore."""
        session = self.session
        hosts = [host for node, host in session.hosts.items() if node not in session.silent]
        answers = yield together([ask(host) for host in hosts])
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, Fenced):
                raise Failure(str(answer))
            if isinstance(answer, Exception):
                session.silent.add(host.node)
        return [answer for answer in answers if not isinstance(answer, Exception)]

    def _bring(self, way: Way, timeline: int) -> Steps:
        if way.local:
            try:
                return (yield from self._proven(way.header))
            except EcckptError:
                pass  # peers will have it
        rules = self.session.rules
        yield self.host.ask(
            self.host.node,
            wire.Fetch(
                way.header, timeline, way.sources, rules.budget_bytes, 0.8 * rules.restore_timeout_s
            ),
            0.9 * rules.restore_timeout_s,
        )
        return (yield from self._proven(way.header))

    def _await_agent(self) -> Steps:
        patience_s = self.session.rules.patience_s
        deadline_s = self.world.now_s + patience_s
        here = answering(lambda agent: agent.node)
        while self.world.now_s < deadline_s:
            try:
                yield self.host.call(self.host.node, here, patience_s)
            except EcckptError:
                yield sleep(0.1)
            else:
                return

    def _proven(self, header: Header) -> Steps:
        """The shard's bytes at home, every block checked."""

        def look(agent: Any) -> bytes:
            home = agent.core.home(header.shard)
            for index, view in enumerate(data_views(home.header, home.region)):
                if bad_blocks(home.header, index, view, home.table):
                    raise CorruptFragment(f"home copy of {header.shard}: bad blocks")
            return bytes(home.region.view[SUPERBLOCK_BYTES:][: home.header.shard_bytes])

        return (yield self.host.call(self.host.node, answering(look), _LOCAL_TIMEOUT_S))


def content_of(seed: int, shard: ShardId, size_bytes: int) -> bytes:
    """The state that a rank saves: bytes that belong to nothing else."""
    return shake_128(f"{seed} {shard}".encode()).digest(size_bytes)


def header_for(
    shard: ShardId,
    *,
    ranks: int,
    k: int,
    m: int,
    shard_bytes: int,
    home: str,
    parent: Generation | None,
) -> Header:
    """As the Checkpointer makes it, with small blocks."""
    return Header(
        shard=shard,
        world_size=ranks,
        index=HOME,
        k=k,
        m=m,
        shard_bytes=shard_bytes,
        fragment_bytes=fragment_bytes_for(shard_bytes, k),
        block_bytes=4096,
        home=home,
        parent=parent,
        created_unix_s=0,
    )
