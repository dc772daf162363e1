"""A save on its way: the handle that the caller holds, and the thread that sees it through.

The thread only waits for the agent and counts in the store. Committing needs no collective: each
rank adds one to the generation's counter when its shard is protected, and whoever completes the
count tells the agents. A rank that gives up makes the count unreachable first, in the same atomic
counter, so a generation is either committed or given up, never both.
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
from ecckpt.errors import EcckptError, SaveFailed, SaveTimedOut
from ecckpt.generation import Generation, ShardId
from ecckpt.rendezvous import Meeting
from ecckpt.state import Claim

_log = logging.getLogger(__name__)

_POISON = 1 << 40
_WATCH_S = 1.0
_COMMIT_TIMEOUT_S = 2.0


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
    """One thread that follows saves, one after another, for as long as the Checkpointer lives."""

    def __init__(self, meeting: Meeting, agent: AgentClient, peers: Sequence[AgentClient]) -> None:
        self._meeting = meeting
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

    def close(self) -> None:
        """End the thread after the work it has."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (act := self._work.get()) is not None:
            try:
                act()
            except Exception:
                _log.exception("background work for a save failed")

    def _see_through(self, following: Following) -> None:
        failed: EcckptError | None = None
        try:
            self._follow(following)
        except EcckptError as error:
            failed = self._settled(following, error)
        except Exception as error:
            _log.exception("following %s failed", following.shard)
            failed = self._settled(following, SaveFailed(f"{following.shard}: {error!r}"))
        try:
            following.ended(failed)
        finally:
            following.handle.finish(failed)

    def _follow(self, following: Following) -> None:
        # First of all: a generation that lacks a shard is never restored, whatever becomes of us.
        if following.claim is not None:
            self._claims.compare(following.shard.generation, following.claim)
        following.start()
        following.handle.mark_protected(self._await_protected(following))
        if not following.counted:
            return
        generation = following.shard.generation
        if self._meeting.add(_counter(generation), 1) == self._meeting.world_size:
            self._commit(following)
        self._await_committed(following)
        self._claims.forget()

    def _await_protected(self, following: Following) -> wire.Progress:
        state = "encoding"
        while True:
            progress = self._watch(following, state, committed=False)
            state = progress.state
            if state == "protected":
                return progress
            if state in ("failed", "unknown"):
                detail = "; ".join(progress.problems[:8]) or "the agent was restarted meanwhile"
                raise SaveFailed(f"{following.shard}: not protected: {detail}")

    def _await_committed(self, following: Following) -> None:
        counter = _counter(following.shard.generation)
        while not self._watch(following, "protected", committed=False).committed:
            count = self._meeting.add(counter, 0)
            if count < 0:
                why = self._claims.verdict(following.shard.generation)
                raise SaveFailed(
                    f"{following.shard}: {why or 'another rank could not protect its shard'}"
                )
            if count >= self._meeting.world_size:
                # Whoever completed the count may have died before it told this node.
                self._agent.commit(following.shard.run, following.shard.generation)

    def _watch(self, following: Following, state: str, *, committed: bool) -> wire.Progress:
        left_s = following.deadline_s - time.monotonic()
        if left_s <= 0:
            raise SaveTimedOut(f"{following.shard}: still {state} at its deadline")
        message = wire.Watch(following.shard, state, committed, min(_WATCH_S, left_s))
        return self._agent.watch(message)

    def _commit(self, following: Following) -> None:
        """Tell every agent, this node's first.

        One that misses it learns it from its own ranks or from the next commit, so the others
        need not wait for it. One after another: a program that is ending can start no threads.
        """
        for peer in (self._agent, *self._peers):
            tell_committed(peer, following.shard)

    def _settled(self, following: Following, error: EcckptError) -> EcckptError | None:
        """The error that a save ends with; None if the other ranks have committed it anyway."""
        if following.counted and not self._give_up(following.shard):
            _log.warning("%s was committed by the other ranks: %s", following.shard, error)
            return None
        _log.warning("save of step %d failed: %s", following.handle.step, error)
        return error

    def _give_up(self, shard: ShardId) -> bool:
        """Make sure that a generation can no longer be committed; False if it already is."""
        # Never from a complete count: other ranks may yet read it, and must find it complete.
        try:
            return self._meeting.subtract_unless(
                _counter(shard.generation), _POISON, value=self._meeting.world_size
            )
        except (RuntimeError, OSError) as error:
            _log.warning("could not give up %s in the store: %s", shard, error)
            return True


def tell_committed(peer: AgentClient, shard: ShardId) -> None:
    """Tell an agent, without much patience: one that misses it learns it from the next commit."""
    try:
        replace(peer, timeout_s=_COMMIT_TIMEOUT_S).commit(shard.run, shard.generation)
    except (EcckptError, OSError) as error:
        _log.warning("could not tell %s that %s is committed: %s", peer.address, shard, error)


def _counter(generation: Generation) -> str:
    return f"count/{generation}"
