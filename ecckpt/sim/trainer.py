"""A trainer: restores with the others, then saves, step after step, until it dies.

Its decisions are the real ones: ``counting.py`` for a save, ``recovery.py`` and ``ordering.py`` for
a restore. What is written down again beside it, in ``saving.py``, ``leading.py`` and
``restoring.py``, is the order of requests of their namesakes above the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ecckpt.client.cluster.requests import guard_of
from ecckpt.errors import EcckptError, Fenced
from ecckpt.format.ids import Generation
from ecckpt.sim.archiving import Archiver
from ecckpt.sim.hosts.host import SimulatedHost
from ecckpt.sim.restoring import SimulatedRestorer
from ecckpt.sim.saving import LOCAL_TIMEOUT_S, SimulatedSaver
from ecckpt.sim.world import Actor, Failure, Steps, Wait

if TYPE_CHECKING:
    from ecckpt.sim.session import Session


class Rank(Actor):
    """One process of a session, at home on a host; ``timeline`` and ``parent`` once restored."""

    def __init__(self, session: Session, rank: int, host: SimulatedHost) -> None:
        super().__init__(session.world)
        self.session, self.rank, self.host = session, rank, host
        self.timeline = 0
        self.parent: Generation | None = None
        self.archiver = Archiver(self)
        self.saver = SimulatedSaver(self)

    def main(self) -> Steps:
        """The program."""
        step = yield from SimulatedRestorer(self).run()
        self.spawn(self.guard())
        while True:
            yield self.session.pace(self)
            yield from self.saver.save(step)
            step += 1
            if isinstance(self.saver.error, Fenced):
                raise Failure("replaced by a restart, and must end")

    def guard(self) -> Steps:
        """Have this node's agent watch over its home copies."""
        session = self.session
        if not session.rules.guarded:
            return
        guard = guard_of(
            session.run,
            self.host.node,
            session.placement,
            {node: node for node in session.hosts},
            writer=self.timeline,
            local_ranks=session.local_ranks(self.host.node),
            memory_bytes=session.rules.budget_bytes,
            timeout_s=0.5 * session.rules.save_timeout_s,
        )
        try:
            yield self.own(guard)
        except EcckptError:
            return

    def own(self, request: Any) -> Wait:
        """A request to this node's agent."""
        return self.host.ask(self.host.node, request, LOCAL_TIMEOUT_S)
