"""From memory to the disks of all nodes: what rank 0 asks, decides and tells, behind the saves.

One generation at a time. Every agent is asked to write what it has of it, and asked again how far
it is. When every shard is on enough disks, the agents are told so, and with that which older
generations may go. What cannot be finished is given up and named; the generation before it, and
the copy in memory, are as they were. Nobody waits for this thread but ``close``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ecckpt import wire
from ecckpt.client import AgentClient
from ecckpt.errors import EcckptError, Fenced
from ecckpt.generation import Generation
from ecckpt.lineage import RollBack
from ecckpt.recovery import OnDisk
from ecckpt.retention import Keep, ranks_short

_log = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 2.0
_MISSES = 3
_ROUND_LEAST_S, _ROUND_MOST_S = 0.05, 1.0
# Once enough is there, slower disks get a few times what the others took.
_GRACE_LEAST_S = 5.0
_GRACE_FACTOR = 3.0
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Disks:
    """What is asked of the disks: every nth committed save (0: none), kept how, on how many.

    ``least`` is how many fragments of a shard have to be on disk, 0 for its home copy.
    """

    every: int
    keep: Keep
    budget_bytes: int
    ranks: int
    least: int


@dataclass(eq=False, slots=True)
class _Round:
    """One generation on its way to disk: what each node answered last."""

    generation: Generation
    started_s: float
    answers: dict[str, wire.Stored] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    moved_s: float = 0.0
    enough_s: float | None = None

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Everything that is on some disk."""
        return [
            (piece.rank, piece.index) for each in self.answers.values() for piece in each.pieces
        ]

    @property
    def disks(self) -> int:
        """How many nodes have one."""
        return sum(each.disk for each in self.answers.values())

    def unfinished(self, nodes: Iterable[str]) -> list[str]:
        """Nodes that may still have something to say."""
        return [
            node
            for node in nodes
            if self.misses.get(node, 0) < _MISSES
            and (node not in self.answers or self.answers[node].waiting_bytes)
        ]


