"""A slot for the next save, reserved while training goes on: the save itself asks nobody.

One thread does all the asking. Whoever waits for it looks now and then whether the agent answers
at all: an agent that hangs must not keep the training program waiting.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ecckpt.client.slot_mappings import Slots
from ecckpt.errors import AgentUnreachable, EcckptError
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.save import Reserve, Slot
from ecckpt.protocol.verbs import RESERVE

_log = logging.getLogger(__name__)

_SIGN_OF_LIFE_S = 2.0
_GLANCE_S = 0.05
_FIRST_LOOK_S = 0.25
_LATER_LOOKS_S = 2.0
_RETRY_S = 1.0


class Reserver:
    """At most one slot, reserved and mapped ahead of the save that will fill it.

    Args:
        agent: this node's.
        slots: where slots are mapped, so that the save need not.
        revive: starts the agent again if it has died; called in the background.
    """

    def __init__(self, agent: AgentClient, slots: Slots, revive: Callable[[], None]) -> None:
        self._agent, self._slots, self._revive = agent, slots, revive
        self._news = threading.Condition()
        self._wish: Reserve | None = None
        self._slot: Slot | None = None
        self._error: EcckptError | OSError | None = None
        self._silent: AgentUnreachable | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ecckpt-reserve", daemon=True)
        self._thread.start()

    def ahead(self, wish: Reserve) -> None:
        """Begin to reserve a slot like this and return.

        Never while one is taken and not staged: the agent keeps one for a rank, the latest.
        """
        with self._news:
            self._submit(wish)

    def take(self, wish: Reserve, deadline_s: float = math.inf) -> Slot | None:
        """The slot reserved ahead if it will do, else one reserved now; the caller's from now on.

        None if there is none by ``deadline_s`` (of the monotonic clock): it is made nevertheless,
        for who comes next. Raises what reserving raises. Without a deadline, waits as long as the
        agent is at work and shows that it lives, and ``AgentUnreachable`` comes within seconds
        after it no longer does.
        """
        with self._news:
            if not self._await_until(deadline_s):
                return None
            if self._slot is None or not _fits(self._slot, wish):
                self._submit(wish)
                if not self._await_until(deadline_s):
                    return None
            slot, self._slot = self._slot, None
            if slot is None:
                assert self._error is not None
                raise self._error
            return slot

    @property
    def waits_for(self) -> str:
        """Why there is no slot yet, in words."""
        silent = self._silent
        return f"no answer from {silent}" if silent else "waiting for this node's agent to make it"

    def settle(self) -> None:
        """Wait until nothing is being reserved, and count on no slot: somebody else reserves next.

        Raises ``AgentUnreachable`` as ``take`` does.
        """
        with self._news:
            self._await()
            self._slot = None

    def close(self) -> None:
        """End the thread, after the call it is in."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join()

    def _submit(self, wish: Reserve) -> None:
        self._wish, self._slot, self._error = wish, None, None
        self._news.notify_all()

    def _await_until(self, deadline_s: float) -> bool:
        if math.isinf(deadline_s):
            self._await()
            return True
        left_s = max(0.0, deadline_s - time.monotonic())
        return self._news.wait_for(lambda: self._wish is None, left_s)

    def _await(self) -> None:
        """Wait, with the lock, until there is an answer to the latest wish."""

        def answered(wait_s: float) -> bool:
            self._news.wait_for(lambda: self._wish is None or self._silent, wait_s)
            if self._wish is not None and self._silent is not None:
                raise self._silent
            return self._wish is None

        try:
            if self._wish is not None and self._silent is not None:
                # By what the thread last saw it does not answer; it may be back by now.
                replace(self._agent, timeout_s=_GLANCE_S).node()
                self._silent = None
            while_alive(self._agent, answered)
        except AgentUnreachable as error:
            self._silent = error
            raise

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._wish is not None or self._closed)
                if self._closed:
                    return
                wish = self._wish
            assert wish is not None
            slot, error = None, None
            try:
                slot = self._agent.call(RESERVE, wish)
                self._slots.ahead(slot, wish.header.payload_bytes)
            except AgentUnreachable as unreachable:
                self._fall_silent(unreachable)
                continue
            except (EcckptError, OSError) as other:
                slot, error = None, other
                _log.info("no slot for the next save: %s", error)
            with self._news:
                self._silent = None
                if self._wish is wish:
                    self._wish, self._slot, self._error = None, slot, error
                self._news.notify_all()

    def _fall_silent(self, error: AgentUnreachable) -> None:
        """Nobody waits for an agent that is known not to answer; try to have one that does."""
        with self._news:
            self._silent = error
            self._news.notify_all()
            if self._closed:
                return
        try:
            self._revive()
        except (EcckptError, OSError) as still:
            _log.warning("this node's agent: %s", still)
            with self._news:
                self._news.wait_for(lambda: self._closed, _RETRY_S)


def while_alive(
    agent: AgentClient, done: Callable[[float], bool], *, timeout_s: float = float("inf")
) -> bool:
    """Wait until ``done(wait_s)``, which may wait that long, is true; False after ``timeout_s``.

    Raises ``AgentUnreachable`` if the agent gives no sign of life meanwhile.
    """
    deadline_s = time.monotonic() + timeout_s
    look_s = _FIRST_LOOK_S
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        if done(min(look_s, left_s)):
            return True
        if left_s <= look_s:
            return False
        replace(agent, timeout_s=_SIGN_OF_LIFE_S).node()
        look_s = _LATER_LOOKS_S


def _fits(slot: Slot, wish: Reserve) -> bool:
    mine, wanted = slot.header.shard, wish.header.shard
    return (
        mine.generation.timeline == wanted.generation.timeline
        and slot.file_bytes >= wish.header.file_bytes
        and Path(slot.path).exists()  # an agent that was started anew keeps no unused slots
    )
