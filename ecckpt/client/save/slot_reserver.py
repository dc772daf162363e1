"""A slot for the next save, reserved while training goes on: then ``save()`` sends no request.

    nothing --ahead--> wish --RESERVE answered--> slot --take--> nothing
                        |  ^                       error --take--> raised, nothing
                        v  |
                       silent (the agent does not answer; it is started again)

One routine at a time sends requests, in ``Lane.RESERVE``. A caller that waits for it pings the
agent now and then: an agent that hangs must not keep the training program waiting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from ecckpt.client import deadlines
from ecckpt.client.effects import (
    Lane,
    Now,
    PingAgent,
    Queue,
    Report,
    ReviveAgent,
    Routine,
    call_own,
    perform,
    until,
)
from ecckpt.client.events import Message
from ecckpt.client.state_effects import MapSlot, SlotExists
from ecckpt.errors import AgentUnreachable, EcckptError
from ecckpt.protocol.messages.save import Reserve, Slot
from ecckpt.protocol.verbs import RESERVE


class SlotReserver:
    """At most one slot, reserved and mapped ahead of the save that will fill it."""

    def __init__(self) -> None:
        self._wish: Reserve | None = None
        self._slot: Slot | None = None
        self._error: EcckptError | OSError | None = None
        self._silent: AgentUnreachable | None = None
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being reserved."""
        return self._wish is None

    @property
    def waits_for(self) -> str:
        """Why there is no slot yet, in words."""
        silent = self._silent
        return f"no answer from {silent}" if silent else "waiting for this node's agent to make it"

    def ahead(self, wish: Reserve) -> Routine[None]:
        """Begin to reserve a slot like this and return."""
        self._wish, self._slot, self._error = wish, None, None
        yield from perform(Queue(Lane.RESERVE, self._reserve()))

    def take(self, wish: Reserve, deadline_s: float) -> Routine[Slot | None]:
        """The slot reserved ahead if it will do, else one reserved now; the caller's from now on.

        None if there is none by ``deadline_s``: it is reserved nevertheless, for the next caller.
        Raises what reserving raises. Without a deadline (infinity) it waits as long as the agent is
        at work and answers pings, and raises ``AgentUnreachable`` within seconds after that.
        """
        if not (yield from self._await_until(deadline_s)):
            return None
        if not (yield from self._fits(wish)):
            yield from self.ahead(wish)
            if not (yield from self._await_until(deadline_s)):
                return None
        slot, self._slot = self._slot, None
        if slot is None:
            assert self._error is not None
            raise self._error
        return slot

    def settle(self) -> Routine[None]:
        """Wait until nothing is being reserved, and drop the slot: another reserves the next.

        Raises ``AgentUnreachable`` as ``take`` does.
        """
        yield from self._await_answer()
        self._slot = None

    def close(self) -> None:
        """Reserve nothing any more, after the request that is under way."""
        self._closed = True

    def _fits(self, wish: Reserve) -> Routine[bool]:
        slot = self._slot
        if slot is None:
            return False
        mine, wanted = slot.header.shard, wish.header.shard
        return (
            mine.generation.timeline == wanted.generation.timeline
            and slot.file_bytes >= wish.header.file_bytes
            and (yield from perform(SlotExists(slot)))
        )

    def _await_until(self, deadline_s: float) -> Routine[bool]:
        if math.isinf(deadline_s):
            yield from self._await_answer()
            return True
        left_s = max(0.0, deadline_s - (yield from perform(Now())))
        return (yield from until(lambda: self._wish is None, left_s))

    def _await_answer(self) -> Routine[None]:
        """Wait until the agent has answered the latest wish."""

        def answered(wait_s: float) -> Routine[bool]:
            yield from until(lambda: self._wish is None or self._silent is not None, wait_s)
            if self._wish is not None and self._silent is not None:
                raise self._silent
            return self._wish is None

        try:
            if self._wish is not None and self._silent is not None:
                # The agent did not answer last time; it may be back by now.
                yield from perform(PingAgent(deadlines.GLANCE_S))
                self._silent = None
            yield from while_alive(answered, timeout_s=math.inf)
        except AgentUnreachable as error:
            self._silent = error
            raise

    def _reserve(self) -> Routine[None]:
        """Ask the agent until the latest wish is answered, one way or the other."""
        while (wish := self._wish) is not None and not self._closed:
            slot, error = None, None
            try:
                slot = yield from call_own(RESERVE, wish, deadlines.CALL_S)
                yield from perform(MapSlot(slot, wish.header.payload_bytes))
            except AgentUnreachable as unreachable:
                yield from self._fall_silent(unreachable)
                continue
            except (EcckptError, OSError) as other:
                slot, error = None, other
                text = f"no slot for the next save: {other}"
                yield from perform(Report(Message(logging.INFO, text)))
            self._silent = None
            if self._wish is wish:
                self._wish, self._slot, self._error = None, slot, error

    def _fall_silent(self, error: AgentUnreachable) -> Routine[None]:
        """Let callers go on without the agent, and try to have one that answers."""
        self._silent = error
        if self._closed:
            return  # a program that ends starts no agent
        try:
            yield from perform(ReviveAgent())
        except (EcckptError, OSError) as still:
            yield from perform(Report(Message(logging.WARNING, f"this node's agent: {still}")))
            yield from until(lambda: self._closed, deadlines.REVIVE_AGAIN_S)


def while_alive(done: Callable[[float], Routine[bool]], *, timeout_s: float) -> Routine[bool]:
    """Run ``done(wait_s)``, which may wait that long, until it is true; False after ``timeout_s``.

    Raises ``AgentUnreachable`` if this node's agent gives no sign of life meanwhile.
    """
    deadline_s = (yield from perform(Now())) + timeout_s
    look_s = deadlines.FIRST_PING_AFTER_S
    while True:
        left_s = max(0.0, deadline_s - (yield from perform(Now())))
        if (yield from done(min(look_s, left_s))):
            return True
        if left_s <= look_s:
            return False
        yield from perform(PingAgent(deadlines.PING_S))
        look_s = deadlines.LATER_PINGS_AFTER_S
