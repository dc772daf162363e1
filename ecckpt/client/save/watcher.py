"""The thread that sees saves through: it waits for the agent and counts in the store.

What is to be done, in which order and when, ``counting.py`` says; here it is done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ecckpt.client.cluster.rendezvous import Meeting
from ecckpt.client.handles import SaveHandle
from ecckpt.client.save.commit_notice import Teller
from ecckpt.client.save.commit_protocol import (
    POISON,
    Await,
    Count,
    Counter,
    Ended,
    GiveUp,
    Look,
    Pause,
    Protected,
    Share,
    Start,
    Step,
    Steps,
    Tell,
    Wake,
    give_up,
    key_of,
    see_through,
    wake_key_of,
)
from ecckpt.client.save.replica_check import Claims
from ecckpt.errors import EcckptError, SaveFailed, SaveTimedOut
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.save import Commit, Watch
from ecckpt.protocol.verbs import COMMIT, WATCH
from ecckpt.state.snapshot.replicas import Claim

_log = logging.getLogger(__name__)

_WATCH_S = 1.0
_SLICE_S = 10.0  # torch prints a warning whenever it waits in vain
_PAUSE_S = 0.25
_GRACE_S = 1.0
_FIRST_POLL_S = 1e-3
_LAST_POLL_S = 0.05
_POLLS_PER_S = 20_000  # of all ranks together: what their store takes easily


@dataclass(frozen=True, slots=True)
class Following:
    """What the watcher needs to see one save through.

    ``claim`` is what the other ranks must have as well. ``ended`` hears how it went just before the
    handle tells: the next save cannot have begun.
    """

    handle: SaveHandle
    shard: ShardId
    deadline_s: float
    start: Callable[[], None]
    counted: bool
    claim: Claim | None = None
    ended: Callable[[EcckptError | None], None] = lambda _: None


class Watcher:
    """One thread that follows saves, one after another, for as long as the Checkpointer lives.

    ``share`` are agents without ranks that this rank tells of commits. ``committed`` is called for
    each save that was committed, and returns at once.
    """

    def __init__(
        self,
        meeting: Meeting,
        agent: AgentClient,
        share: Sequence[AgentClient] = (),
        *,
        committed: Callable[[Generation], None] = lambda generation: None,
    ) -> None:
        self._meeting = meeting
        self._committed = committed
        self._agent = agent
        self._teller = Teller(share)
        self._claims = Claims(meeting)
        self._past: Generation | None = None
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ecckpt-watch", daemon=True)
        self._thread.start()

    def follow(self, following: Following) -> None:
        """See a staged save through; its handle tells how it ends."""
        ranks = self._meeting.world_size
        steps = see_through(following.shard, ranks, counted=following.counted)
        self._work.put(lambda: self._go_through(following, steps))

    def abandon(self, handle: SaveHandle, shard: ShardId, deadline_s: float) -> None:
        """Let the other ranks know that this shard, which has failed, will not come."""
        following = Following(handle, shard, deadline_s, lambda: None, True)
        self._work.put(lambda: self._go_through(following, give_up(self._meeting.world_size)))

    def call(self, act: Callable[[], object]) -> None:
        """Do something off the caller's path, after the saves that are queued."""
        self._work.put(act)

    def close(self, timeout_s: float) -> bool:
        """End the thread after the work it has; False if that takes longer.

        All of that work has deadlines, but for the store's, which waits for a host that hangs.
        """
        self._closing.set()
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (act := self._work.get()) is not None:
            try:
                act()
            except EcckptError as error:
                _log.warning("behind the training: %s", error)
            except Exception:
                _log.exception("background work for a save failed")

    def _go_through(self, following: Following, steps: Steps) -> None:
        """Do what the rule asks for (counting.py), until it is through."""
        try:
            step = next(steps)
            while True:
                try:
                    result = self._do(following, step)
                except EcckptError as error:
                    step = steps.throw(error)
                except Exception as error:
                    _log.exception("following %s failed", following.shard)
                    step = steps.throw(SaveFailed(f"{following.shard}: {error!r}"))
                else:
                    step = steps.send(result)
        except StopIteration:
            pass
        finally:
            if following.counted:
                self._past = following.shard.generation
            following.handle.mark_left()

    def _do(self, following: Following, step: Step) -> object:
        shard = following.shard
        match step:
            case Start():
                self._start(following)
            case Look(state):
                left_s = _left_s(following, state)
                watch = Watch(shard, state, min(_WATCH_S, left_s))
                return self._agent.call(WATCH, watch)
            case Protected(progress):
                following.handle.mark_protected(progress)
            case Tell():
                self._agent.call(COMMIT, Commit(shard.run, shard.generation))
            case Share():
                self._teller.tell(shard)
            case Ended(error):
                self._ended(following, error)
            case Pause():
                if self._closing.wait(min(_PAUSE_S, _left_s(following, "committed"))):
                    raise SaveTimedOut(f"{shard}: this rank has ended")
            case Count() | Wake() | Await() | GiveUp():
                return self._meet(following, step)
        return None

    def _start(self, following: Following) -> None:
        # First of all: what lacks a shard is never restored, whatever becomes of this rank.
        if following.claim is not None:
            self._claims.compare(following.shard.generation, following.claim)
        following.start()

    def _meet(self, following: Following, step: Count | Wake | Await | GiveUp) -> object:
        """Something in the ranks' store, which may be gone: then it is the end of the save."""
        generation = following.shard.generation
        try:
            match step:
                case Count(counter, amount):
                    return self._meeting.add(key_of(counter, generation), amount)
                case Wake(counter):
                    self._wake(counter, generation)
                case Await("count"):
                    left_s = min(_SLICE_S, _left_s(following, "protected"))
                    self._meeting.wait(wake_key_of("count", generation), left_s)
                case Await():
                    self._await_left(following)
                case GiveUp():
                    return self._meeting.subtract_unless(
                        key_of("count", generation), POISON, value=self._meeting.world_size
                    )
        except (RuntimeError, OSError) as error:
            if isinstance(error, EcckptError):
                raise
            first_line = str(error).split("\n", 1)[0]  # torch adds a stack of its own
            text = f"{following.shard}: the ranks' store: {first_line}"
            if isinstance(step, (Count, Await)):
                raise SaveFailed(text) from error
            _log.info("%s", text)
        return True  # also where it could not be given up: nobody can count any more

    def _wake(self, counter: Counter, generation: Generation) -> None:
        self._meeting.put(wake_key_of(counter, generation), b"")
        if counter == "left" and self._past is not None:
            # All are through with this one: nobody looks at the one before it any more.
            for each in ("count", "left"):
                self._meeting.drop(key_of(each, self._past))
                self._meeting.drop(wake_key_of(each, self._past))

    def _await_left(self, following: Following) -> None:
        """Look again and again rather than wait: it mostly takes a moment, and may be given up."""
        key = wake_key_of("left", following.shard.generation)
        last_s = max(_LAST_POLL_S, self._meeting.world_size / _POLLS_PER_S)
        poll_s, closed_s = _FIRST_POLL_S, 0.0
        while self._meeting.look(key) is None:
            if closed_s > _GRACE_S:
                raise SaveTimedOut(f"{following.shard}: this rank has ended")
            wait_s = min(poll_s, _left_s(following, "with other ranks"))
            if self._closing.wait(wait_s):
                closed_s += wait_s
                time.sleep(wait_s)
            poll_s = min(2 * poll_s, last_s)

    def _ended(self, following: Following, failed: EcckptError | None) -> None:
        if following.claim is not None:
            failed = self._claims.explain(following.shard, failed)
        if failed is not None:
            _log.warning("save of step %d failed: %s", following.handle.step, failed)
        elif following.counted:
            self._committed(following.shard.generation)
        try:
            following.ended(failed)
        except Exception:
            _log.exception("after %s", following.shard)
        finally:
            following.handle.finish(failed)


def _left_s(following: Following, state: str) -> float:
    """Seconds to the deadline of a save; ``SaveTimedOut`` if it is over."""
    left_s = following.deadline_s - time.monotonic()
    if left_s <= 0:
        raise SaveTimedOut(f"{following.shard}: still {state} at its deadline")
    return left_s
