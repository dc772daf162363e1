"""Repair while training runs: whoever holds too little gets it again, one shard after another.

    every 2 s: ask the holders -> who is lost, who has what (vigil.py)
    a fragment is nowhere      -> re-make it from the home copy: for its holder, or for a spare node

A repair gives way: none begins while a save is under way here, and a save that begins ends it. It
takes no memory that saves may need, and nothing is dropped for it. While a restart is under way
(the fence is newer than whoever asked for the guard) nothing is repaired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ecckpt.agent.core.actions import Action, AskPeer, Job, Reply, Wake, Warn
from ecckpt.agent.core.health import ROUND_S, Vigil
from ecckpt.agent.core.protect import Protector
from ecckpt.agent.core.run_record import Entry, RunRecord
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.sizing import parity_region_bytes, steady_bytes
from ecckpt.errors import InvalidMessage
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.placement import plan_repair
from ecckpt.policy.survival import margin_of
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.repair import Guard, Presence, Probe
from ecckpt.protocol.messages.save import Protect, Target

_MEMBERS_LIMIT = 2 * 256  # a group has fewer than 2 (n + 1) nodes, and is noted
_RETRY_S = 4.0  # after a repair that did not get everything done; twice as long each time
_RETRY_LIMIT_S = 64.0


@dataclass(frozen=True, slots=True)
class Watched:
    """How safe the newest guarded generation of this node's ranks is, as its holders are now.

    ``margin`` is how many more nodes may be lost, whichever they are; None while that is not known.
    ``missing`` fragments are held by no living node, ``lost`` are the nodes that do not answer,
    ``repairing`` is the shard that is being worked on, ``repaired`` counts fragments made again.
    """

    generation: Generation
    margin: int | None
    missing: int
    lost: tuple[str, ...]
    repairing: ShardId | None
    repaired: int
    problem: str


@dataclass(slots=True)
class _Trial:
    """Repairs of one shard that did not get everything done, and when the next may begin."""

    tries: int = 0
    again_s: float = 0.0


class Guardian:
    """All guards of this node, and the one repair that may be under way."""

    def __init__(self, ledgers: RunRecords, protector: Protector, *, budget_bytes: int) -> None:
        self._ledgers = ledgers
        self._protector = protector
        self._budget_bytes = budget_bytes
        self._vigils: dict[str, Vigil] = {}
        self._repair: Job | None = None
        self._trials: dict[ShardId, _Trial] = {}
        self._repaired: dict[str, int] = {}
        self._problems: dict[str, str] = {}

    # -- events -----------------------------------------------------------------------------------

    def start(self, message: Guard, now_s: float) -> list[Action]:
        """Watch a run's home copies from now on."""
        if not 0 <= message.holders <= len(message.members) <= _MEMBERS_LIMIT:
            raise InvalidMessage(f"{message.holders} holders of {len(message.members)} members")
        ledger = self._ledgers.of(message.run)
        newer = ledger.admit(message.writer)
        ledger.guard = message
        return [
            *(self._ledgers.clear(message.run) if newer else ()),
            *(self._ledgers.note(ledger, message) or [Reply(Done())]),
            *self._begin(message.run, now_s),
        ]

    def resume(self, now_s: float) -> list[Action]:
        """Watch what an earlier process of this agent watched."""
        runs = [run for run in self._ledgers.runs() if self._ledgers.of(run).guard is not None]
        return [action for run in runs for action in self._begin(run, now_s)]

    def due(self, vigil: Vigil, now_s: float) -> list[Action]:
        """A round begins."""
        wake = Wake(now_s + ROUND_S, vigil)
        ledger = self._ledgers.look(vigil.run)
        if not self._in_force(ledger):
            return [wake]
        shards = self._align(vigil, ledger, now_s)
        if not shards:
            return [wake]
        probe = Probe(vigil.run, shards)
        asks = [AskPeer(vigil, sight, probe, now_s) for sight in vigil.to_ask(now_s)]
        return [wake, *asks, *self._mend(vigil, now_s)]

    def answered(self, ask: AskPeer, seen: Presence, now_s: float) -> list[Action]:
        """A node has said what it has."""
        return self._heard(ask, ask.vigil.answered(ask.sight, ask.message, seen, ask.at_s), now_s)

    def missed(self, ask: AskPeer, now_s: float) -> list[Action]:
        """A node has not answered."""
        return self._heard(ask, ask.vigil.missed(ask.sight, now_s), now_s)

    def review(self, now_s: float) -> list[Action]:
        """If the repair has ended, take note of how it went and go on with the next."""
        job = self._repair
        if job is None or not job.ended:
            return []
        self._repair = None
        run, shard = job.message.shard.run, job.message.shard
        self._repaired[run] = self._repaired.get(run, 0) + len(job.held)
        self._problems[run] = "; ".join(job.problems[:4])
        if len(job.held) == len(job.message.targets):
            self._trials.pop(shard, None)
        else:
            trial = self._trials.setdefault(shard, _Trial())
            trial.again_s = now_s + min(_RETRY_LIMIT_S, _RETRY_S * 2**trial.tries)
            trial.tries += 1
        return [action for vigil in self._vigils.values() for action in self._mend(vigil, now_s)]

    def watched(self, run: str) -> Watched | None:
        """How safe what is guarded is now; None if nothing is."""
        ledger, vigil = self._ledgers.look(run), self._vigils.get(run)
        guarded = ledger.guarded()
        if ledger.guard is None or vigil is None or not guarded:
            return None
        generation = guarded[0].header.shard.generation
        margins: list[int | None] = []
        missing = 0
        for entry in guarded:
            if entry.header.shard.generation == generation:
                margin, lacking = self._state_of(vigil, entry.header, ledger.guard.holders)
                margins.append(margin)
                missing += lacking
        known = [margin for margin in margins if margin is not None]
        repairing = self._repair.message.shard if self._repair else None
        return Watched(
            generation=generation,
            margin=min(known) if len(known) == len(margins) else None,
            missing=missing,
            lost=tuple(vigil.lost()),
            repairing=repairing if repairing and repairing.run == run else None,
            repaired=self._repaired.get(run, 0),
            problem=self._problems.get(run, ""),
        )

    # -- decisions --------------------------------------------------------------------------------

    def _begin(self, run: str, now_s: float) -> list[Action]:
        if run in self._vigils:
            return []
        self._vigils[run] = Vigil(run, self._ledgers.node)
        return [Wake(now_s + ROUND_S, self._vigils[run])]  # what has just begun has more to do

    def _in_force(self, ledger: RunRecord) -> bool:
        return ledger.guard is not None and ledger.guard.writer >= ledger.fence

    def _align(self, vigil: Vigil, ledger: RunRecord, now_s: float) -> tuple[ShardId, ...]:
        assert ledger.guard is not None
        pieces = {entry.header.shard: entry.header.n for entry in ledger.guarded()}
        told = [each for each in (ledger.committed, ledger.restored) if each is not None]
        vigil.align(ledger.guard, pieces, max(told, default=None), now_s)
        shards = tuple(pieces)
        gone = [shard for shard in self._trials if shard.run == vigil.run and shard not in shards]
        for shard in gone:
            del self._trials[shard]
        return shards

    def _heard(self, ask: AskPeer, news: str, now_s: float) -> list[Action]:
        warned = [Warn(f"run {ask.vigil.run}: {news}")] if news else []
        return [*warned, *self._mend(ask.vigil, now_s)]

    def _mend(self, vigil: Vigil, now_s: float) -> list[Action]:
        """Begin to repair the first shard that lacks something, if there is one and it may."""
        ledger = self._ledgers.look(vigil.run)
        if self._repair is not None or self._protector.busy or not self._in_force(ledger):
            return []
        for entry in ledger.guarded():
            targets = self._targets(vigil, ledger, entry, now_s)
            if targets:
                return self._start_repair(ledger, entry, targets, now_s)
        return []

    def _targets(self, vigil: Vigil, ledger: RunRecord, entry: Entry, now_s: float) -> list[Target]:
        """Who shall hold what of a shard again; empty if all is well, or not known yet."""
        header, guard = entry.header, ledger.guard
        assert guard is not None
        shard = header.shard
        trial = self._trials.get(shard)
        if trial is not None and now_s < trial.again_s:
            return []
        indices = header.n if guard.holders else 0
        if not vigil.known(shard, self._protector.ended_s(shard)):
            return []
        pieces = vigil.pieces(shard)
        present = {
            index: [*pieces.fragments.get(index, ()), *pieces.coming.get(index, ())]
            for index in range(header.n)
        }
        alive = {sight.node: sight for sight in vigil.sights if not sight.lost}
        plan = plan_repair(
            home=self._ledgers.node,
            indices=indices,
            present=present,
            holders=[sight.node for sight in vigil.holders],
            nodes={node: sight.domain for node, sight in alive.items() if node not in pieces.homes},
        )
        if any(index >= header.k for index in plan) and (problem := self._no_room(header, guard)):
            self._problems[vigil.run] = problem
            plan = {index: node for index, node in plan.items() if index < header.k}
        return [Target(index, node, alive[node].address) for index, node in plan.items()]

    def _start_repair(
        self, ledger: RunRecord, entry: Entry, targets: Sequence[Target], now_s: float
    ) -> list[Action]:
        guard, header = ledger.guard, entry.header
        assert guard is not None
        message = Protect(
            shard=header.shard,
            writer=guard.writer,
            targets=tuple(targets),
            min_fragments=0,
            memory_bytes=max(1, self._budget_of(guard) - _reserve_bytes(header, guard)),
            timeout_s=guard.timeout_s,
            discard=(),
        )
        self._repair, actions = self._protector.repair(message, now_s)
        where = ", ".join(f"{target.index} to {target.node}" for target in targets)
        return [Warn(f"{header.shard}: making fragments again: {where}"), *actions]

    def _no_room(self, header: Header, guard: Guard) -> str:
        """Why parity cannot be made again without taking memory that saves need."""
        need_bytes = parity_region_bytes(header) + steady_bytes(
            header, local_ranks=guard.local_ranks, holders=guard.holders
        )
        short_bytes = need_bytes - self._budget_of(guard)
        if short_bytes <= 0:
            return ""
        return (
            f"parity can be made again only by the next save: beside the saves there is no room "
            f"for it, by {short_bytes:,} bytes (memory_bytes)"
        )

    def _budget_of(self, guard: Guard) -> int:
        return guard.memory_bytes or self._budget_bytes

    def _state_of(self, vigil: Vigil, header: Header, holders: int) -> tuple[int | None, int]:
        """Margin (None: not known) and missing fragments of a shard."""
        if not holders:
            return 0, 0
        pieces = vigil.pieces(header.shard)
        missing = sum(index not in pieces.fragments for index in range(header.n))
        if not vigil.known(header.shard, -math.inf):
            return None, missing
        return margin_of(header.k, pieces.homes, pieces.fragments), missing


def _reserve_bytes(header: Header, guard: Guard) -> int:
    """What the next save will take on a node like this one while the last one is still kept."""
    fragments_bytes = guard.holders * header.at(0).file_bytes
    return guard.local_ranks * (parity_region_bytes(header) + fragments_bytes)
