"""Which generations would survive a loss of power of all nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation
from ecckpt.policy.survival import Inventory, ShardReport, plan_recovery


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Generations on disk, oldest first.

    ``told``: generations that an agent was told are on disk everywhere; while nodes are away, some
    of them cannot be restored. ``seen``: generations whose shards are found on enough disks now,
    told or not: the rank that counted them may have died before it told the agents.
    """

    told: tuple[Generation, ...] = ()
    seen: tuple[Generation, ...] = ()


def on_disk(run: str, inventories: Iterable[Inventory]) -> OnDisk:
    """Which generations would survive a loss of power of all nodes, with every shard on disk."""
    inventories = list(inventories)
    told = max(
        (inventory.stored for inventory in inventories if inventory.stored),
        key=lambda stored: (stored[-1], len(stored)),
        default=(),
    )
    without_memory = [
        replace(inventory, headers=Headers.from_headers(())) for inventory in inventories
    ]
    found = plan_recovery(run, without_memory).generations
    seen = (report.generation for report in found if all(map(_is_stored, report.shards)))
    return OnDisk(told, tuple(sorted(seen)))


def _is_stored(shard: ShardReport) -> bool:
    if shard.header is None:
        return False
    # With n = 1 the fragment is the shard, so a home copy is as good.
    have = len(shard.fragments) + (bool(shard.homes) and shard.header.n == 1)
    return have >= shard.header.k
