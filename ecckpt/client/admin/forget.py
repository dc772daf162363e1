"""Dropping a run from all its agents: when it is over, or its name shall be used anew."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ecckpt.errors import EcckptError, Fenced
from ecckpt.format.ids import Generation
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.restore import Forget
from ecckpt.protocol.verbs import FORGET, INVENTORY


@dataclass(frozen=True, slots=True)
class Holding:
    """What one agent has, or had, of a run; ``problem`` is why it may have something still.

    ``newest`` is the newest generation of which it has anything, saved at ``saved_unix_s``.
    """

    node: str
    memory_bytes: int
    disk_bytes: int
    newest: Generation | None
    saved_unix_s: int
    problem: str = ""

    @property
    def empty(self) -> bool:
        """Whether it knows nothing of the run."""
        return not (self.memory_bytes or self.disk_bytes or self.problem)


def holdings(run: str, agents: Sequence[AgentClient]) -> tuple[list[Holding], int]:
    """What each agent has, in the order given, and the newest timeline of all. Changes nothing."""
    found, newest = [], 0
    for agent in agents:
        try:
            inventory = agent.call(INVENTORY, run)
        except (EcckptError, OSError) as error:
            found.append(Holding(agent.address, 0, 0, None, 0, str(error)))
        else:
            found.append(_holding(inventory))
            newest = max(newest, inventory.fence)
    return found, newest


def forget_run(run: str, agents: Sequence[AgentClient]) -> list[Holding]:
    """Have every agent drop what it has of a run; what they had, in the order given.

    A new timeline of nothing begins: writers of the run are fenced off, and its name is as good as
    new where all agents were reached. Raises ``Fenced`` if the run was started meanwhile.
    """
    found, newest = holdings(run, agents)
    message = Forget(run, newest + 1, secrets.token_hex(8))
    return [_forgotten(each, agent, message) for each, agent in zip(found, agents, strict=True)]


def _forgotten(found: Holding, agent: AgentClient, message: Forget) -> Holding:
    problem = found.problem
    try:
        if not problem:
            agent.call(FORGET, message)
            problem = agent.status()["disk"]["problem"]
    except Fenced:
        raise
    except (EcckptError, OSError) as error:
        problem = str(error)
    return Holding(
        found.node, found.memory_bytes, found.disk_bytes, found.newest, found.saved_unix_s, problem
    )


def _holding(inventory: Inventory) -> Holding:
    headers = [*inventory.headers, *inventory.disk]
    newest = max(headers, key=lambda each: each.shard.generation, default=None)
    return Holding(
        inventory.node,
        sum(header.file_bytes for header in inventory.headers),
        sum(header.file_bytes for header in inventory.disk),
        newest.shard.generation if newest else inventory.committed,
        newest.created_unix_s if newest else 0,
    )
