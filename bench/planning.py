"""Planning a restore of a large run from what its agents say: ``python -m bench.planning``.

Inventories of 2,048 nodes with 8 ranks each, RS(8, 2), as the bytes that agents send, one committed
generation and a newer one that was not finished; 3 nodes of each hundredth group are lost and have
been replaced. Times are CPU seconds of the one rank that plans: reading the messages, choosing
the generation, and an order for each of 16,384 ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from ecckpt import wire
from ecckpt.collector import collector_paused
from ecckpt.fragment import BLOCK_BYTES, HOME, Header, fragment_bytes_for
from ecckpt.generation import Generation, ShardId
from ecckpt.ordering import Way, way_home
from ecckpt.placement import Node, Placement, parse_code, plan_placement
from ecckpt.recovery import Inventory, RecoveryPlan, plan_recovery

K, M = 8, 2
SHARD_BYTES = 10 << 30
T = TypeVar("T")


def header(generation: Generation, rank: int, ranks: int, index: int, home: str) -> Header:
    """Of a 10 GiB shard."""
    return Header(
        ShardId("llama", generation, rank),
        *(ranks, index, K, M, SHARD_BYTES, fragment_bytes_for(SHARD_BYTES, K), BLOCK_BYTES),
        *(home, None, 1_790_000_000),
    )


def survivors(placement: Placement, homes: list[str]) -> list[bytes]:
    """What the agents answer, in bytes."""
    committed, unfinished = (Generation(1, step, "0123456789abcdef") for step in (100, 200))
    held: dict[str, list[Header]] = defaultdict(list)
    for rank, home in enumerate(homes):
        for index, node in enumerate((home, *placement.holders[home]), start=HOME):
            held[node].append(header(committed, rank, len(homes), index, home))
            if index != HOME and rank % 2:
                held[node].append(header(unfinished, rank, len(homes), index, home))
    for group in placement.groups[::100]:
        for node in group[:3]:
            held[node.id] = []
    return [
        wire.pack(
            Inventory(
                node, tuple(held[node]), (), (), committed, fence=1, roll_backs=(), rejected={}
            )
        )
        for node in placement.holders
    ]


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and its CPU seconds."""
    started_s = time.thread_time()
    return run(), time.thread_time() - started_s


def orders(plan: RecoveryPlan, placement: Placement, homes: list[str]) -> list[Way]:
    """As rank 0 makes them."""
    assert plan.chosen is not None
    address = {node: f"10.0.0.1:{at}" for at, node in enumerate(placement.holders)}
    return [way_home(shard, homes[shard.rank], placement, address) for shard in plan.chosen.shards]


@collector_paused()  # as a restore does
def main() -> None:
    """Print the times, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning")
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    arguments = parser.parse_args()
    names = [f"node{at:05}" for at in range(arguments.nodes)]
    domains = [f"rack{at // 32}" for at in range(arguments.nodes)]
    placement, placement_s = timed(
        lambda: plan_placement(map(Node, names, domains), parse_code((K, M), len(names)))
    )
    homes = [name for name in names for _ in range(arguments.ranks_per_node)]
    bodies = survivors(placement, homes)
    inventories, read_s = timed(lambda: [wire.unpack(Inventory, body) for body in bodies])
    plan, plan_s = timed(lambda: plan_recovery("llama", inventories))
    ways, orders_s = timed(lambda: orders(plan, placement, homes))
    assert len(ways) == len(homes)
    row = {
        "nodes": len(names),
        "ranks": len(homes),
        "files": sum(len(inventory.headers) for inventory in inventories),
        "message_bytes": sum(map(len, bodies)),
        "placement_s": placement_s,
        "read_s": read_s,
        "plan_s": plan_s,
        "orders_s": orders_s,
        "all_s": placement_s + read_s + plan_s + orders_s,
    }
    for name, value in row.items():
        print(
            f"{name:16} {value:>14,.4g}" if isinstance(value, float) else f"{name:16} {value:>14,}"
        )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
