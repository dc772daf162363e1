"""The cluster as one rank sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ecckpt.policy.placement import Placement
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.node import NodeInfo


@dataclass(frozen=True, slots=True)
class Cluster:
    """Who takes part: this rank's agent, all nodes, and where fragments go.

    ``homes`` is each rank's node; only rank 0 knows it. ``share`` are the nodes without ranks that
    this rank tells of commits: each such node is in one rank's share. ``disk`` is what this node's
    agent was started with as ``--disk``.
    """

    run: str
    home: NodeInfo
    disk: Path | None
    agent: AgentClient
    peers: Mapping[str, AgentClient]
    placement: Placement
    homes: tuple[str, ...]
    share: tuple[str, ...]
    memory_bytes: int
