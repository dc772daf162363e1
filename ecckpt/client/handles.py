"""The handle that ``Checkpointer.save`` returns: progress and result of one save of one rank.

client/save/ advances a handle; the training program reads it and waits for it from any thread.
"""

from __future__ import annotations

import threading

from ecckpt.errors import EcckptError, SaveSkipped
from ecckpt.format.ids import Generation
from ecckpt.protocol.messages.save import Progress


class SaveHandle:
    """Progress and result of one save of one rank.

    Attributes:
        generation: None for a save that was skipped before it had one.
        stall_s: how long ``save()`` blocked its caller.
        shard_bytes: how many bytes the save copied.
        held: the number of fragments that their holders have verified.
        encode_s: how long the agent took to encode the shard.
        protected_s: how long the agent took until the shard had its redundancy.
        committed_s: the time from the end of the snapshot to the commit.
        problems: what went wrong at single holders; these do not fail the save.
        error: why the save failed; None while it runs and after a commit.
    """

    def __init__(self, generation: Generation | None, step: int, *, began_s: float = 0.0) -> None:
        self.generation, self.step = generation, step
        self.stall_s = 0.0
        self.shard_bytes = 0
        self.held = 0
        self.encode_s = 0.0
        self.protected_s = 0.0
        self.committed_s = 0.0
        self.problems: tuple[str, ...] = ()
        self.error: EcckptError | None = None
        self.began_s = self._staged_s = began_s  # as the performer's clock tells
        self._staged = threading.Event()
        self._protected = threading.Event()
        self._committed = threading.Event()
        self._done = threading.Event()
        self.left = False  # becomes True when the next save may begin
        self.in_doubt = False  # it may be committed: the ranks' store did not tell

    @property
    def staged(self) -> bool:
        """The snapshot is complete: the caller may change the state again."""
        return self._staged.is_set()

    @property
    def protected(self) -> bool:
        """The shard of this rank has reached its redundancy."""
        return self._protected.is_set()

    @property
    def committed(self) -> bool:
        """The shards of all ranks are protected, and the generation is committed.

        This node's agent has been told, unless it was unreachable.
        """
        return self._committed.is_set()

    @property
    def done(self) -> bool:
        """The save was committed or has failed."""
        return self._done.is_set()

    @property
    def skipped(self) -> bool:
        """The save was not begun, because what it had to wait for outlasted its patience."""
        return isinstance(self.error, SaveSkipped)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the save is committed; return False after ``timeout_s``.

        Raises the error with which the save failed.
        """
        if not self._done.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def wait_done(self, timeout_s: float) -> bool:
        """Block until the save is committed or has failed; return False after ``timeout_s``.

        Raises nothing.
        """
        return self._done.wait(timeout_s)

    def __repr__(self) -> str:
        state = "staging"
        for name in ("staged", "protected", "committed"):
            state = name if getattr(self, name) else state
        return f"<SaveHandle step {self.step}: {f'failed: {self.error}' if self.error else state}>"

    # -- for client/save/, which advances the handle ----------------------------------------------

    @property
    def waits_for(self) -> str:
        """What the next save waits for, in words, for the text of ``SaveSkipped``."""
        if self.in_doubt:
            return "waiting for the ranks' store to tell whether it is committed"
        if self.done:
            return "waiting for other ranks to be done with it"
        if self.protected:
            return "waiting for other ranks' shards"
        return "waiting for this rank's shard to be protected"

    def mark_staged(self, now_s: float) -> None:
        """Record that the snapshot is complete."""
        self._staged_s = now_s
        self._staged.set()

    def mark_protected(self, progress: Progress) -> None:
        """Record that the agent reports this shard as protected."""
        self.held, self.problems = progress.held, progress.problems
        self.encode_s, self.protected_s = progress.encode_s, progress.protected_s
        self._protected.set()

    def finish(self, error: EcckptError | None, now_s: float) -> None:
        """Record the commit, or with ``error`` the failure, and release all waiters."""
        self.error = error
        if error is None:
            self.committed_s = now_s - self._staged_s
            self._committed.set()
        self._done.set()

    def mark_left(self) -> None:
        """Allow the next save to begin.

        Called when every rank has ended its part of this save, or when the wait for that has timed
        out.
        """
        self.left = True
