"""Rank 0's thread behind the saves: from memory to the disks of all nodes (archiving.py).

Nobody waits for it but ``close``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ecckpt.client.save.archive_protocol import Archivist, Ask, Disks, Pause, Say, Step, Tell
from ecckpt.errors import EcckptError
from ecckpt.format.ids import Generation
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import OnDisk
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.verbs import RETAIN, STORE

_log = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 2.0
_HURRY_S = 0.05  # between two questions, once it is to be closed


class Storer:
    """``peers`` are all agents by node; ``close`` waits for what is begun."""

    def __init__(self, run: str, peers: Mapping[str, AgentClient], disks: Disks) -> None:
        self._peers = {
            node: replace(peer, timeout_s=_ASK_TIMEOUT_S) for node, peer in peers.items()
        }
        self._wanted = bool(disks.every)
        self._archivist = Archivist(run, list(peers), disks, clock=time.monotonic)
        self._changed = threading.Condition()  # guards the archivist
        self._thread: threading.Thread | None = None

    def begin(self, timeline: int, there: OnDisk, roll_backs: tuple[RollBack, ...]) -> None:
        """A timeline begins: what is on disk from before, and what was left on purpose."""
        with self._changed:
            self._archivist.begin(timeline, there, roll_backs)
        if self._thread is None and self._wanted:
            # Now: a program that is ending can start no threads.
            self._thread = threading.Thread(target=self._work, name="ecckpt-store", daemon=True)
            self._thread.start()

    def committed(self, generation: Generation) -> None:
        """A save is committed: it may be its turn. Returns at once."""
        with self._changed:
            self._archivist.committed(generation)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Wait for what is begun or due, at most that long, and end the thread."""
        with self._changed:
            self._archivist.deadline_s = time.monotonic() + timeout_s
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        while (generation := self._next()) is not None:
            try:
                self._archive()
            except Exception:
                _log.exception("storing %s failed", generation)

    def _next(self) -> Generation | None:
        """What is due, once something is; None: nothing more will be."""
        with self._changed:
            while self._archivist.due is None and self._archivist.deadline_s is None:
                self._changed.wait()
            return self._archivist.due

    def _archive(self) -> None:
        steps = self._archivist.archive()
        result: object = None
        error: Exception | None = None
        while True:
            try:
                with self._changed:
                    step = steps.throw(error) if error else steps.send(result)
            except StopIteration:
                return
            result = error = None
            try:
                result = self._do(step)
            except (EcckptError, OSError) as caught:
                error = caught

    def _do(self, step: Step) -> Any:
        match step:
            case Ask(node, message):
                return self._peers[node].call(STORE, message)
            case Tell(node, message):
                return self._peers[node].call(RETAIN, message)
            case Pause(wait_s):
                self._pause(wait_s)
            case Say(text, wrong):
                _log.log(logging.WARNING if wrong else logging.INFO, "%s", text)
        return None

    def _pause(self, wait_s: float) -> None:
        with self._changed:
            if self._archivist.deadline_s is None:
                self._changed.wait(wait_s)
        if self._archivist.deadline_s is not None:
            time.sleep(_HURRY_S)
