"""How a committed generation gets to the disks of all nodes, and what is removed for it.

Rank 0 does it, one generation at a time, in ``Lane.ARCHIVE``, behind the training:

    idle --commit--> due --> asking every agent to write, and how far it is --> enough on disk
                                              |                                     |
                                              +--> given up, named                  +--> agents told

When every shard is on enough disks, the agents are told which generations stay; older ones may go.
A generation that cannot be finished is given up and named; the generation before it, and the copy
in memory, stay as they were. Only ``close()`` waits for this.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ecckpt.client import deadlines
from ecckpt.client.cluster.members import Cluster
from ecckpt.client.effects import CallAgent, Compute, Now, Report, Routine, perform, until
from ecckpt.client.events import Message
from ecckpt.errors import EcckptError, Fenced
from ecckpt.format.ids import Generation
from ecckpt.policy.on_disk import OnDisk
from ecckpt.policy.retention import Keep, ranks_short
from ecckpt.policy.rollbacks import RollBack
from ecckpt.protocol.messages.disk import Retain, Store, Stored
from ecckpt.protocol.verbs import RETAIN, STORE

# Each message to an agent names the failed saves since the last success, so that their files go.
# What an agent missed of older ones goes with the next success.
_GIVEN_UP_LIMIT = 256
_MISSES = 3  # answers in a row that an agent may miss before it is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Disks:
    """What is asked of the disks: every nth committed save (0: none), kept how, on how many.

    ``least`` is how many fragments of a shard have to be on disk, 0 for its home copy.
    """

    every: int
    keep: Keep
    budget_bytes: int
    ranks: int
    least: int


@dataclass(eq=False, slots=True, kw_only=True)
class _Round:
    """One generation on its way to disk: what each node answered last."""

    generation: Generation
    started_s: float
    moved_s: float
    answers: dict[str, Stored] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
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

    def take(self, node: str, answer: Stored) -> bool:
        """A node has answered; whether that is news."""
        moved = answer != self.answers.get(node)
        self.answers[node] = answer
        self.misses.pop(node, None)
        self.problems.pop(node, None)
        return moved

    def miss(self, node: str, why: str) -> None:
        """A node has not."""
        self.misses[node] = self.misses.get(node, 0) + 1
        self.problems[node] = why

    def shortcomings(self, nodes: Iterable[str]) -> str:
        """What is not as it should be, for people."""
        problems = [
            f"{node}: {'; '.join(each.problems[:2])}"
            for node, each in self.answers.items()
            if each.problems
        ]
        problems += [f"{node}: {why}" for node, why in self.problems.items()]
        problems += [f"{node}: has no disk" for node, each in self.answers.items() if not each.disk]
        late = [node for node in self.unfinished(nodes) if node in self.answers]
        problems += [f"{node}: not finished" for node in late]
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        return "; ".join(problems[:4]) + more


class Archivist:
    """What is due, and what is on disk, of all nodes of the run.

    ``deadline_s``, once set, is when all that is begun has to have ended.
    """

    def __init__(self, cluster: Cluster, disks: Disks) -> None:
        self.deadline_s: float | None = None
        self.due: Generation | None = None
        self.is_begun = False  # whether ``run`` has been, or is being, started
        self.is_done = True  # whether ``run`` has ended, or was never started
        self._cluster, self._run, self._disks = cluster, cluster.run, disks
        self._nodes = tuple(cluster.address)
        self._count = 0
        self._skipped = 0
        self._none = False  # no agent has a disk
        self._timeline = 0
        self._on_disk = OnDisk()
        self._untold = False
        self._roll_backs: tuple[RollBack, ...] = ()
        self._given_up: deque[Generation] = deque(maxlen=_GIVEN_UP_LIMIT)

    @property
    def is_wanted(self) -> bool:
        """Whether anything is ever to be stored."""
        return bool(self._disks.every)

    def begin_timeline(
        self, timeline: int, there: OnDisk, roll_backs: tuple[RollBack, ...]
    ) -> None:
        """A timeline begins: what is on disk from before, and what was left on purpose."""
        self.is_begun, self.is_done = True, False
        self._timeline, self._on_disk, self._roll_backs = timeline, there, roll_backs
        # Agents may not know of all that is there, and protect what they know of.
        self._untold = bool(there.told or there.seen)
        self.due, self._count = None, 0
        self._given_up.clear()

    def note_commit(self, generation: Generation) -> None:
        """A save is committed: it may be its turn."""
        if not self._disks.every or self._none:
            return
        self._count += 1
        if self.due is None and (self._count - 1) % self._disks.every:
            return
        # The newest takes the place of one that waits until the disks are done.
        self._skipped += self.due is not None
        self.due = generation

    def run(self) -> Routine[None]:
        """Store what becomes due, until the client closes and nothing is due any more."""
        while True:
            yield from until(lambda: self.due is not None or self._is_closing(), math.inf)
            if self.due is None:
                self.is_done = True
                return
            yield from self._archive()

    def _is_closing(self) -> bool:
        return self.deadline_s is not None

    def _archive(self) -> Routine[None]:
        generation, self.due = self.due, None
        skipped, self._skipped = self._skipped, 0
        if skipped:
            text = f"disks are slower than saves: {skipped} generations were not stored"
            yield from _say(text)
        if generation is None:
            return
        try:
            if self._untold:
                yield from self._tell()
            yield from self._store(generation)
        except Exception as error:  # Fenced: a newer start of the run has begun
            yield from _say(f"{generation} is not stored: {error}")

    def _store(self, generation: Generation) -> Routine[None]:
        now_s = yield from perform(Now())
        going = _Round(generation=generation, started_s=now_s, moved_s=now_s)
        while True:
            moved = yield from self._ask(going)
            if not going.unfinished(self._nodes) and not going.disks:
                yield from self._give_up_disks(going)
                return
            short = yield from perform(Compute(lambda: self._ranks_short(going)))
            now_s = yield from perform(Now())
            if self._is_over(going, now_s, short=bool(short), moved=moved):
                break
            yield from self._pause(now_s - going.started_s)
        yield from self._report(going, short)
        if short:
            self._given_up.append(generation)
        else:
            yield from self._retain(generation)

    def _ranks_short(self, going: _Round) -> tuple[int, ...]:
        return ranks_short(going.pieces, ranks=self._disks.ranks, least=self._disks.least)

    def _pause(self, took_s: float) -> Routine[None]:
        wait_s = min(deadlines.ROUND_MOST_S, max(deadlines.ROUND_LEAST_S, 0.2 * took_s))
        if (yield from until(self._is_closing, wait_s)):
            yield from until(lambda: False, deadlines.ROUND_CLOSING_S)

    def _ask(self, going: _Round) -> Routine[bool]:
        """One question to every node that is not finished; whether anything changed."""
        message = Store(
            self._run, going.generation, self._disks.budget_bytes, tuple(self._given_up)
        )
        moved = False
        for node in going.unfinished(self._nodes):
            asked = CallAgent(STORE, message, node, deadlines.ARCHIVE_S)
            try:
                moved |= going.take(node, (yield from perform(asked)))
            except Fenced:
                raise
            except (EcckptError, OSError) as error:
                going.miss(node, str(error))
        return moved

    def _is_over(self, going: _Round, now_s: float, *, short: bool, moved: bool) -> bool:
        if moved:
            going.moved_s = now_s
        if not going.unfinished(self._nodes):
            return True
        if self.deadline_s is not None and now_s > self.deadline_s:
            return True
        if short:
            return now_s - going.moved_s > deadlines.DISK_PATIENCE_S
        going.enough_s = going.enough_s or now_s
        took_s = going.enough_s - going.started_s
        grace_s = max(deadlines.DISK_GRACE_S, deadlines.DISK_GRACE_FACTOR * took_s)
        return now_s - going.enough_s > grace_s

    def _give_up_disks(self, going: _Round) -> Routine[None]:
        """No agent that answers has a disk: if all have answered, none is asked again."""
        if len(going.answers) == len(self._nodes):
            self._none = True
            text = "no agent has a disk: nothing is stored, or kept there"
            yield from _say(text, wrong=self._disks.keep != Keep())

    def _report(self, going: _Round, short: tuple[int, ...]) -> Routine[None]:
        text = going.shortcomings(self._nodes)
        if short:
            others = f" and {len(short) - 1} more are" if len(short) > 1 else " is"
            yield from _say(
                f"generation {going.generation} could not be stored: rank {short[0]}{others} "
                f"not on enough disks: {text or 'memory was needed for newer saves'}"
            )
        elif text:
            yield from _say(f"generation {going.generation} is stored with less than all: {text}")

    def _retain(self, generation: Generation) -> Routine[None]:
        # Twice: what cannot be had now takes no place of what can, and is not dropped for that.
        self._on_disk = OnDisk(
            self._kept((*self._on_disk.told, generation)),
            self._kept((*self._on_disk.seen, generation)),
        )
        self._given_up.clear()  # older than what is stored now: they go with it
        yield from self._tell()

    def _kept(self, stored: tuple[Generation, ...]) -> tuple[Generation, ...]:
        return self._disks.keep.kept_of(stored, self._roll_backs)

    def _tell(self) -> Routine[None]:
        stored = sorted({*self._on_disk.told, *self._on_disk.seen})
        message = Retain(self._run, self._cluster.writer(self._timeline), tuple(stored))
        self._untold = False
        for node in self._nodes:
            try:
                yield from perform(CallAgent(RETAIN, message, node, deadlines.ARCHIVE_S))
            except Fenced:
                raise
            except (EcckptError, OSError) as error:
                yield from _say(f"could not tell {node} what is stored: {error}")


def _say(text: str, *, wrong: bool = True) -> Routine[None]:
    level = logging.WARNING if wrong else logging.INFO
    yield from perform(Report(Message(level, text)))
