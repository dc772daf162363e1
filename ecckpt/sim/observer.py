"""What the client's protocols report, handed to the truth of a run, which checks it."""

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
from ecckpt.sim.truth.ledger import TruthStart


class Observer:
    """Of one rank."""

    def __init__(self, session: Session, host: SimulatedHost) -> None:
        self._session, self._host = session, host
        self._asked_s = 0.0

    def asks(self, begins: bool) -> None:
        """The rank asks all agents for something; ``begins``: for their inventories."""
        if begins:
            self._asked_s = self._session.world.now_s

    def reported(self, event: Event) -> None:
        """Something happened in a protocol."""
        session, truth = self._session, self._session.truth
        timeout_s = session.rules.restore_timeout_s
        match event:
            case SaveCommitted(shard):
                truth.committed(self._host, shard.generation)
            case SaveFailure(shard, error):
                truth.failed(shard, error)
            case RestorePlanned(timeline, generation, answering, first):
                session.timeline = timeline
                if first and not self._is_stale(peer_patience_s(timeout_s)):
                    truth.chosen(generation, answering, session.wanted)
            case GenerationRefused(generation, answering, why):
                if not self._is_stale(timeout_s):
                    truth.refused(generation, answering, why)
            case RestoreDecided(timeline, generation, on_purpose):
                truth.decides(timeline, generation, on_purpose=on_purpose)
            case TimelineBegun(timeline, begun_at, on_purpose):
                truth.begins(timeline, begun_at, on_purpose=on_purpose)
            case _:
                pass

    def loads(self, rank: int, brought: SimulatedBytes) -> int:
        """The rank goes on from these bytes."""
        session = self._session
        start = TruthStart(session.timeline, session.name, session.ranks)
        session.truth.loaded(start, rank, brought.generation, brought.parts)
        if brought.region is not None:
            session.truth.assigned(brought.region)
        return 0

    def _is_stale(self, age_s: float) -> bool:
        """Whether this rank was stopped since it asked, and what was answered says nothing."""
        return self._session.world.now_s > self._asked_s + age_s + 0.1
