"""Which run a start means: the one that has the name, or a new one.

A run has an identity of its own (format/ids.py), drawn at its first start. Rank 0 asks all agents
which runs of the name they know. One: this start continues it. None: it begins a new run. Several:
jobs that did not know of each other used the same name; no start chooses between them by itself.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence

from ecckpt.client import deadlines
from ecckpt.errors import EcckptError, TwoHistories
from ecckpt.format.ids import plain_name
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.fan_out import call_each
from ecckpt.protocol.messages.node import Identities
from ecckpt.protocol.verbs import IDENTITIES

_log = logging.getLogger(__name__)

_IDENTITY_BYTES = 8


def find_run(run: str, agents: Sequence[AgentClient]) -> str:
    """Return the full name of the run that this start means; drawn anew if no agent knows one.

    Waits for agents that still read their disks if nothing is known of the run. Agents that do not
    answer are left out: a restore refuses to begin from scratch without them.

    Raises ``TwoHistories`` if agents know several runs of this name.
    """
    if plain_name(run) != run:
        return run
    deadline_s = time.monotonic() + deadlines.DISKS_AT_JOIN_S
    while True:
        answers = call_each(agents, lambda agent: _ask(agent, run))
        known = _the_one(run, agents, answers)
        if known:
            return known
        unread = any(answer.awaits_disk for answer in answers)
        if not unread or time.monotonic() > deadline_s:
            return f"{run}~{secrets.token_hex(_IDENTITY_BYTES)}"
        time.sleep(deadlines.DISKS_LOOK_S)


def known_run(run: str, agents: Sequence[AgentClient]) -> str:
    """Return the full name of the run that agents know; ``run`` itself if none knows one.

    Raises ``TwoHistories`` as ``find_run`` does.
    """
    if plain_name(run) != run:
        return run
    return _the_one(run, agents, call_each(agents, lambda agent: _ask(agent, run))) or run


def _the_one(run: str, agents: Sequence[AgentClient], answers: Sequence[Identities]) -> str:
    known: dict[str, list[str]] = defaultdict(list)
    for agent, answer in zip(agents, answers, strict=True):
        for name in answer.runs:
            known[name].append(agent.address)
    if len(known) > 1:
        raise TwoHistories(run, {name: f"agents {', '.join(at)}" for name, at in known.items()})
    return next(iter(known), "")


def _ask(agent: AgentClient, run: str) -> Identities:
    try:
        return agent.call(IDENTITIES, run)
    except (EcckptError, OSError) as error:
        _log.warning("which runs it knows is not known: %s", error)
        return Identities((), False)
