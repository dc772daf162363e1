"""What an agent says of a run."""

from __future__ import annotations

from typing import Any

from ecckpt.format.ids import is_run
from ecckpt.protocol.agent_client import AgentClient


def run_status(client: AgentClient, name: str = "test") -> dict[str, Any]:
    """The only run of that name in the agent's status, where it has its full name."""
    runs = client.status()["runs"]
    (found,) = (status for run, status in runs.items() if is_run(run, name))
    return dict(found)
