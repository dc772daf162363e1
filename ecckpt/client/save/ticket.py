"""Saving one shard by somebody else than the Checkpointer: what that takes, as a value.

A ticket is plain data and holds no connection, so it may go to another process. Whoever has it
stages the shard into a slot of the node's agent and has it protected. That all ranks have done so
is for them to find out: then one of them commits.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat

from ecckpt.client.cluster.local_agent import find_or_start
from ecckpt.client.config import NodeConfig
from ecckpt.client.save.commit_notice import tell_committed
from ecckpt.client.slot_mappings import Slots
from ecckpt.errors import EcckptError, SaveFailed, SaveTimedOut
from ecckpt.format.fragment_file import Header, block_bytes_for, fragment_bytes_for
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.save import Commit, Progress, Protect, Reserve, Stage, Watch
from ecckpt.protocol.verbs import COMMIT, INVENTORY, PROTECT, RESERVE, STAGE, WATCH
from ecckpt.state.snapshot.plan import ShardPlan

_WATCH_S = 1.0
_AT_A_TIME = 32  # agents that are asked or told


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to save one rank's shard of one generation.

    ``header`` describes the shard but for its length; ``protection`` is what the agent is asked for
    once it is staged. ``node`` tells how to start the agent again. ``timeout_s`` bounds the save.
    """

    header: Header
    protection: Protect
    agent: AgentClient
    peers: tuple[AgentClient, ...]
    node: NodeConfig
    local_ranks: int
    timeout_s: float

    @property
    def shard(self) -> ShardId:
        """Which shard."""
        return self.header.shard

    def stage(self, plan: ShardPlan, slots: Slots) -> None:
        """Reserve a slot at this node's agent and write the shard into it.

        Raises what the agent answers: ``MemoryBudgetTooSmall``, ``TmpfsFull``, ``Fenced``,
        ``AgentUnreachable``.
        """
        header = replace(
            self.header,
            shard_bytes=plan.shard_bytes,
            fragment_bytes=fragment_bytes_for(plan.shard_bytes, self.header.k),
            block_bytes=block_bytes_for(plan.shard_bytes),
            created_unix_s=int(time.time()),
        )
        slot = self.agent.call(
            RESERVE,
            Reserve(
                header=header,
                memory_bytes=self.protection.memory_bytes,
                local_ranks=self.local_ranks,
                holders=len(self.protection.targets),
                discard=self.protection.discard,
            ),
        )
        payload = slots.payload(slot, header.payload_bytes)
        plan.write(payload[: plan.shard_bytes])
        # A recycled slot holds an older shard; what lies beyond this one is coded too.
        payload[plan.shard_bytes :] = bytes(header.payload_bytes - plan.shard_bytes)
        self.agent.call(STAGE, Stage(header, slot.region))

    def protect(self) -> Progress:
        """Have the staged shard coded and spread, and wait until it has its redundancy.

        Raises ``SaveFailed`` if it cannot get it, ``SaveTimedOut`` at the deadline.
        """
        deadline_s = time.monotonic() + self.timeout_s
        self.agent.call(PROTECT, self.protection)
        state = "encoding"
        while (left_s := deadline_s - time.monotonic()) > 0:
            watch = Watch(self.shard, state, min(_WATCH_S, left_s))
            progress = self.agent.call(WATCH, watch)
            state = progress.state
            if state == "protected":
                return progress
            if state in ("failed", "unknown"):
                detail = "; ".join(progress.problems[:8]) or "the agent was restarted meanwhile"
                raise SaveFailed(f"{self.shard}: not protected: {detail}")
        raise SaveTimedOut(f"{self.shard}: still {state} at its deadline")

    def commit(self) -> None:
        """Tell all agents that every shard is protected. Raises unless this node's has taken it."""
        self.agent.call(COMMIT, Commit(self.shard.run, self.shard.generation))
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="tell") as telling:
            list(telling.map(tell_committed, self.peers, repeat(self.shard)))

    def is_committed(self) -> bool:
        """Whether some agent knows this generation, or a newer one, as committed."""
        if _knows(self.agent, self.shard):
            return True
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="ask") as asking:
            return any(asking.map(_knows, self.peers, repeat(self.shard)))

    def revive_agent(self) -> None:
        """Start this node's agent again, as the node it was, at the address its peers know."""
        find_or_start(self.node)


def _knows(agent: AgentClient, shard: ShardId) -> bool:
    try:
        committed: Generation | None = agent.call(INVENTORY, shard.run).committed
    except (EcckptError, OSError):  # it says nothing, so it is not known
        return False
    return committed is not None and committed >= shard.generation
