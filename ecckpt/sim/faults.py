"""What goes wrong, how often. One value, drawn from the seed, printed with it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities of what happens to a message, and how often a cluster is hit.

    ``drop``, ``duplicate`` and ``late`` are per message, request or answer; each takes ``jitter_s``
    longer in the mean, so many arrive out of order. ``flip`` is per pulled fragment. What ends in
    ``_every_s`` is the mean time between two such faults somewhere in the cluster, 0 for never; the
    other times say how long they last at most. ``one_way`` is the share of partitions that let
    messages through in one direction, ``burst`` that of losses which take m holders along.

    Only where there are disks: ``power`` is that of the whole cluster, ``reboot`` the share of
    losses after which a host is back with its disk; disks rot, are full, fail at all they are asked
    (sick), or take up to ``disk_slow_s`` for each thing.

    ``drift`` is how likely a rank claims in a save what other ranks do not have.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    jitter_s: float = 0.0
    flip: float = 0.0
    partition_every_s: float = 0.0
    partition_s: float = 0.0
    one_way: float = 0.0
    agent_kill_every_s: float = 0.0
    agent_stall_every_s: float = 0.0
    host_loss_every_s: float = 0.0
    burst: float = 0.0
    rank_kill_every_s: float = 0.0
    rank_stall_every_s: float = 0.0
    stall_s: float = 0.0
    away_s: float = 0.0
    rot_every_s: float = 0.0
    full_every_s: float = 0.0
    power_every_s: float = 0.0
    reboot: float = 0.0
    disk_rot_every_s: float = 0.0
    disk_full_every_s: float = 0.0
    disk_sick_every_s: float = 0.0
    disk_slow_every_s: float = 0.0
    disk_slow_s: float = 0.0
    drift: float = 0.0

    @property
    def of_disks_alone(self) -> bool:
        """Whether disks can fail and nothing else, so that every save has to go well."""
        ours = ("disk_", "away_s", "late_s", "partition_s", "stall_s", "one_way", "burst", "reboot")
        there = [each.name for each in fields(self) if getattr(self, each.name)]
        on_disk = any(name.startswith("disk_") for name in there)
        return on_disk and all(name.startswith(ours) for name in there)

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name}={value:g}" for name, value in shown.items() if value) or "none"


NONE = Faults()


def draw(rng: Random) -> Faults:
    """Faults of a run. Each kind is there in some runs only: what always happens hides the rest."""

    def sometimes(low: float, high: float) -> float:
        return rng.uniform(low, high) if rng.random() < 0.5 else 0.0

    return Faults(
        drop=sometimes(0.001, 0.03),
        duplicate=sometimes(0.001, 0.05),
        late=sometimes(0.001, 0.03),
        late_s=rng.uniform(0.5, 15.0),
        jitter_s=sometimes(0.001, 0.05),
        flip=sometimes(0.001, 0.05),
        partition_every_s=sometimes(30.0, 200.0),
        partition_s=rng.uniform(2.0, 40.0),
        one_way=rng.choice([0.0, 0.5]),
        agent_kill_every_s=sometimes(10.0, 100.0),
        agent_stall_every_s=sometimes(10.0, 100.0),
        host_loss_every_s=sometimes(20.0, 200.0),
        burst=rng.choice([0.0, 0.3, 0.7]),
        rank_kill_every_s=sometimes(20.0, 100.0),
        rank_stall_every_s=sometimes(20.0, 100.0),
        stall_s=rng.uniform(1.0, 60.0),
        away_s=rng.uniform(1.0, 60.0),
        rot_every_s=sometimes(2.0, 50.0),
        full_every_s=sometimes(10.0, 100.0),
        power_every_s=sometimes(15.0, 90.0),
        reboot=rng.choice([0.0, 0.5]),
        disk_rot_every_s=sometimes(2.0, 50.0),
        disk_full_every_s=sometimes(10.0, 100.0),
        disk_sick_every_s=sometimes(10.0, 100.0),
        disk_slow_every_s=sometimes(10.0, 60.0),
        disk_slow_s=rng.uniform(1.0, 20.0),
        drift=sometimes(0.01, 0.1),
    )
