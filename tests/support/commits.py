"""A save of a few ranks, each with its commit protocol, agent and handle, in one store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ecckpt.client.cluster.members import Cluster
from ecckpt.client.config import ClusterConfig
from ecckpt.client.effects import Routine, call_own
from ecckpt.client.handles import SaveHandle
from ecckpt.client.save.commit_protocol import CommitProtocol, StagedSave
from ecckpt.client.save.staging import Deadline
from ecckpt.errors import EcckptError, SaveFailed
from ecckpt.format.ids import ShardId
from ecckpt.policy.placement import Node, parse_code, plan_placement
from ecckpt.policy.retention import Keep
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.save import Commit, Progress, Protect
from ecckpt.protocol.verbs import COMMIT, PROTECT, WATCH
from tests.support.builders import SESSION, generation
from tests.support.performers import Clock, Performer, Running, Store

GEN = generation()


def cluster_of(
    rank: int = 0, ranks: int = 1, *, nodes: Sequence[str] = (), code: Any = "auto", **fields: Any
) -> Cluster:
    """As rank ``rank`` sees it: rank r is at home on the r-th node."""
    nodes = nodes or [f"n{at}" for at in range(ranks)]
    homes = tuple(nodes[at] for at in range(ranks))
    return Cluster(
        run="test",
        session=SESSION,
        rank=rank,
        ranks=ranks,
        home=homes[rank],
        homes=homes if rank == 0 else (),
        address={node: f"{node}:1" for node in nodes},
        placement=plan_placement(
            [Node(each, each) for each in nodes], parse_code(code, len(nodes))
        ),
        **{
            "local_ranks": 1,
            "share": tuple(nodes[ranks:][rank::ranks]),
            "memory_bytes": 0,
            "started_s": 1000.0,
        }
        | fields,
    )


def begun(message: Protect | None = None) -> Routine[None]:
    """A save begins: its agent is asked to protect the shard."""
    yield from call_own(PROTECT, message, 10.0)


class Commits:
    """One save after another of all ranks; ``state`` is how far each rank's shard is."""

    def __init__(self, ranks: int, *, timeout_s: float = 10.0, counted: bool = True, idle: int = 0):
        nodes = [f"n{at}" for at in range(ranks + idle)]
        self.clusters = [cluster_of(rank, ranks, nodes=nodes) for rank in range(ranks)]
        self.store, clock = Store(), Clock()
        self.performers = [Performer(self.store, clock) for _ in range(ranks)]
        self.protocols = [CommitProtocol(cluster) for cluster in self.clusters]
        self.state = ["encoding"] * ranks
        self.problems: tuple[str, ...] = ()
        self.refuse: dict[str, EcckptError] = {}  # by node: what it answers to a commit
        self.told: list[tuple[str, Any]] = []
        self.timeout_s, self.counted = timeout_s, counted
        self.handles: dict[int, SaveHandle] = {}
        self.ended: list[tuple[int, EcckptError | None]] = []
        for rank, performer in enumerate(self.performers):
            performer.gates[WATCH] = self._has_news(rank)
            performer.answers[WATCH] = self._progress(rank)
            performer.answers[COMMIT] = self._commit(rank)

    def follow(
        self,
        rank: int,
        gen: Any = GEN,
        *,
        timeout_s: float | None = None,
        begin: Callable[[], Routine[None]] = begun,
        check: Any = None,
    ) -> Running:
        save = self.staged(rank, gen, timeout_s=timeout_s, begin=begin, check=check)
        return self.performers[rank].begin(self.protocols[rank].see_through(save))

    def follow_all(self, gen: Any = GEN) -> list[Running]:
        return [self.follow(rank, gen) for rank in range(len(self.protocols))]

    def abandon(self, rank: int, gen: Any = GEN) -> Running:
        handle = self._handle(rank, gen)
        handle.finish(SaveFailed("no snapshot"), 0.0)
        deadline = self._deadline(rank, gen, self.timeout_s)
        return self.performers[rank].begin(self.protocols[rank].abandon(handle, deadline))

    def staged(
        self,
        rank: int,
        gen: Any = GEN,
        *,
        timeout_s: float | None = None,
        begin: Callable[[], Routine[None]] = begun,
        check: Any = None,
    ) -> StagedSave:
        def ended(error: EcckptError | None) -> Routine[None]:
            self.ended.append((rank, error))
            yield from ()

        return StagedSave(
            handle=self._handle(rank, gen),
            deadline=self._deadline(rank, gen, self.timeout_s if timeout_s is None else timeout_s),
            begin=begin,
            check=check,
            ended=ended,
            counted=self.counted,
        )

    @property
    def count(self) -> int:
        return self.store.counters.get(f"count/{GEN}", 0)

    def all_done(self) -> bool:
        return all(handle.done for handle in self.handles.values())

    def all_left(self) -> bool:
        return all(handle.left for handle in self.handles.values())

    def outcomes(self) -> list[type | None]:
        errors = [self.handles[rank].error for rank in sorted(self.handles)]
        return [type(error) if error else None for error in errors]

    def told_nodes(self) -> list[str]:
        return [node for node, _ in self.told]

    def _handle(self, rank: int, gen: Any) -> SaveHandle:
        self.handles[rank] = SaveHandle(gen, gen.step)
        return self.handles[rank]

    def _deadline(self, rank: int, gen: Any, timeout_s: float) -> Deadline:
        return Deadline(ShardId("test", gen, rank), self.performers[rank].now_s + timeout_s)

    def _has_news(self, rank: int) -> Callable[[Any], bool]:
        return lambda effect: self.state[rank] != effect.message.known_state

    def _progress(self, rank: int) -> Callable[[Any], Progress]:
        return lambda effect: Progress(
            state=self.state[rank], held=5, problems=self.problems, encode_s=0.5, protected_s=0.75
        )

    def _commit(self, rank: int) -> Callable[[Any], Any]:
        def commit(effect: Any) -> Any:
            node = effect.node or self.clusters[rank].home
            if node in self.refuse:
                return self.refuse[node]
            assert effect.message == Commit("test", effect.message.generation)
            self.told.append((node, effect.message.generation))
            return Done()

        return commit


def config_of(**fields: Any) -> ClusterConfig:
    return ClusterConfig(
        **{
            "run": "test",
            "code": (2, 1),
            "min_margin": 0,
            "every_steps": 1,
            "save_timeout_s": 20.0,
            "restore_timeout_s": 30.0,
            "disk_every": 1,
            "keep": Keep(),
        }
        | fields
    )
