"""How one rank sees a staged save through: protected, counted, committed or given up, and left.

Committing needs no collective. Each rank adds one to the generation's counter ``count`` when its
shard is protected. The rank that completes the count wakes those that wait for it, and each rank
tells its own agent and its share of the nodes without ranks. A rank that gives up subtracts
``POISON`` from the same counter unless the count is complete, in one atomic step: so a generation
is either committed or given up, never both.

If the store does not answer, a rank that has counted does not know which. It keeps its shard and
begins no save until the counter tells: other ranks may have committed the generation and dropped
the one before.

After commit or abort each rank adds one to ``left``; no rank begins its next save before ``left``
equals the number of ranks. So ranks begin a save together or not at all, and a node that is asked
to hold a fragment of it has been told that the save before is committed.

    staged --> protecting --> counted --> committed --> told --+
                   |          |     |        ^                 |
                   |          |     +--> in doubt              +--> left
                   |          |              v                 |
                   +----------+---------> given up ------------+
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from ecckpt.client import deadlines
from ecckpt.client.cluster.members import Cluster
from ecckpt.client.effects import (
    CallAgent,
    FinishHandle,
    Report,
    Routine,
    StoreAdd,
    StoreDrop,
    StoreGet,
    StorePut,
    StoreSubtract,
    StoreWait,
    call_own,
    perform,
    sleep,
    until,
)
from ecckpt.client.events import Message, SaveCommitted, SaveFailure
from ecckpt.client.save.staging import Deadline, await_protected
from ecckpt.errors import EcckptError, Fenced, SaveFailed, SaveTimedOut
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.save import Commit
from ecckpt.protocol.verbs import COMMIT

if TYPE_CHECKING:
    from ecckpt.client.handles import SaveHandle
    from ecckpt.client.save.replica_check import ReplicaCheck

POISON = 1 << 40


class Giving(StrEnum):
    """What came of giving a generation up."""

    DONE = "given up"
    LATE = "committed before"
    UNKNOWN = "the store did not answer"


CounterName = Literal["count", "left"]  # of shards that are protected; of ranks that are through


def key_of(counter: CounterName, generation: Generation) -> str:
    """The name of a generation's counter in the store."""
    return f"{counter}/{generation}"


def wake_key_of(counter: CounterName, generation: Generation) -> str:
    """The name of the key that wakes those who wait for that counter."""
    return f"{counter}/{generation}/wake"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSave:
    """What it takes to see one save through.

    Attributes:
        begin: has the shard staged and protected; its claim is compared before.
        check: compares what ``replicated`` tensors this rank says that all ranks have.
        ended: hears how it went before the rank leaves the save: no rank has begun its next one.
            After an error the shard is given up.
        counted: False for a shard that only has to be protected again, after a restore.
    """

    handle: SaveHandle
    deadline: Deadline
    begin: Callable[[], Routine[None]]
    check: ReplicaCheck | None
    ended: Callable[[EcckptError | None], Routine[None]]
    counted: bool = True

    @property
    def shard(self) -> ShardId:
        """Which shard."""
        return self.deadline.shard


