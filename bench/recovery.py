"""Protecting and restoring, against only pulling the same bytes: ``python -m bench.recovery``.

One rank with 256 MiB of CPU tensors on 11 real agents of this machine, RS(8, 2). In each round:

- a save, until all ten fragments are verified at their holders; ten processes that only pull as
  many bytes from the same agent through the same transport; three that each pull the whole shard,
  as keeping whole copies for the same safety would;
- a restore after the rank's process died, against one memcpy of the shard; and against two parts of
  it alone: verifying as many bytes and copying them, by as many threads, and the smallest request
  to each of the agents, all at once;
- the same with assigned tensors, and the first write to all of these, against one memcpy;
- three nodes lost, the rank's own among them, and a restore on a new node, against a process there
  that only pulls the shard's bytes from eight nodes, into memory that it has touched before and
  into fresh memory, as a new node has no other.

Each begins when the machine is calm, because kernel threads give memory that was freed a moment ago
back to a VM's host. Ratios are medians over the rounds of times in the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import ecckpt
from bench.measuring import await_calm
from bench.pulling import Pull, Pullers
from bench.save import STATE_BYTES, gpt_state
from ecckpt.coding.reed_solomon import Codec
from ecckpt.format.fragment_file import HOME, block_bytes_for
from ecckpt.memory.buffers import COPY_THREADS, copy_bytes
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster

K, M = 8, 2
NODES = K + M + 1
HOLDERS = K + M
COPIES = M + 1  # whole copies on other nodes that survive any three losses together with the home
RUN = "bench"

Seconds = dict[str, float]
State = Mapping[str, Mapping[str, torch.Tensor]]


def checkpointer(cluster: LocalCluster, node: str) -> ecckpt.Checkpointer:
    """Return a rank's Checkpointer on that node, in a run over all nodes."""
    return ecckpt.Checkpointer(
        RUN, code=(K, M), root=cluster.root(node), agents=cluster.addresses()
    )


def plain_pulls(cluster: LocalCluster, node: str) -> tuple[list[list[Pull]], list[list[Pull]]]:
    """Return the pulls of ten holders, and of three keepers of whole copies, from the home."""
    agent = cluster.client(node)
    address = agent.node().address
    header = next(h for h in agent.call(INVENTORY, RUN).headers if h.index == HOME)
    # The home drops parity once it is held; data of the same length takes its place.
    one = [Pull(address, header.shard, i % K, header.fragment_bytes) for i in range(HOLDERS)]
    return [[pull] for pull in one], [one[:K]] * COPIES


def plain_restore(cluster: LocalCluster) -> list[list[Pull]]:
    """Return pulls of k fragments of the shard from their holders: as many bytes as the shard."""
    found: dict[int, Pull] = {}
    for node in cluster.nodes:
        agent = cluster.client(node)
        address = agent.node().address
        for header in agent.call(INVENTORY, RUN).headers:
            if header.index != HOME:
                pull = Pull(address, header.shard, header.index, header.fragment_bytes)
                found[header.index] = pull
    return [[found[index] for index in sorted(found)[:K]]]


def memcpy_s(source: np.ndarray, target: np.ndarray) -> float:
    """Return the seconds of one call."""
    started_s = time.perf_counter()
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)
    return time.perf_counter() - started_s


def prove_and_copy_s(source: np.ndarray, target: np.ndarray, codec: Codec) -> float:
    """Return the seconds to check CRC32Cs of the source, as of a shard, and then copy it."""
    pieces = dict(enumerate(source.reshape(K, -1)))
    block_bytes = block_bytes_for(source.nbytes)
    table = codec.rebuild(pieces, {}, block_bytes)
    started_s = time.perf_counter()
    assert not codec.verify(pieces, table, block_bytes, threads=COPY_THREADS)
    copy_bytes(source, target, threads=COPY_THREADS)
    return time.perf_counter() - started_s


def least_requests_s(cluster: LocalCluster) -> float:
    """Return the seconds to ask every agent for its name and version, all at once."""
    agents = [cluster.client(node) for node in cluster.nodes]
    started_s = time.perf_counter()
    with ThreadPoolExecutor(len(agents)) as pool:
        list(pool.map(AgentClient.node, agents))
    return time.perf_counter() - started_s


def protect(
    cluster: LocalCluster, home: str, step: int, state: Mapping[str, object], pullers: Pullers
) -> Seconds:
    """Measure one save, and the plain pulls of as many bytes."""
    with checkpointer(cluster, home) as ckpt:
        ckpt.restore(state)
        for each in range(2):  # the second save finds every slot made and mapped
            await_calm()
            handle = ckpt.save(step + each, state, patience_s=120)
            handle.wait(120)
        if handle.held != HOLDERS:
            raise RuntimeError(f"{handle.held} of {HOLDERS} fragments held: {handle.problems}")
    fragments, copies = plain_pulls(cluster, home)
    return {
        "protect": handle.protected_s,
        "encode": handle.encode_s,
        "pull fragments": pullers.seconds(fragments),
        "pull copies": pullers.seconds(copies),
    }


