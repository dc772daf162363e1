"""A save on its way: the handle that the caller holds, and the thread that sees it through.

The thread only waits for the agent and counts in the store, as ``counting.py`` has it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ecckpt import wire
from ecckpt.claims import Claims
from ecckpt.client import AgentClient
from ecckpt.counting import (
    POISON,
    Count,
    GiveUp,
    Look,
    Protected,
    Start,
    Step,
    Steps,
    Tell,
    counter_of,
    see_through,
)
from ecckpt.errors import EcckptError, SaveFailed, SaveTimedOut
from ecckpt.generation import Generation, ShardId
from ecckpt.rendezvous import Meeting
from ecckpt.state import Claim

_log = logging.getLogger(__name__)

_WATCH_S = 1.0
COMMIT_TIMEOUT_S = 2.0


class SaveHandle:
    """One save of one rank: how far it is, and how it ended.

    ``stall_s`` is how long ``save()`` kept its caller, ``shard_bytes`` what it copied. ``held``
    is the number of fragments verified at their holders.
    """

    def __init__(self, generation: Generation | None, step: int) -> None:
        self.generation, self.step = generation, step
        self.stall_s = 0.0
        self.shard_bytes = 0
        self.held = 0
        self.encode_s = 0.0
        self.protected_s = 0.0
        self.problems: tuple[str, ...] = ()
        self.error: EcckptError | None = None
        self._staged = threading.Event()
        self._protected = threading.Event()
        self._committed = threading.Event()
        self._done = threading.Event()

    @property
    def staged(self) -> bool:
        """The snapshot is taken: the state may change."""
        return self._staged.is_set()

    @property
    def protected(self) -> bool:
        """This rank's shard reached its redundancy."""
        return self._protected.is_set()

    @property
    def committed(self) -> bool:
        """All ranks' shards did, and the agents know it."""
        return self._committed.is_set()

    @property
    def done(self) -> bool:
        """Committed or failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is committed; False if that took longer than ``timeout_s``.

        Raises the error with which the save failed.
        """
        if not self._done.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def wait_done(self, timeout_s: float) -> bool:
        """Wait until it is committed or has failed, without raising; False if that took longer."""
        return self._done.wait(timeout_s)

    def __repr__(self) -> str:
        state = "staging"
        for name in ("staged", "protected", "committed"):
            state = name if getattr(self, name) else state
        return f"<SaveHandle step {self.step}: {f'failed: {self.error}' if self.error else state}>"

    # -- for the code that moves it on ------------------------------------------------------------

    def mark_staged(self) -> None:
        """The snapshot is complete."""
        self._staged.set()

    def mark_protected(self, progress: wire.Progress) -> None:
        """The agent reports this shard as protected."""
        self.held, self.problems = progress.held, progress.problems
        self.encode_s, self.protected_s = progress.encode_s, progress.protected_s
        self._protected.set()

    def finish(self, error: EcckptError | None = None) -> None:
        """Committed, or failed with ``error``."""
        self.error = error
        if error is None:
            self._committed.set()
        self._done.set()


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

    ``committed`` is called for each one that was committed, and returns at once.
    """

    def __init__(
        self,
        meeting: Meeting,
        agent: AgentClient,
        peers: Sequence[AgentClient],
        *,
        committed: Callable[[Generation], None] = lambda generation: None,
    ) -> None:
        self._meeting = meeting
        self._committed = committed
        self._agent = agent
        self._peers = peers
        self._claims = Claims(meeting)
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="ecckpt-watch", daemon=True)
        self._thread.start()

    def follow(self, following: Following) -> None:
        """See a staged save through; its handle tells how it ends."""
        self._work.put(lambda: self._see_through(following))

    def abandon(self, shard: ShardId) -> None:
        """Let the other ranks know that this shard will not come."""
        self._work.put(lambda: self._give_up(shard))

    def call(self, act: Callable[[], object]) -> None:
        """Do something off the caller's path, after the saves that are queued."""
        self._work.put(act)

    def close(self, timeout_s: float) -> bool:
        """End the thread after the work it has; False if that takes longer.

        All of that work has deadlines, but for the store's, which waits for a host that hangs.
        """
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

    def _see_through(self, following: Following) -> None:
        shard, ranks = following.shard, self._meeting.world_size
        failed = self._drive(following, see_through(shard, ranks, counted=following.counted))
        if following.claim is not None:
            failed = self._claims.explain(following.shard, failed)
        if failed is not None:
            _log.warning("save of step %d failed: %s", following.handle.step, failed)
        elif following.counted:
            self._committed(shard.generation)
        try:
            following.ended(failed)
        finally:
            following.handle.finish(failed)

    def _drive(self, following: Following, steps: Steps) -> EcckptError | None:
        """Do what the rule asks for (counting.py), until it says how the save ended."""
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
        except StopIteration as end:
            ended: EcckptError | None = end.value
            return ended

    def _do(self, following: Following, step: Step) -> object:
        shard = following.shard
        match step:
            case Start():
                # First of all: what lacks a shard is never restored, whatever becomes of this rank.
                if following.claim is not None:
                    self._claims.compare(shard.generation, following.claim)
                following.start()
            case Look(state):
                return self._watch(following, state)
            case Protected(progress):
                following.handle.mark_protected(progress)
            case Count(amount):
                return self._meeting.add(counter_of(shard.generation), amount)
            case Tell(everybody=True):
                # One after another: a program that is ending can start no threads.
                for peer in (self._agent, *self._peers):
                    tell_committed(peer, shard)
            case Tell():
                self._agent.commit(shard.run, shard.generation)
            case GiveUp():
                return self._give_up(shard)
        return None

    def _watch(self, following: Following, state: str) -> wire.Progress:
        left_s = following.deadline_s - time.monotonic()
        if left_s <= 0:
            raise SaveTimedOut(f"{following.shard}: still {state} at its deadline")
        return self._agent.watch(wire.Watch(following.shard, state, False, min(_WATCH_S, left_s)))

    def _give_up(self, shard: ShardId) -> bool:
        """Make sure that a generation can no longer be committed; False if it already is."""
        try:
            return self._meeting.subtract_unless(
                counter_of(shard.generation), POISON, value=self._meeting.world_size
            )
        except (RuntimeError, OSError) as error:
            _log.warning("could not give up %s in the store: %s", shard, error)
            return True


def tell_committed(peer: AgentClient, shard: ShardId) -> None:
    """Tell an agent, without much patience: one that misses it learns it from the next commit."""
    try:
        replace(peer, timeout_s=COMMIT_TIMEOUT_S).commit(shard.run, shard.generation)
    except (EcckptError, OSError) as error:
        _log.warning("could not tell %s that %s is committed: %s", peer.address, shard, error)