class CommitProtocol:
    """The commits of one rank, one save after another, in ``Lane.FOLLOW``.

    ``closing``: set once the program is about to end; then waits for other ranks end early.
    ``timeline``: of the saves that still matter; a doubt about older ones ends.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.closing = False
        self.timeline = 0
        self._cluster = cluster
        self._deaf: set[str] = set()  # nodes of this rank's share that did not take the last commit
        self._past: Generation | None = None  # whose keys go once all ranks have left the next

    def see_through(self, save: StagedSave) -> Routine[None]:
        """Follow a staged save to its end; its handle tells how it ended."""
        yield from self._surely(save.handle, save.shard, self._see_through(save))

    def abandon(self, handle: SaveHandle, deadline: Deadline) -> Routine[None]:
        """Keep other ranks from waiting for a shard that will not come; the handle has failed."""

        def give_up() -> Routine[None]:
            # This rank has not counted: the generation is never committed, whatever the store says.
            yield from self._give_up(deadline.shard)
            yield from self._leave(deadline)

        yield from self._surely(handle, deadline.shard, give_up())

    @staticmethod
    def _surely(handle: SaveHandle, shard: ShardId, routine: Routine[None]) -> Routine[None]:
        """Leave the save whatever the routine raises, or no later save would ever begin."""
        try:
            yield from routine
        except Exception as unexpected:
            text = f"following {shard}: {unexpected!r}"
            yield from perform(Report(Message(logging.ERROR, text)))
        handle.mark_left()

    def _see_through(self, save: StagedSave) -> Routine[None]:
        told, error, has_counted = True, None, False
        try:
            yield from self._protect(save)
            if save.counted:
                has_counted = True
                told = yield from self._commit(save)
        except Exception as failed:
            error = _known(save.shard, failed)
            if save.counted:
                giving = yield from self._give_up(save.shard)
                if giving is Giving.UNKNOWN and has_counted:
                    giving = yield from self._doubt(save, error)
                    if giving is Giving.UNKNOWN:
                        return
                # A complete count stays: other ranks may yet read it. The save is committed then,
                # unless the run was taken over, which leaves this rank nothing to say about it.
                if giving is Giving.LATE and not isinstance(failed, Fenced):
                    told, error = False, None
        error = yield from self._end(save, error)
        if save.counted:
            if error is None:
                yield from self._tell_late(save, told=told)
                yield from self._tell_share(save.shard)
            yield from self._leave(save.deadline)

    # -- protect and commit -----------------------------------------------------------------------

    def _protect(self, save: StagedSave) -> Routine[None]:
        # The claim comes first: a generation that lacks a shard is never restored, whatever
        # becomes of this rank afterwards.
        if save.check is not None:
            yield from save.check.compare()
        yield from save.begin()

        def check() -> Routine[None]:
            if save.counted:
                yield from self._check_count(save.shard)

        progress = yield from await_protected(save.deadline, check)
        save.handle.mark_protected(progress)

    def _commit(self, save: StagedSave) -> Routine[bool]:
        """Count until all ranks have; whether this node's agent has been told of it."""
        key = key_of("count", save.shard.generation)
        wake = wake_key_of("count", save.shard.generation)
        count = yield from perform(StoreAdd(key, 1))
        if count == self._cluster.ranks:
            yield from self._wake("count", save.shard)
        while 0 <= count < self._cluster.ranks:
            left_s = yield from save.deadline.left_s("protected")
            yield from perform(StoreWait(wake, min(deadlines.STORE_WAIT_S, left_s)))
            # The counter decides: the rank that completed it may have died before it woke others.
            count = yield from perform(StoreAdd(key, 0))
        _require_counting(save.shard, count)
        return (yield from self._told(save.shard))

    def _check_count(self, shard: ShardId) -> Routine[None]:
        key = key_of("count", shard.generation)
        _require_counting(shard, (yield from perform(StoreAdd(key, 0))))

    def _give_up(self, shard: ShardId) -> Routine[Giving]:
        """Keep the generation from being committed, unless it is."""
        key, ranks = key_of("count", shard.generation), self._cluster.ranks
        try:
            given_up = yield from perform(StoreSubtract(key, POISON, ranks))
        except EcckptError as error:
            # None is woken: one that found the count neither complete nor given up would look again
            # and again, without a pause.
            yield from _note(shard, error)
            return Giving.UNKNOWN
        if given_up:
            yield from self._wake("count", shard)
        return Giving.DONE if given_up else Giving.LATE

    def _doubt(self, save: StagedSave, error: EcckptError) -> Routine[Giving]:
        """Ask the store again until it tells whether the generation is committed.

        The handle ends at once. ``UNKNOWN`` if the program ends or restores first: the shard stays
        with the agent, and the next restart finds out from what all agents have.
        """
        shard = save.shard
        unknown = SaveFailed(
            f"{shard}: the ranks' store does not tell whether it is committed: {error}",
            hint="the shard is kept; saves go on when the store answers",
        )
        save.handle.in_doubt = True
        yield from perform(Report(SaveFailure(shard, unknown)))
        yield from perform(FinishHandle(save.handle, unknown))
        giving = Giving.UNKNOWN
        while giving is Giving.UNKNOWN:
            if (yield from until(lambda: self._is_moot(shard), deadlines.ASK_STORE_AGAIN_S)):
                return Giving.UNKNOWN
            giving = yield from self._give_up(shard)
        return giving

    def _is_moot(self, shard: ShardId) -> bool:
        return self.closing or shard.generation.timeline < self.timeline

    def _end(self, save: StagedSave, error: EcckptError | None) -> Routine[EcckptError | None]:
        shard = save.shard
        if save.check is not None:
            error = yield from save.check.explain(error)
        if error is None and save.counted:
            yield from perform(Report(SaveCommitted(shard)))
        elif error is not None and not save.handle.done:
            yield from perform(Report(SaveFailure(shard, error)))
        try:
            yield from save.ended(error)
        except Exception as unexpected:
            yield from perform(Report(Message(logging.ERROR, f"after {shard}: {unexpected!r}")))
        if not save.handle.done:
            yield from perform(FinishHandle(save.handle, error))
        return error

    # -- telling agents ---------------------------------------------------------------------------

    def _told(self, shard: ShardId) -> Routine[bool]:
        """Tell this node's agent of the commit; False if it is away. Raises ``Fenced``."""
        message = Commit(shard.run, shard.generation)
        try:
            yield from call_own(COMMIT, message, deadlines.CALL_S)
        except Fenced:
            raise
        except (EcckptError, OSError):
            return False
        return True

    def _tell_late(self, save: StagedSave, *, told: bool) -> Routine[None]:
        """Tell an agent that was away before it is asked for the next save's slot."""
        try:
            while not (told or (yield from self._told(save.shard))):
                left_s = yield from save.deadline.left_s("committed")
                if (yield from until(self._is_closing, min(deadlines.TELL_AGAIN_S, left_s))):
                    return
        except EcckptError:
            return  # the agent learns it from the next commit

    def _tell_share(self, shard: ShardId) -> Routine[None]:
        message = Commit(shard.run, shard.generation)
        for node in self._cluster.share:
            patience_s = deadlines.COMMIT_GLANCE_S if node in self._deaf else deadlines.COMMIT_S
            try:
                yield from perform(CallAgent(COMMIT, message, node, patience_s))
            except (EcckptError, OSError) as error:
                self._deaf.add(node)
                text = f"could not tell {node} that {shard} is committed: {error}"
                yield from perform(Report(Message(logging.WARNING, text)))
            else:
                self._deaf.discard(node)

    # -- leaving ----------------------------------------------------------------------------------

    def _leave(self, deadline: Deadline) -> Routine[None]:
        """Count this rank as through, and wait until all ranks are."""
        key = key_of("left", deadline.shard.generation)
        try:
            count = yield from perform(StoreAdd(key, 1))
            if count == self._cluster.ranks:
                yield from self._wake("left", deadline.shard)
            while 0 <= count < self._cluster.ranks:
                yield from self._await_left(deadline)
                count = yield from perform(StoreAdd(key, 0))
        except EcckptError:
            pass  # a rank has died, or the store: the next save finds that out
        self._past = deadline.shard.generation

    def _await_left(self, deadline: Deadline) -> Routine[None]:
        """Look again and again rather than wait: it mostly takes a moment, and may be given up."""
        key = wake_key_of("left", deadline.shard.generation)
        last_s = max(deadlines.LAST_LOOK_S, self._cluster.ranks / deadlines.LOOKS_PER_S)
        look_s, closing_s = deadlines.FIRST_LOOK_S, 0.0
        while (yield from perform(StoreGet(key))) is None:
            if closing_s > deadlines.LEAVE_S:
                raise SaveTimedOut(f"{deadline.shard}: this rank has ended")
            wait_s = min(look_s, (yield from deadline.left_s("with other ranks")))
            if (yield from until(self._is_closing, wait_s)):
                closing_s += wait_s
                yield from sleep(wait_s)
            look_s = min(2 * look_s, last_s)

    def _wake(self, counter: CounterName, shard: ShardId) -> Routine[None]:
        try:
            yield from perform(StorePut(wake_key_of(counter, shard.generation), b""))
            if counter == "left" and self._past is not None:
                # All ranks are through with this one: none looks at the one before it any more.
                for each in ("count", "left"):
                    yield from perform(StoreDrop(key_of(each, self._past)))
                    yield from perform(StoreDrop(wake_key_of(each, self._past)))
        except EcckptError as error:
            yield from _note(shard, error)

    def _is_closing(self) -> bool:
        return self.closing


def _require_counting(shard: ShardId, count: int) -> None:
    if count < 0:
        raise SaveFailed(f"{shard}: another rank could not protect its shard")


def _known(shard: ShardId, error: Exception) -> EcckptError:
    return error if isinstance(error, EcckptError) else SaveFailed(f"{shard}: {error!r}")


def _note(shard: ShardId, error: EcckptError) -> Routine[None]:
    yield from perform(Report(Message(logging.INFO, f"{shard}: {error}")))
