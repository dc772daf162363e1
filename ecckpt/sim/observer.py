"""Reports what one rank's protocols do to the truth of the run, which checks it.

``SimulatedPerformer`` calls it for the client's ``Report`` effects and for loads.
"""

from __future__ import annotations

from ecckpt.client.deadlines import peer_patience_s
from ecckpt.client.events import (
    Event,
    GenerationRefused,
    RestoreDecided,
    RestorePlanned,
    SaveCommitted,
    SaveFailure,
    TimelineBegun,
)
from ecckpt.sim.hosts.host import SimulatedHost
from ecckpt.sim.session import Session
from ecckpt.sim.state import SimulatedBytes
from ecckpt.sim.truth.loads import TruthStart

_SLACK_S = 0.1  # for the messages of one round


class Observer:
    """Reports for one rank."""

    def __init__(self, session: Session, host: SimulatedHost) -> None:
        self._session, self._host = session, host
        self._asked_s = 0.0

    def asks(self, begins: bool) -> None:
        """The rank sends a request to all agents; ``begins``: it asks for their inventories."""
        if begins:
            self._asked_s = self._session.world.now_s

    def reported(self, event: Event) -> None:
        """A protocol has reported an event."""
        session, truth = self._session, self._session.truth
        timeout_s = session.rules.restore_timeout_s
        match event:
            case SaveCommitted(shard):
                truth.commit_reported(self._host, shard.generation)
            case SaveFailure(shard, error):
                truth.save_failed(shard, error)
            case RestorePlanned(timeline, generation, answering, first):
                session.timeline = timeline
                if first and not self._is_stale(peer_patience_s(timeout_s)):
                    truth.plan_chosen(generation, answering, session.wanted)
            case GenerationRefused(generation, answering, why):
                if not self._is_stale(timeout_s):
                    # What lies on a node whose network passes no fragments, no other node can get.
                    blocked = session.network.bulk_blocked(within_s=timeout_s)
                    reachable = [node for node in answering if node != blocked]
                    truth.generation_refused(generation, reachable, why)
            case RestoreDecided(timeline, generation, on_purpose):
                truth.restore_decided(timeline, generation, on_purpose=on_purpose)
            case TimelineBegun(timeline, begun_at, on_purpose):
                start = TruthStart(timeline, session.name, session.ranks)
                heard_of = session.network.faults.keeps_order_of_starts
                session.starts.begun(session.name, heard_of=heard_of)
                truth.timeline_begun(start, begun_at, on_purpose=on_purpose)
            case _:
                pass

    def loads(self, rank: int, brought: SimulatedBytes) -> int:
        """The rank goes on from these bytes.

        Returns 0, the number of bytes that were assigned: a simulated rank counts none.
        """
        session = self._session
        start = TruthStart(session.timeline, session.name, session.ranks)
        session.truth.rank_loaded(start, rank, brought.generation, brought.parts)
        if brought.region is not None:
            session.truth.tensors_assigned(brought.region)
        return 0

    def _is_stale(self, age_s: float) -> bool:
        """Whether the inventories that the rank decides from are older than ``age_s``.

        A rank that was stalled since it asked decides from answers that say nothing about now.
        """
        return self._session.world.now_s > self._asked_s + age_s + _SLACK_S
