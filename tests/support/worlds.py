"""Several ranks in one process: threads that meet over a real torch store."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ecckpt
from ecckpt.client.effects import until
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.verbs import Verb
from ecckpt.testing.local_cluster import LocalCluster


class World:
    """One start of a run: a Checkpointer for every rank, rank r at home on nodes[r]."""

    def __init__(self, cluster: LocalCluster, ranks: int | None = None, **options: Any) -> None:
        self.ranks = ranks or len(cluster.nodes)
        self._store = dist.HashStore()
        self._pool = ThreadPoolExecutor(self.ranks)
        nodes = cluster.nodes

        def build(rank: int) -> ecckpt.Checkpointer:
            return ecckpt.Checkpointer(
                root=cluster.root(nodes[rank % len(nodes)]),
                store=self._store,
                rank=rank,
                world_size=self.ranks,
                **{"run": "test", "restore_timeout_s": 30.0, "save_timeout_s": 30.0} | options,
            )

        self.checkpointers = self.each(build)

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        """Do something as every rank at once; the first error is raised."""
        return [
            future.result() for future in [self._pool.submit(act, r) for r in range(self.ranks)]
        ]

    def restore(self, states: list[dict[str, Any]], **options: Any) -> list[Any]:
        return self.each(lambda rank: self.checkpointers[rank].restore(states[rank], **options))

    def save(
        self, step: int, states: list[dict[str, Any]], *, patience_s: float = 30.0
    ) -> list[ecckpt.SaveHandle]:
        """Back to back, unlike in training: a test waits for what is not yet through."""
        return self.each(
            lambda rank: self.checkpointers[rank].save(step, states[rank], patience_s=patience_s)
        )

    def await_slots(self) -> None:
        """Wait until a slot for the next save is there: no rank asks its agent for anything."""
        for checkpointer in self.checkpointers:
            reserver = checkpointer._session.saver.reserver
            assert checkpointer._performer.run(until(lambda each=reserver: each.is_idle, 10))

    def close(self) -> None:
        for checkpointer in self.checkpointers:
            checkpointer.close()
        self._pool.shutdown()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def states_for(ranks: int, *, seed: int, elements: int = 20_000) -> list[dict[str, Any]]:
    """A different small state per rank, deterministic."""
    states = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        weights = torch.randn(elements + 17 * rank, generator=generator)
        states.append({"weights": weights, "progress": {"step": seed, "rank": rank}})
    return states


def same_state(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return torch.equal(left["weights"], right["weights"]) and left["progress"] == right["progress"]


@contextmanager
def stopped(cluster: LocalCluster, *nodes: str) -> Iterator[None]:
    """Agents that hang (SIGSTOP) and go on after that."""
    pids = [cluster.client(node).node().pid for node in nodes]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def instead_of(
    monkeypatch: pytest.MonkeyPatch,
    verb: Verb[Any, Any],
    act: Callable[[AgentClient, Any, Callable[[], Any]], Any],
) -> None:
    """Whenever an agent is asked for this, do something else; it is given the real call."""
    call = AgentClient.call

    def other(client: AgentClient, asked: Verb[Any, Any], message: Any, **options: Any) -> Any:
        def real() -> Any:
            return call(client, asked, message, **options)

        return act(client, message, real) if asked is verb else real()

    monkeypatch.setattr(AgentClient, "call", other)
