"""Rules broken on purpose, and faults for simulated clusters, that several test files share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ecckpt.agent.records import run_record
from ecckpt.agent.records.entry import Entry
from ecckpt.sim import simulate as simulating
from ecckpt.sim.faults import Faults
from ecckpt.sim.run_config import Rules

POWER = Faults(power_every_s=12.0, away_s=5.0, agent_kill_every_s=3.0)
DISKS = Faults(
    disk_rot_every_s=3.0,
    disk_full_every_s=5.0,
    disk_sick_every_s=5.0,
    disk_slow_every_s=5.0,
    disk_slow_s=20.0,
)
RESTARTS = Faults(rank_kill_every_s=5.0)


def retires_the_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit also lets go what it commits."""

    def outdated(self: run_record.RunRecord) -> list[Entry]:
        committed = self.noted.committed
        return [
            entry
            for (shard, _), entry in self.entries.items()
            if committed is not None and shard.generation <= committed
        ]

    monkeypatch.setattr(run_record.RunRecord, "outdated", outdated)


def has_no_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than two generations of one rank need, in a third of the seeds."""
    draw = simulating._draw_rules

    def drawn(*arguments: Any) -> Rules:
        rules = draw(*arguments)
        return replace(rules, disk_every=1, budget_bytes=rules.budget_bytes // 2)

    monkeypatch.setattr(simulating, "_draw_rules", drawn)
