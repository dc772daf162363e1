"""Turns: DCP's saves of one rank run one after another; ``writer.py`` uses it.

Two saves at the same time would mix their collectives in one process group. DCP tells a writer when
a save begins, but not when it has ended: further collectives follow after DCP's last call of the
writer. So the end of a save is found out:

- a save in a thread of DCP has ended when that thread has ended
- a save in the caller's thread has ended after DCP's last call of the writer (a coordinator's is
  ``finish``, another rank's ``write_data``), or when the same thread begins another save

A turn goes through these states:

    waiting --previous turn over--> current --thread ended / last call / dropped--> over
       |
       +--timeout--> SaveTimedOut
"""

from __future__ import annotations

import threading
import time
from weakref import WeakKeyDictionary

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ecckpt.client.checkpointer import Checkpointer
from ecckpt.errors import SaveTimedOut

# DCP gives no event for the end of its thread, so it is polled. 10 ms are short beside a save.
_POLL_S = 0.01


class Turn:
    """One save of this rank.

    Attributes:
        step: the training step.
        staged: DCP runs the save in a thread of its own, which ends with the save
            (``dcp.async_save``).
        thread: the thread that runs the save, as soon as it is known.
        ended: set after DCP's last call of the writer.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.staged = False
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()

    def is_over(self) -> bool:
        """Return whether nothing of this save can run any more."""
        # The thread of this save asks for the next one, so the save has returned.
        if self.thread is threading.current_thread():
            return True
        if self.staged:
            return self.thread is not None and not self.thread.is_alive()
        return self.ended.is_set()

    def drop(self) -> None:
        """End the turn of a save that failed before DCP started it."""
        self.staged = False
        self.ended.set()


class Turns:
    """The queue of saves of one Checkpointer on this rank.

    ``stager`` copies the state of the current save to CPU memory. It keeps that memory for the next
    save, because page faults of new memory take longer than the copy. Only the current turn may use
    it.
    """

    def __init__(self) -> None:
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._lock = threading.Lock()
        self._last: Turn | None = None

    def wait_for_turn(self, turn: Turn, *, timeout_s: float) -> None:
        """Make ``turn`` the current one as soon as the save before it is over.

        Raises ``SaveTimedOut`` if that save is not over after ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while (before := self._try_replace(turn)) is not turn:
            if time.monotonic() > deadline_s:
                raise SaveTimedOut(
                    f"step {turn.step}: the save of step {before.step} is not over after "
                    f"{timeout_s:g} s",
                    hint="wait for its future before the next save",
                )
            time.sleep(_POLL_S)

    def _try_replace(self, turn: Turn) -> Turn:
        """Make ``turn`` the current one if the last one is over; return the current one."""
        with self._lock:
            if self._last is None or self._last.is_over():
                self._last = turn
            return self._last


_turns: WeakKeyDictionary[Checkpointer, Turns] = WeakKeyDictionary()
_turns_lock = threading.Lock()


def turns_of(checkpointer: Checkpointer) -> Turns:
    """Return the queue that all writers of a Checkpointer share."""
    with _turns_lock:
        return _turns.setdefault(checkpointer, Turns())
