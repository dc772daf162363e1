"""One save of one rank, as the caller sees it: how far it is, and how it ended."""

from __future__ import annotations

import threading

from ecckpt.errors import EcckptError, SaveSkipped
from ecckpt.format.ids import Generation
from ecckpt.protocol.messages.save import Progress


class SaveHandle:
    """One save of one rank: how far it is, and how it ended.

    ``stall_s`` is how long ``save()`` kept its caller, ``shard_bytes`` what it copied. ``held``
    is the number of fragments verified at their holders. ``committed_s`` is how long the commit
    took after the snapshot.
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
        self.began_s = self._staged_s = began_s  # on the performer's clock
        self._staged = threading.Event()
        self._protected = threading.Event()
        self._committed = threading.Event()
        self._done = threading.Event()
        self.left = False  # whether the next save may begin

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
        """All ranks' shards did, and this node's agent knows it, unless it is away."""
        return self._committed.is_set()

    @property
    def done(self) -> bool:
        """Committed or failed."""
        return self._done.is_set()

    @property
    def skipped(self) -> bool:
        """Not begun, since what it had to wait for took longer than its patience."""
        return isinstance(self.error, SaveSkipped)

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

    @property
    def waits_for(self) -> str:
        """What the next save waits for, in words."""
        if self.done:
            return "waiting for other ranks to be done with it"
        if self.protected:
            return "waiting for other ranks' shards"
        return "waiting for this rank's shard to be protected"

    def mark_staged(self, now_s: float) -> None:
        """The snapshot is complete."""
        self._staged_s = now_s
        self._staged.set()

    def mark_protected(self, progress: Progress) -> None:
        """The agent reports this shard as protected."""
        self.held, self.problems = progress.held, progress.problems
        self.encode_s, self.protected_s = progress.encode_s, progress.protected_s
        self._protected.set()

    def finish(self, error: EcckptError | None, now_s: float) -> None:
        """Committed, or failed with ``error``."""
        self.error = error
        if error is None:
            self.committed_s = now_s - self._staged_s
            self._committed.set()
        self._done.set()

    def mark_left(self) -> None:
        """No rank is at work on it any more, or it was waited for long enough."""
        self.left = True
