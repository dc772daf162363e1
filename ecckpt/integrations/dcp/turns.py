"""One save after another: DCP's saves in the background must not meet in one process group.

DCP tells a writer when a save begins and never when it is over: after the last call come more
collectives. What runs in a thread of DCP's own is over when that thread has ended; what runs in the
caller's thread, when its last call has come or that thread asks again.
"""

from __future__ import annotations

import threading
import time
from weakref import WeakKeyDictionary

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ecckpt.client.checkpointer import Checkpointer
from ecckpt.errors import SaveTimedOut

_LOOK_S = 0.01


class Turn:
    """One save of this rank. ``staged``: DCP runs it in a thread that ends with it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.staged = False
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()

    def is_over(self) -> bool:
        """Whether nothing of this save can run any more."""
        if self.thread is threading.current_thread():
            return True
        if self.staged:
            return self.thread is not None and not self.thread.is_alive()
        return self.ended.is_set()

    def drop(self) -> None:
        """It comes to nothing: do not wait for it."""
        self.staged = False
        self.ended.set()


class Turns:
    """The saves of one Checkpointer on this rank, in the order in which they asked.

    ``stager`` copies the state for whoever has the turn. It keeps its memory for the next save:
    fresh pages would cost the caller more than the copying does.
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

    def take(self, turn: Turn, *, timeout_s: float) -> None:
        """Wait until the save before is over; ``SaveTimedOut`` if it is not by then."""
        deadline_s = time.monotonic() + timeout_s
        while (before := self._replace(turn)) is not turn:
            if time.monotonic() > deadline_s:
                raise SaveTimedOut(
                    f"step {turn.step}: the save of step {before.step} is not over after "
                    f"{timeout_s:g} s",
                    hint="wait for its future before the next save",
                )
            time.sleep(_LOOK_S)

    def _replace(self, turn: Turn) -> Turn:
        """Make ``turn`` the last one if nothing stands in its way; whose turn it is."""
        with self._lock:
            if self._last is None or self._last.is_over():
                self._last = turn
            return self._last


_known: WeakKeyDictionary[Checkpointer, Turns] = WeakKeyDictionary()
_knowing = threading.Lock()


def turns_of(checkpointer: Checkpointer) -> Turns:
    """The same for every writer of that Checkpointer."""
    with _knowing:
        return _known.setdefault(checkpointer, Turns())
