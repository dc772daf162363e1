"""Repair while training runs: the home makes lost fragments again, one shard after another.

    every HEALTH_ROUND_S: probe the holders --> who is lost, who has what (health.py)
                                |
           a fragment is on no answering node, and none is about to hold it
                                v
    no repair, no save, guard in force --> repair the first such shard: a ``Job`` (protect.py)
                ^                               |
                |                               +-- all targets hold: forget earlier failures
                +-- next shard, or after a pause +-- some do not: retry after 4, 8, ... 64 s

The repaired fragment goes to its regular holder if that node answers, else to a spare node of the
group (policy/placement.py).

A repair gives way to saves: none begins while a save is under way here, and a save that begins
cancels it. It takes no memory that saves may need, and nothing is dropped for it. While a restart
is under way (the fence is above the timeline that sent the guard) nothing is repaired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ecckpt.agent import deadlines
from ecckpt.agent.core.actions import Action, AskPeer, Reply, Wake, Warn
from ecckpt.agent.core.health import GroupHealth
from ecckpt.agent.core.protect import Protector
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.tasks import Job
from ecckpt.agent.records.entry import Entry
from ecckpt.agent.records.run_record import RunRecord
from ecckpt.errors import InvalidMessage
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.placement import plan_repair
from ecckpt.policy.sizing import parity_region_bytes, steady_bytes
from ecckpt.policy.survival import margin_of
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.repair import Guard, Presence, Probe
from ecckpt.protocol.messages.save import Protect, Target

_MEMBERS_LIMIT = 2 * 256  # a group has fewer than 2 (n + 1) nodes; the notes keep it


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardStatus:
    """How safe the newest guarded generation of this node's ranks is now.

    Attributes:
        margin: how many more nodes may be lost, whichever they are; None while that is not known.
        missing: number of fragments on no answering node.
        lost: nodes that do not answer.
        repairing: the shard whose repair is under way.
        repaired: fragments made again since the agent started.
        problem: what went wrong in the last repair, or prevents the next.
    """

    generation: Generation
    margin: int | None
    missing: int
    lost: tuple[str, ...]
    repairing: ShardId | None
    repaired: int
    problem: str


@dataclass(slots=True)
class _Retry:
    """Repairs of one shard that left fragments missing, and when the next may begin."""

    tries: int = 0
    again_s: float = 0.0


class Repairer:
    """The guards of all runs on this node, and the one repair that may be under way."""

    def __init__(self, records: RunRecords, protector: Protector, *, budget_bytes: int) -> None:
        self._records = records
        self._protector = protector
        self._budget_bytes = budget_bytes
        self._health: dict[str, GroupHealth] = {}
        self._repair: Job | None = None
        self._retries: dict[ShardId, _Retry] = {}
        self._repaired: dict[str, int] = {}
        self._problems: dict[str, str] = {}

    # -- events -----------------------------------------------------------------------------------

    def start(self, message: Guard, now_s: float) -> list[Action]:
        """Watch a run's home copies from now on, as the guard says."""
        if not 0 <= message.holders <= len(message.members) <= _MEMBERS_LIMIT:
            raise InvalidMessage(f"{message.holders} holders of {len(message.members)} members")
        record = self._records.get_or_create(message.run)
        newer = record.admit(message.writer)
        record.guard = message
        return [
            *(self._records.clear(message.run) if newer else ()),
            *(self._records.write_notes(record, message) or [Reply(Done())]),
            *self._start_watching(message.run, now_s),
        ]

    def resume(self, now_s: float) -> list[Action]:
        """After a start of the agent: go on with the guards in the adopted notes."""
        runs = [
            run
            for run in self._records.runs()
            if self._records.get_or_create(run).guard is not None
        ]
        return [action for run in runs for action in self._start_watching(run, now_s)]

    def due(self, health: GroupHealth, now_s: float) -> list[Action]:
        """Begin a round: probe the peers, and repair what is known to be missing."""
        wake = Wake(now_s + deadlines.HEALTH_ROUND_S, health)
        record = self._records.get(health.run)
        if not self._in_force(record):
            return [wake]
        shards = self._align(health, record, now_s)
        if not shards:
            return [wake]
        probe = Probe(health.run, shards)
        asks = [AskPeer(health, peer, probe, now_s) for peer in health.to_ask(now_s)]
        return [wake, *asks, *self._repair_next(health, now_s)]

    def answered(self, ask: AskPeer, seen: Presence, now_s: float) -> list[Action]:
        """A peer has answered a probe."""
        return self._after_probe(
            ask, ask.health.answered(ask.sight, ask.message, seen, ask.at_s), now_s
        )

    def missed(self, ask: AskPeer, now_s: float) -> list[Action]:
        """A peer has not answered a probe."""
        return self._after_probe(ask, ask.health.missed(ask.sight, now_s), now_s)

    def review(self, now_s: float) -> list[Action]:
        """If the repair has ended, note the outcome and begin with the next shard."""
        job = self._repair
        if job is None or not job.ended:
            return []
        self._repair = None
        run, shard = job.message.shard.run, job.message.shard
        self._repaired[run] = self._repaired.get(run, 0) + len(job.held)
        self._problems[run] = "; ".join(job.problems[:4])
        if len(job.held) == len(job.message.targets):
            self._retries.pop(shard, None)
        else:
            retry = self._retries.setdefault(shard, _Retry())
            retry.again_s = now_s + min(
                deadlines.REPAIR_RETRY_LIMIT_S, deadlines.REPAIR_RETRY_S * 2**retry.tries
            )
            retry.tries += 1
        return [
            action
            for health in self._health.values()
            for action in self._repair_next(health, now_s)
        ]

    def guard_status(self, run: str) -> GuardStatus | None:
        """How safe the run's guarded generation is; None if none is guarded."""
        record, health = self._records.get(run), self._health.get(run)
        guarded = record.guarded()
        if record.guard is None or health is None or not guarded:
            return None
        generation = guarded[0].header.shard.generation
        margins: list[int | None] = []
        missing = 0
        for entry in guarded:
            if entry.header.shard.generation == generation:
                margin, lacking = self._state_of(health, entry.header, record.guard.holders)
                margins.append(margin)
                missing += lacking
        known = [margin for margin in margins if margin is not None]
        repairing = self._repair.message.shard if self._repair else None
        return GuardStatus(
            generation=generation,
            margin=min(known) if len(known) == len(margins) else None,
            missing=missing,
            lost=tuple(health.lost()),
            repairing=repairing if repairing and repairing.run == run else None,
            repaired=self._repaired.get(run, 0),
            problem=self._problems.get(run, ""),
        )

    # -- decisions --------------------------------------------------------------------------------

    def _start_watching(self, run: str, now_s: float) -> list[Action]:
        if run in self._health:
            return []
        self._health[run] = GroupHealth(run, self._records.node)
        # The first round comes later: after a start or a commit there is more urgent work.
        return [Wake(now_s + deadlines.HEALTH_ROUND_S, self._health[run])]

    def _in_force(self, record: RunRecord) -> bool:
        """Whether the guard's sender is the newest timeline: no restart is under way."""
        return record.guard is not None and not record.is_fenced(record.guard.writer)

    def _align(self, health: GroupHealth, record: RunRecord, now_s: float) -> tuple[ShardId, ...]:
        assert record.guard is not None
        pieces = {entry.header.shard: entry.header.n for entry in record.guarded()}
        told = [each for each in (record.committed, record.restored) if each is not None]
        health.align(record.guard, pieces, max(told, default=None), now_s)
        shards = tuple(pieces)
        gone = [shard for shard in self._retries if shard.run == health.run and shard not in shards]
        for shard in gone:
            del self._retries[shard]
        return shards

    def _after_probe(self, ask: AskPeer, news: str, now_s: float) -> list[Action]:
        warned = [Warn(f"run {ask.health.run}: {news}")] if news else []
        return [*warned, *self._repair_next(ask.health, now_s)]

    def _repair_next(self, health: GroupHealth, now_s: float) -> list[Action]:
        """Begin to repair the first shard with a missing fragment, if a repair may begin."""
        record = self._records.get(health.run)
        if self._repair is not None or self._protector.busy or not self._in_force(record):
            return []
        for entry in record.guarded():
            targets = self._targets(health, record, entry, now_s)
            if targets:
                return self._start_repair(record, entry, targets, now_s)
        return []

    def _targets(
        self, health: GroupHealth, record: RunRecord, entry: Entry, now_s: float
    ) -> list[Target]:
        """Which node shall hold which missing fragment; empty if none is, or it is not known."""
        header, guard = entry.header, record.guard
        assert guard is not None
        shard = header.shard
        retry = self._retries.get(shard)
        if retry is not None and now_s < retry.again_s:
            return []
        indices = header.n if guard.holders else 0
        # Answers from before the end of the last job do not show the fragments that it placed.
        if not health.known(shard, self._protector.ended_s(shard)):
            return []
        pieces = health.pieces(shard)
        present = {
            index: [*pieces.fragments.get(index, ()), *pieces.coming.get(index, ())]
            for index in range(header.n)
        }
        alive = {peer.node: peer for peer in health.peers if not peer.lost}
        plan = plan_repair(
            home=self._records.node,
            indices=indices,
            present=present,
            holders=[peer.node for peer in health.holders],
            # A fragment on a node with a home copy would be lost together with that copy.
            nodes={node: peer.domain for node, peer in alive.items() if node not in pieces.homes},
        )
        if any(index >= header.k for index in plan) and (problem := self._no_room(header, guard)):
            self._problems[health.run] = problem
            # Data fragments need no memory here: they are ranges of the home copy.
            plan = {index: node for index, node in plan.items() if index < header.k}
        return [Target(index, node, alive[node].address) for index, node in plan.items()]

    def _start_repair(
        self, record: RunRecord, entry: Entry, targets: Sequence[Target], now_s: float
    ) -> list[Action]:
        guard, header = record.guard, entry.header
        assert guard is not None
        message = Protect(
            shard=header.shard,
            writer=guard.writer,
            targets=tuple(targets),
            min_fragments=0,
            every_living=False,
            # What a node like this one has left beside its next save; 0 would mean the default.
            memory_bytes=max(1, self._budget_of(guard) - _reserve_bytes(header, guard)),
            timeout_s=guard.timeout_s,
            discard=(),
        )
        self._repair, actions = self._protector.repair(message, now_s)
        where = ", ".join(f"{target.index} to {target.node}" for target in targets)
        return [Warn(f"{header.shard}: repairing fragments: {where}"), *actions]

    def _no_room(self, header: Header, guard: Guard) -> str:
        """Why parity cannot be encoded without memory that saves need; empty if it can."""
        need_bytes = parity_region_bytes(header) + steady_bytes(
            header, local_ranks=guard.local_ranks, holders=guard.holders
        )
        short_bytes = need_bytes - self._budget_of(guard)
        if short_bytes <= 0:
            return ""
        return (
            "parity is missing, but only the next save encodes it again: next to what saves need, "
            f"its region exceeds the budget by {short_bytes:,} bytes (memory_bytes)"
        )

    def _budget_of(self, guard: Guard) -> int:
        return guard.memory_bytes or self._budget_bytes

    def _state_of(
        self, health: GroupHealth, header: Header, holders: int
    ) -> tuple[int | None, int]:
        """Margin (None: not known) and number of missing fragments of a shard."""
        if not holders:
            return 0, 0
        pieces = health.pieces(header.shard)
        missing = sum(index not in pieces.fragments for index in range(header.n))
        if not health.known(header.shard, -math.inf):
            return None, missing
        return margin_of(header.k, pieces.homes, pieces.fragments), missing


def _reserve_bytes(header: Header, guard: Guard) -> int:
    """Memory that the next save takes on a node while the last generation is still kept."""
    fragments_bytes = guard.holders * header.at(0).file_bytes
    return guard.local_ranks * (parity_region_bytes(header) + fragments_bytes)
