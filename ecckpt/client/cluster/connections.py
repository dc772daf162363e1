"""How one rank reaches the agents: addresses and credentials, no open connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ecckpt.client.cluster.local_agent import find_or_start
from ecckpt.client.config import NodeConfig
from ecckpt.protocol.agent_client import AgentClient


@dataclass(frozen=True, slots=True)
class Connections:
    """Plain data, so that it may go to another process of the node.

    ``agent`` is this node's, ``peers`` are all agents by node, ``node`` says how to start this
    node's agent again: as the node it was, at the address that its peers know.
    """

    agent: AgentClient
    peers: Mapping[str, AgentClient]
    node: NodeConfig

    def revive_agent(self) -> None:
        """Start this node's agent again unless one answers; raises what ``find_or_start`` does."""
        find_or_start(self.node)
