"""The right to save one shard by other means than ``Checkpointer.save``, as plain data.

A ticket holds no connection, so it may go to another process, which stages the shard into a slot of
the node's agent and has it protected. The ranks find out among themselves that all have done so;
then one of them commits. client/threads.py performs these routines (``HeldTicket``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ecckpt.client import deadlines
from ecckpt.client.effects import (
    Mark,
    Now,
    Report,
    Routine,
    answers_of,
    call_all,
    call_own,
    perform,
    traced,
)
from ecckpt.client.events import Message
from ecckpt.client.save.staging import Deadline, await_protected, copy_into_slot
from ecckpt.client.save.traces import send_spans
from ecckpt.client.state_effects import Snapshot
from ecckpt.errors import EcckptError, SaveFailed
from ecckpt.format.fragment_file import Header, block_bytes_for, fragment_bytes_for
from ecckpt.format.ids import ShardId
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.messages.save import Commit, Progress, Protect, Reserve, Revoke, Stage
from ecckpt.protocol.verbs import COMMIT, INVENTORY, PROTECT, RESERVE, REVOKE, STAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to save one rank's shard of one generation.

    Attributes:
        header: of the shard, but for its length.
        protection: what the agent is asked for once the shard is staged.
        nodes: all nodes of the run.
        timeout_s: bounds the save.
    """

    header: Header
    protection: Protect
    nodes: tuple[str, ...]
    local_ranks: int
    timeout_s: float

    @property
    def shard(self) -> ShardId:
        """Which shard."""
        return self.header.shard

    def stage(self, snapshot: Snapshot) -> Routine[None]:
        """Reserve a slot at this node's agent and copy the shard into it.

        Raises what the agent answers: ``MemoryBudgetTooSmall``, ``TmpfsFull``, ``Fenced``,
        ``AgentUnreachable``.
        """
        unix_s, _ = yield from perform(Mark())
        header = replace(
            self.header,
            shard_bytes=snapshot.shard_bytes,
            fragment_bytes=fragment_bytes_for(snapshot.shard_bytes, self.header.k),
            block_bytes=block_bytes_for(snapshot.shard_bytes),
            created_unix_s=int(unix_s),
        )
        reserve = Reserve(
            header=header,
            memory_bytes=self.protection.memory_bytes,
            local_ranks=self.local_ranks,
            holders=len(self.protection.targets),
            discard=self.protection.discard,
        )
        asked = call_own(RESERVE, reserve, deadlines.CALL_S)
        slot = yield from traced("slot", self.shard, asked)
        yield from copy_into_slot(snapshot, header, slot)
        yield from call_own(STAGE, Stage(header, slot.region), deadlines.CALL_S)

    def protect(self) -> Routine[Progress]:
        """Have the staged shard coded and spread, and wait until it has its redundancy.

        Raises ``SaveFailed`` if it cannot get it, ``SaveTimedOut`` at the deadline.
        """
        deadline = Deadline(self.shard, (yield from perform(Now())) + self.timeout_s)
        yield from call_own(PROTECT, self.protection, deadlines.CALL_S)
        waited = await_protected(deadline)
        progress = yield from traced("protect and commit", self.shard, waited)
        yield from send_spans(self.shard.run)
        return progress

    def commit(self) -> Routine[None]:
        """Tell all agents that every shard is protected. Raises unless this node's has taken it."""
        message = Commit(self.shard.run, self.shard.generation)
        yield from call_own(COMMIT, message, deadlines.CALL_S)
        # An agent that misses the commit learns of it from the next one.
        answers = yield from call_all(COMMIT, message, self.nodes, deadlines.COMMIT_S)
        for node, answer in answers.items():
            if isinstance(answer, EcckptError | OSError):
                text = f"could not tell {node} that {self.shard} is committed: {answer}"
                yield from perform(Report(Message(logging.WARNING, text)))

    def revoke(self) -> Routine[None]:
        """Have all agents drop the generation, which will not be committed.

        Some of its shards are protected, maybe all: a restart would take it.
        """
        message = Revoke(self.shard.run, self.shard.generation)
        answers = yield from call_all(REVOKE, message, self.nodes, deadlines.COMMIT_S)
        for node, answer in answers.items():
            if isinstance(answer, EcckptError | OSError):
                text = f"could not have {node} drop {self.shard.generation}: {answer}"
                yield from perform(Report(Message(logging.WARNING, text)))

    def is_committed(self) -> Routine[bool]:
        """Whether some agent knows this generation, or a newer one, as committed.

        Raises ``SaveFailed`` if no agent answers: then it may be committed.
        """
        found: list[Inventory] = []
        try:
            found.append((yield from call_own(INVENTORY, self.shard.run, deadlines.CALL_S)))
            if self._is_known_to(found[0]):
                return True
        except (EcckptError, OSError):
            pass  # this node's agent is away: the others may know
        answers = yield from call_all(INVENTORY, self.shard.run, self.nodes, deadlines.CALL_S)
        found += answers_of(answers, Inventory)
        if not found:
            raise SaveFailed(
                f"{self.shard}: no agent tells whether it is committed",
                hint="the shard is kept; saves go on when this node's agent answers",
            )
        return any(map(self._is_known_to, found))

    def _is_known_to(self, inventory: Inventory) -> bool:
        committed = inventory.committed
        return committed is not None and committed >= self.shard.generation
