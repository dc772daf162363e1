"""``ecckpt forget``: drops a run from all its agents, to free memory or to reuse its name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ecckpt.client.cluster.run_identity import known_run
from ecckpt.errors import EcckptError, Fenced
from ecckpt.format.ids import Generation, RunWriter
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.fan_out import call_each
from ecckpt.protocol.messages.restore import Forget
from ecckpt.protocol.verbs import FORGET, INVENTORY


# The names of the fields are keys of `ecckpt forget --json`.
@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one agent has of a run, or had before ``forget_run``.

    Attributes:
        node: the node's name; the agent's address if it did not answer.
        memory_bytes, disk_bytes: length of its files of the run.
        newest: the newest generation of which it has anything.
        saved_unix_s: when that was saved; 0 if unknown.
        problem: why it may still have something; empty if it answered.
    """

    node: str
    memory_bytes: int
    disk_bytes: int
    newest: Generation | None
    saved_unix_s: int
    problem: str = ""

    @property
    def empty(self) -> bool:
        """Whether the agent has nothing of the run, and answered."""
        return not (self.memory_bytes or self.disk_bytes or self.problem)


def holdings(run: str, agents: Sequence[AgentClient]) -> tuple[list[Holding], int]:
    """Ask each agent what it has of a run; change nothing.

    Returns:
        The holdings in the order of ``agents``, and the newest timeline that any of them knows.

    Raises:
        TwoHistories: several runs have this name.
    """
    run = known_run(run, agents)
    answers = call_each(agents, lambda agent: _holding_at(agent, run))
    return [holding for holding, _ in answers], max((fence for _, fence in answers), default=0)


def _holding_at(agent: AgentClient, run: str) -> tuple[Holding, int]:
    """Return what an agent has, and the newest timeline that it knows."""
    try:
        inventory = agent.call(INVENTORY, run)
    except (EcckptError, OSError) as error:
        silent = Holding(
            node=agent.address,
            memory_bytes=0,
            disk_bytes=0,
            newest=None,
            saved_unix_s=0,
            problem=str(error),
        )
        return silent, 0
    return _holding(inventory), inventory.fence


def forget_run(run: str, agents: Sequence[AgentClient]) -> list[Holding]:
    """Drop a run from all agents, in memory and on disk.

    It begins a new, empty timeline. So writers of older timelines are fenced: a program that still
    trains goes on, and its saves fail. If all agents answered, the name can be used for a new run.

    Returns:
        What each agent had, in the order of ``agents``.

    Raises:
        Fenced: the run was started again meanwhile.
        TwoHistories: several runs have this name.
    """
    run = known_run(run, agents)
    before, newest = holdings(run, agents)
    message = Forget(run, RunWriter(newest + 1, secrets.token_hex(8)))
    both = list(zip(before, agents, strict=True))
    return call_each(both, lambda each: _forgotten(*each, message))


def _forgotten(before: Holding, agent: AgentClient, message: Forget) -> Holding:
    problem = before.problem
    try:
        if not problem:
            agent.call(FORGET, message)
            problem = agent.status()["disk"]["problem"]
    except Fenced:
        raise
    except (EcckptError, OSError) as error:
        problem = str(error)
    return replace(before, problem=problem)


def _holding(inventory: Inventory) -> Holding:
    headers = [*inventory.headers, *inventory.disk]
    newest = max(headers, key=lambda header: header.shard.generation, default=None)
    return Holding(
        node=inventory.node,
        memory_bytes=sum(header.file_bytes for header in inventory.headers),
        disk_bytes=sum(header.file_bytes for header in inventory.disk),
        newest=newest.shard.generation if newest else inventory.committed,
        saved_unix_s=newest.created_unix_s if newest else 0,
    )