def restore(
    cluster: LocalCluster,
    node: str,
    state: Mapping[str, object],
    source: str,
    *,
    assign: bool = False,
) -> float:
    """Return the seconds of ``restore()`` alone, in a new Checkpointer."""
    with checkpointer(cluster, node) as ckpt:
        restored = ckpt.restore(state, resume="required", assign=assign)
        assert restored is not None
        restored.reprotection.wait(120)
    if restored.source != source:
        raise RuntimeError(f"restored from {restored.source}, not from {source}")
    return restored.seconds


def assigned(cluster: LocalCluster, node: str, state: State) -> Seconds:
    """Measure a restore without copies, and the first writes, which then copy."""
    other = {
        kind: {name: tensor.clone() for name, tensor in each.items()}
        for kind, each in state.items()
    }
    restore_s = restore(cluster, node, other, "home", assign=True)
    started_s = time.perf_counter()
    for each in other.values():
        for tensor in each.values():
            tensor.neg_()
    write_s = time.perf_counter() - started_s
    return {"restore, process died, assigned": restore_s, "first write to all of it": write_s}


def lose(cluster: LocalCluster, home: str, count: int) -> str:
    """Replace the home and the nodes after it by empty ones; return the new home's name."""
    at = cluster.nodes.index(home)
    victims = [cluster.nodes[(at + each) % NODES] for each in range(count)]
    cluster.kill(*victims)
    return cluster.replace(*victims)[0]


def measure(rounds: int, state_bytes: int, engine: str) -> dict[str, list[float]]:
    """Return the seconds of every case, by round."""
    state = gpt_state(state_bytes)
    expected = {kind: {n: t.clone() for n, t in each.items()} for kind, each in state.items()}
    source, target = np.ones(state_bytes, np.uint8), np.ones(state_bytes, np.uint8)
    room_bytes = state_bytes + (1 << 20)
    found: dict[str, list[float]] = defaultdict(list)
    with (
        LocalCluster(nodes=NODES, engine=engine) as cluster,
        Pullers(HOLDERS, room_bytes=room_bytes) as pullers,
    ):
        home = cluster.nodes[0]
        for turn in range(rounds + 1):
            seconds = protect(cluster, home, 2 * turn, state, pullers)
            await_calm()  # no process that died starts again within a second
            seconds["restore, process died"] = restore(cluster, home, state, "home")
            seconds |= assigned(cluster, home, state)
            seconds["memcpy"] = min(memcpy_s(source, target) for _ in range(3))
            seconds["prove and copy"] = min(
                prove_and_copy_s(source, target, Codec(K, M)) for _ in range(3)
            )
            seconds["ask who they are"] = least_requests_s(cluster)
            home = lose(cluster, home, COPIES)
            await_calm()
            seconds["pull shard"] = pullers.seconds(plain_restore(cluster))
            seconds["pull shard, fresh memory"] = pullers.seconds(
                plain_restore(cluster), fresh=True
            )
            await_calm()
            seconds["restore, 3 nodes lost"] = restore(cluster, home, state, "peers")
            for kind, each in expected.items():
                assert all(torch.equal(state[kind][name], tensor) for name, tensor in each.items())
            for name, value in seconds.items() if turn else ():  # the first round warms up
                found[name].append(value)
    return found


GOALS = (
    ("protect", "pull fragments", 1.3),
    ("protect", "pull copies", None),
    ("restore, process died", "memcpy", 1.2),
    ("restore, process died", "prove and copy", None),
    ("restore, process died, assigned", "memcpy", None),
    ("first write to all of it", "memcpy", None),
    ("restore, 3 nodes lost", "pull shard", 1.25),
    ("restore, 3 nodes lost", "pull shard, fresh memory", None),
)


def ratios(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return medians over the rounds."""
    return {
        f"{case} / {base}": statistics.median(
            a / b for a, b in zip(found[case], found[base], strict=True)
        )
        for case, base, _ in GOALS
    }


def main() -> None:
    """Print medians, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=STATE_BYTES >> 20)
    parser.add_argument("--engine", default=Codec(K, M).engine, help="engine of the agents' codec")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.rounds, arguments.mib << 20, arguments.engine)
    row: dict[str, float | str] = {name: statistics.median(each) for name, each in found.items()}
    for name, seconds in row.items():
        print(f"{name:42} {1000 * seconds:9.1f} ms")
    times = ratios(found)
    for (case, base, most), value in zip(GOALS, times.values(), strict=True):
        verdict = "" if most is None else f"at most {most}{'  missed' if value > most else ''}"
        print(f"{f'{case} / {base}':42} {value:9.2f}    {verdict}")
    print(json.dumps({"mib": arguments.mib, "engine": arguments.engine, **row, **times}))


if __name__ == "__main__":
    main()
