"""Planning a restore of a large run from inventories: ``python -m bench.planning``.

The inventories are those of 2,048 nodes with 8 ranks each, RS(8, 2), as the bytes that agents send.
They have one committed generation and a newer one that was not finished; 3 nodes of each hundredth
group are lost and have been replaced. Times are CPU seconds of the one rank that plans: it reads
the messages, chooses the generation, checks what is on disk, makes an order for each of 16,384
ranks, and packs it. ``led_s`` is the CPU time of all of that again, with other inventories, by
``Coordinator.order`` with the threads of a training process, from agents that answer at once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ecckpt.client.cluster.connections import Connections
from ecckpt.client.cluster.members import Cluster
from ecckpt.client.config import NodeConfig
from ecckpt.client.restore.coordinator import Coordinator
from ecckpt.client.restore.protocol import Ground, Order, Wanted, orders
from ecckpt.client.threads import ThreadPerformer
from ecckpt.format.fragment_file import BLOCK_BYTES, HOME, Header, fragment_bytes_for
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation, ShardId
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.policy.on_disk import on_disk
from ecckpt.policy.placement import Node, Placement, parse_code, plan_placement
from ecckpt.policy.survival import Inventory, plan_recovery
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.encoding import pack_message, unpack_message
from ecckpt.protocol.tracing import Tracer
from ecckpt.protocol.verbs import A, Verb
from ecckpt.protocol.verbs import M as Asked

RUN = "llama"
K, M = 8, 2
SHARD_BYTES = 10 << 30
T = TypeVar("T")


@dataclass(frozen=True)
class Answering(AgentClient):
    """An agent that answers at once."""

    body: bytes = b""

    def call(self, verb: Verb[Asked, A], message: Asked, *, timeout_s: float = 0.0) -> A:
        """Return its inventory, as it would arrive."""
        return unpack_message(verb.answer, self.body)


def header(generation: Generation, rank: int, ranks: int, index: int, home: str) -> Header:
    """Return the header of a fragment of a 10 GiB shard."""
    return Header(
        ShardId(RUN, generation, rank),
        *(ranks, index, K, M, SHARD_BYTES, fragment_bytes_for(SHARD_BYTES, K), BLOCK_BYTES),
        *(home, None, 1_790_000_000),
    )


def survivors(placement: Placement, homes: list[str], session: str) -> dict[str, bytes]:
    """Return the answer of each agent, in bytes."""
    committed, unfinished = (Generation(1, step, session) for step in (100, 200))
    held: dict[str, list[Header]] = defaultdict(list)
    for rank, home in enumerate(homes):
        for index, node in enumerate((home, *placement.holders[home]), start=HOME):
            held[node].append(header(committed, rank, len(homes), index, home))
            if index != HOME and rank % 2:
                held[node].append(header(unfinished, rank, len(homes), index, home))
    for group in placement.groups[::100]:
        for node in group[:3]:
            held[node.id] = []
    none = Headers.from_headers(())
    return {
        node: pack_message(
            Inventory(
                node=node,
                headers=Headers.from_headers(held[node]),
                disk=none,
                stored=(),
                committed=committed,
                fence=1,
                roll_backs=(),
                rejected={},
            )
        )
        for node in placement.holders
    }


def timed(run: Callable[[], T], clock: Callable[[], float] = time.thread_time) -> tuple[T, float]:
    """Return the result of ``run``, and its CPU seconds."""
    started_s = clock()
    return run(), clock() - started_s


def parts(bodies: list[bytes], ground: Ground) -> tuple[list[bytes], dict[str, float]]:
    """Return rank 0's order for each rank, and the CPU seconds of each part of its work."""
    inventories, read_s = timed(lambda: [unpack_message(Inventory, body) for body in bodies])
    plan, plan_s = timed(lambda: plan_recovery(RUN, inventories))
    _, on_disk_s = timed(lambda: on_disk(RUN, inventories))
    made, orders_s = timed(
        lambda: orders(plan, ground, plan.rejected(), alike=False, relaid=False, witnesses={})
    )
    told, pack_s = timed(lambda: [pack_message(order) for order in made])
    times = {"read_s": read_s, "plan_s": plan_s, "on_disk_s": on_disk_s}
    return told, times | {"orders_s": orders_s, "pack_s": pack_s}


def led(bodies: dict[str, bytes], ground: Ground) -> list[bytes]:
    """Return the same orders, by the coordinator of a restore."""
    peers = {node: Answering(ground.address[node], body=bodies[node]) for node in bodies}
    cluster = Cluster(
        run=RUN,
        session="",
        rank=0,
        ranks=len(ground.homes),
        home=ground.homes[0],
        local_ranks=1,
        homes=tuple(ground.homes),
        share=(),
        address=ground.address,
        placement=ground.placement,
        memory_bytes=0,
        started_s=0.0,
    )
    node = NodeConfig(root=Path(), node="", domain="", listen="", token_file=None)
    performer = ThreadPerformer(Connections(peers[ground.homes[0]], peers, node), Tracer(), {})
    coordinator = Coordinator(cluster, patience_s=10.0, disks_s=10.0)
    with performer.calls_in_parallel():
        made: list[Order] = performer.run(coordinator.order(Wanted(), known=[1], alike=False))
    return [pack_message(order) for order in made]


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
    address = {node: f"10.0.0.1:{at}" for at, node in enumerate(placement.holders)}
    ground = Ground(2, homes, placement, address)
    bodies = survivors(placement, homes, "0123456789abcdef")
    told, times = parts(list(bodies.values()), ground)
    others = survivors(placement, homes, "fedcba9876543210")
    told_too, led_s = timed(lambda: led(others, ground), time.process_time)
    assert len(told) == len(told_too) == len(homes)
    row = {
        "nodes": len(names),
        "ranks": len(homes),
        "files": sum(len(unpack_message(Inventory, body).headers) for body in bodies.values()),
        "message_bytes": sum(map(len, bodies.values())),
        "order_bytes": sum(map(len, told)),
        "placement_s": placement_s,
        **times,
        "all_s": placement_s + sum(times.values()),
        "led_s": led_s,
    }
    for name, value in row.items():
        print(
            f"{name:16} {value:>14,.4g}" if isinstance(value, float) else f"{name:16} {value:>14,}"
        )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
