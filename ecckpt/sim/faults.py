"""Which faults a simulation injects, and how often: one value, drawn from the seed and printed.

The injector and ``SimulatedNetwork`` act on it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities of faults of a message, and mean times between faults of the cluster.

    Attributes:
        drop, duplicate, late: probabilities, of each request and each answer.
        late_s: the most that a late message takes.
        jitter_s: what every message takes longer, on average; it reorders messages.
        flip: the probability that a bit of a pulled fragment flips.
        *_every_s: the mean time between two such faults somewhere in the cluster; 0 for never.
        partition_s, stall_s, away_s, disk_slow_s: how long such a fault lasts, or delays, at most.
        one_way: the share of partitions that let messages through in one direction.
        burst: the share of host losses that take up to m holders of the host along.
        power_every_s: losses of power of all hosts at once. Like all that follow, except ``drift``,
            only in clusters with disks.
        reboot: the share of host losses after which the host is back with its disk.
        disk_rot_every_s, disk_full_every_s, disk_sick_every_s, disk_slow_every_s: a bit of a disk
            rots; a disk is full, fails at every request, or is slow, for a while.
        drift: the probability that a rank's replicated tensors differ from those of other ranks.
        store_break: the probability, of each request to the ranks' store and each answer, that the
            connection of that host breaks, for at most ``store_break_s``.
        bulk: the share of hosts that come back with a network which passes small messages and no
            fragments, as with a wrong MTU or a bad cable, for at most ``bulk_s``; one at a time.
        late_start: the probability that a start is stopped before it restores. The launcher starts
            the run anew at once; the ranks of the first go on within ``late_start_s``.
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
    store_break: float = 0.0
    store_break_s: float = 0.0
    bulk: float = 0.0
    bulk_s: float = 0.0
    late_start: float = 0.0
    late_start_s: float = 0.0

    @property
    def keeps_order_of_starts(self) -> bool:
        """Whether every agent hears of every start, and at once."""
        hides = (
            self.drop,
            self.late,
            self.partition_every_s,
            self.agent_kill_every_s,
            self.agent_stall_every_s,
            self.host_loss_every_s,
            self.power_every_s,
        )
        return not any(hides)

    @property
    def of_disks_alone(self) -> bool:
        """Whether only disks can fail; then every save must succeed."""
        # The names without "disk_" only qualify faults of other kinds, and do nothing alone.
        harmless = (
            "disk_",
            "away_s",
            "late_s",
            "partition_s",
            "stall_s",
            "one_way",
            "burst",
            "reboot",
            "store_break_s",
            "bulk_s",
            "late_start",
        )
        drawn = [field.name for field in fields(self) if getattr(self, field.name)]
        on_disk = any(name.startswith("disk_") for name in drawn)
        return on_disk and all(name.startswith(harmless) for name in drawn)

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name}={value:g}" for name, value in shown.items() if value) or "none"


NONE = Faults()


def draw(rng: Random) -> Faults:
    """Draw the faults of a run.

    Each kind occurs in half of the runs only, since a fault that always occurs hides others.
    """

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
        store_break=sometimes(0.001, 0.02),
        store_break_s=rng.uniform(1.0, 30.0),
        bulk=rng.choice([0.0, 0.3]),
        bulk_s=rng.uniform(1.0, 60.0),
        late_start=rng.choice([0.0, 0.3]),
        late_start_s=rng.uniform(5.0, 60.0),
    )