class Storer:
    """Rank 0's thread. ``peers`` are all agents by node; its ``close`` waits for what is begun."""

    def __init__(self, run: str, peers: Mapping[str, AgentClient], disks: Disks) -> None:
        self._run = run
        self._peers = {
            node: replace(peer, timeout_s=_ASK_TIMEOUT_S) for node, peer in peers.items()
        }
        self._disks = disks
        self._changed = threading.Condition()
        self._due: Generation | None = None
        self._count = 0
        self._skipped = 0
        self._deadline_s: float | None = None
        self._none = False
        self._timeline = 0
        self._on_disk = OnDisk()
        self._untold = False
        self._roll_backs: tuple[RollBack, ...] = ()
        self._given_up: list[Generation] = []
        self._thread: threading.Thread | None = None

    def begin(self, timeline: int, there: OnDisk, roll_backs: tuple[RollBack, ...]) -> None:
        """A timeline begins: what is on disk from before, and what was left on purpose."""
        with self._changed:
            self._timeline, self._on_disk, self._roll_backs = timeline, there, roll_backs
            # Agents may not know of all that is there, and protect what they know of.
            self._untold = bool(there.told or there.seen)
            self._due, self._count = None, 0
            self._given_up.clear()
            self._changed.notify_all()
        if self._thread is None and self._disks.every:
            # Now: a program that is ending can start no threads.
            self._thread = threading.Thread(target=self._work, name="ecckpt-store", daemon=True)
            self._thread.start()

    def committed(self, generation: Generation) -> None:
        """A save is committed: it may be its turn. Returns at once."""
        with self._changed:
            if not self._disks.every or self._none:
                return
            self._count += 1
            if self._due is None and (self._count - 1) % self._disks.every:
                return
            # The newest takes the place of one that waits until the disks are done.
            self._skipped += self._due is not None
            self._due = generation
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Wait for what is begun or due, at most that long, and end the thread."""
        with self._changed:
            self._deadline_s = time.monotonic() + timeout_s
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        while (generation := self._next()) is not None:
            try:
                if self._untold:
                    self._tell()
                self._store(generation)
            except Fenced as error:
                _log.warning("%s is not stored: %s", generation, error)
            except Exception:
                _log.exception("storing %s failed", generation)

    def _next(self) -> Generation | None:
        with self._changed:
            while self._due is None and self._deadline_s is None:
                self._changed.wait()
            generation, self._due = self._due, None
            skipped, self._skipped = self._skipped, 0
        if skipped:
            _log.warning("disks are slower than saves: %d generations were not stored", skipped)
        return generation

    def _store(self, generation: Generation) -> None:
        now_s = time.monotonic()
        going = _Round(generation, now_s, moved_s=now_s)
        while True:
            moved = self._ask(going)
            if not going.unfinished(self._peers) and not going.disks:
                if len(going.answers) == len(self._peers):
                    self._none = True
                    asked = self._disks.keep != Keep()
                    level = logging.WARNING if asked else logging.INFO
                    _log.log(level, "no agent has a disk: nothing is stored, or kept there")
                return
            short = ranks_short(going.pieces, ranks=self._disks.ranks, least=self._disks.least)
            if self._is_over(going, short=bool(short), moved=moved):
                break
            self._pause(min(_ROUND_MOST_S, max(_ROUND_LEAST_S, 0.2 * _since(going.started_s))))
        self._report(going, short)
        if short:
            self._given_up.append(generation)
        else:
            self._retain(generation)

    def _ask(self, going: _Round) -> bool:
        """One question to every node that is not finished; whether anything changed."""
        message = wire.Store(
            self._run, going.generation, self._disks.budget_bytes, tuple(self._given_up)
        )
        moved = False
        for node in going.unfinished(self._peers):
            try:
                answer = self._peers[node].store(message)
            except Fenced:
                raise
            except (EcckptError, OSError) as error:
                going.misses[node] = going.misses.get(node, 0) + 1
                going.problems[node] = str(error)
                continue
            moved |= answer != going.answers.get(node)
            going.answers[node] = answer
            going.misses.pop(node, None)
            going.problems.pop(node, None)
        return moved

    def _is_over(self, going: _Round, *, short: bool, moved: bool) -> bool:
        now_s = time.monotonic()
        if moved:
            going.moved_s = now_s
        if not going.unfinished(self._peers):
            return True
        if self._deadline_s is not None and now_s > self._deadline_s:
            return True
        if short:
            return now_s - going.moved_s > _PATIENCE_S
        going.enough_s = going.enough_s or now_s
        took_s = going.enough_s - going.started_s
        return now_s - going.enough_s > max(_GRACE_LEAST_S, _GRACE_FACTOR * took_s)

    def _pause(self, wait_s: float) -> None:
        with self._changed:
            if self._deadline_s is None:
                self._changed.wait(wait_s)
        if self._deadline_s is not None:
            time.sleep(_ROUND_LEAST_S)

    def _report(self, going: _Round, short: tuple[int, ...]) -> None:
        problems = [
            f"{node}: {'; '.join(each.problems[:2])}"
            for node, each in going.answers.items()
            if each.problems
        ]
        problems += [f"{node}: {why}" for node, why in going.problems.items()]
        problems += [
            f"{node}: has no disk" for node, each in going.answers.items() if not each.disk
        ]
        late = [node for node in going.unfinished(self._peers) if node in going.answers]
        problems += [f"{node}: not finished" for node in late]
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        text = "; ".join(problems[:4]) + more
        if short:
            _log.warning(
                "generation %s could not be stored: rank %d%s not on enough disks: %s",
                going.generation,
                short[0],
                f" and {len(short) - 1} more are" if len(short) > 1 else " is",
                text or "memory was needed for newer saves",
            )
        elif problems:
            _log.warning("generation %s is stored with less than all: %s", going.generation, text)

    def _retain(self, generation: Generation) -> None:
        with self._changed:
            # Twice: what cannot be had now takes no place of what can, and is not dropped for that.
            self._on_disk = OnDisk(
                self._kept((*self._on_disk.told, generation)),
                self._kept((*self._on_disk.seen, generation)),
            )
            self._given_up.clear()  # older than what is stored now: they go with it
        self._tell()

    def _kept(self, stored: tuple[Generation, ...]) -> tuple[Generation, ...]:
        return self._disks.keep.of(stored, self._roll_backs)

    def _tell(self) -> None:
        with self._changed:
            stored = sorted({*self._on_disk.told, *self._on_disk.seen})
            message = wire.Retain(self._run, self._timeline, tuple(stored))
            self._untold = False
        for node, peer in self._peers.items():
            try:
                peer.retain(message)
            except Fenced:
                raise
            except (EcckptError, OSError) as error:
                _log.warning("could not tell %s what is stored: %s", node, error)


def _since(started_s: float) -> float:
    return time.monotonic() - started_s
