"""The cluster as one rank sees it: names and addresses, no connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ecckpt.format.ids import RunWriter
from ecckpt.policy.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Who takes part in one session of a run, and where fragments go.

    Attributes:
        session: 16 hex digits, new at every start.
        rank: of this process, one of ``ranks``.
        home: this rank's node, where ``local_ranks`` ranks are at home.
        homes: each rank's node; known to rank 0 only, empty elsewhere.
        share: the nodes without ranks that this rank tells of commits; each such node is in the
            share of exactly one rank.
        address: of every node's agent.
        missing: addresses of agents that did not answer when the ranks met, with the reason; known
            to rank 0 only. Their nodes take no part in the session.
        memory_bytes: the run's memory budget on this node; 0 for the agent's default.
        started_s: when this rank came to join the session, by the performer's clock.
    """

    run: str
    session: str
    rank: int
    ranks: int
    home: str
    local_ranks: int
    homes: tuple[str, ...]
    share: tuple[str, ...]
    address: Mapping[str, str]
    placement: Placement
    memory_bytes: int
    started_s: float
    missing: Mapping[str, str] = field(default_factory=dict)

    def writer(self, timeline: int) -> RunWriter:
        """This session, on that timeline."""
        return RunWriter(timeline, self.session)
