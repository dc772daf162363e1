"""Telling agents that a generation is committed, without waiting long for any of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from ecckpt.errors import EcckptError
from ecckpt.format.ids import ShardId
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.save import Commit
from ecckpt.protocol.verbs import COMMIT

_log = logging.getLogger(__name__)

COMMIT_TIMEOUT_S = 2.0
_GLANCE_S = 0.1


class Teller:
    """A rank's share of the agents that have no ranks, told one after another. For one thread.

    One that did not answer the last time is given a moment only, until it answers again: it must
    not keep every save from ending. What it misses it learns from the next commit that it hears.
    """

    def __init__(self, share: Sequence[AgentClient]) -> None:
        self._share = tuple(share)
        self._silent: set[str] = set()

    def tell(self, shard: ShardId) -> None:
        """Tell them all that the generation of this shard is committed."""
        for agent in self._share:
            known = agent.address in self._silent
            if tell_committed(agent, shard, timeout_s=_GLANCE_S if known else COMMIT_TIMEOUT_S):
                self._silent.discard(agent.address)
            else:
                self._silent.add(agent.address)


def tell_committed(
    agent: AgentClient, shard: ShardId, *, timeout_s: float = COMMIT_TIMEOUT_S
) -> bool:
    """Tell one agent; False, and a line in the log, if it does not take it in that time."""
    try:
        replace(agent, timeout_s=timeout_s).call(COMMIT, Commit(shard.run, shard.generation))
    except (EcckptError, OSError) as error:
        _log.warning("could not tell %s that %s is committed: %s", agent.address, shard, error)
        return False
    return True
