"""A save ticket together with the connections that it needs.

``Checkpointer.ticket`` returns one. The DCP writer (integrations/dcp/writer.py) sends it to the
process of the node that writes the shard, and uses it there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ecckpt.client.cluster.connections import Connections
from ecckpt.client.save.ticket import Ticket
from ecckpt.client.slot_mappings import Slots
from ecckpt.client.state_performer import StatePerformer
from ecckpt.client.threads import ThreadPerformer
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.save import Progress
from ecckpt.protocol.tracing import Tracer
from ecckpt.state.snapshot.plan import ShardPlan


@dataclass(frozen=True, slots=True)
class HeldTicket:
    """The right to save one rank's shard of one generation (client/save/ticket.py).

    Both fields are plain data, so a ticket can be pickled and sent to another process of the node.
    """

    ticket: Ticket
    connections: Connections
    tracer: Tracer = field(default_factory=Tracer, compare=False)  # sent when it is protected

    @property
    def shard(self) -> ShardId:
        """The shard that this ticket saves."""
        return self.ticket.shard

    @property
    def header(self) -> Header:
        """The shard's header; its length is not known before ``stage``."""
        return self.ticket.header

    def stage(self, plan: ShardPlan, slots: Slots) -> None:
        """Reserve a slot at this node's agent and copy the shard into it.

        Raises ``MemoryBudgetTooSmall``, ``TmpfsFull`` or ``Fenced`` if the agent refuses, and
        ``AgentUnreachable`` if it does not answer.
        """
        self._performer(slots).run(self.ticket.stage(plan))

    def protect(self) -> Progress:
        """Have the agent encode and distribute the staged shard; block until it is protected.

        Raises ``SaveFailed`` if too few fragments reach their holders, ``SaveTimedOut`` at the
        deadline.
        """
        return self._performer().run(self.ticket.protect())

    def commit(self) -> None:
        """Tell all agents that every shard is protected.

        Raises an error unless this node's own agent has accepted the commit.
        """
        self._performer().run(self.ticket.commit())

    def revoke(self) -> None:
        """Have all agents drop the generation: a rank failed, or ranks have different content."""
        self._performer().run(self.ticket.revoke())

    def revive_agent(self) -> None:
        """Start this node's agent again if none answers.

        It keeps its node name and the address that its peers know.
        """
        self.connections.revive_agent()

    def _performer(self, slots: Slots | None = None) -> ThreadPerformer:
        effects = StatePerformer(self.connections, slots or Slots())
        return ThreadPerformer(self.connections, self.tracer, effects.table)
