"""A ticket with what it takes to use it, in this or another process of the node."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.client.cluster.connections import Connections
from ecckpt.client.save.ticket import Ticket
from ecckpt.client.slot_mappings import Slots
from ecckpt.client.state_effects import StateEffects
from ecckpt.client.threads import ThreadPerformer
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.save import Progress
from ecckpt.protocol.tracing import Tracer
from ecckpt.state.snapshot.plan import ShardPlan


@dataclass(frozen=True, slots=True)
class HeldTicket:
    """The right to save one rank's shard of one generation (client/save/ticket.py)."""

    ticket: Ticket
    connections: Connections

    @property
    def shard(self) -> ShardId:
        """Which shard."""
        return self.ticket.shard

    @property
    def header(self) -> Header:
        """The shard's header, but for its length."""
        return self.ticket.header

    def stage(self, plan: ShardPlan, slots: Slots) -> None:
        """Reserve a slot at this node's agent and copy the shard into it.

        Raises what the agent answers: ``MemoryBudgetTooSmall``, ``TmpfsFull``, ``Fenced``,
        ``AgentUnreachable``.
        """
        self._performer(slots).run(self.ticket.stage(plan))

    def protect(self) -> Progress:
        """Have the staged shard coded and spread, and wait until it has its redundancy.

        Raises ``SaveFailed`` if it cannot get it, ``SaveTimedOut`` at the deadline.
        """
        return self._performer().run(self.ticket.protect())

    def commit(self) -> None:
        """Tell all agents that every shard is protected. Raises unless this node's has taken it."""
        self._performer().run(self.ticket.commit())

    def revive_agent(self) -> None:
        """Start this node's agent again, as the node it was, at the address its peers know."""
        self.connections.revive_agent()

    def _performer(self, slots: Slots | None = None) -> ThreadPerformer:
        effects = StateEffects(self.connections, slots or Slots())
        return ThreadPerformer(self.connections, Tracer(), effects.table)
