"""The simulator would notice if a rule were broken: each is broken here, on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ecckpt.agent.core import hold, protect
from ecckpt.agent.core import run_records as records
from ecckpt.agent.core.actions import Action, Recycle, Taking
from ecckpt.agent.records import entry as entries
from ecckpt.agent.records import run_record
from ecckpt.agent.runtime import disk_store as agent_disk
from ecckpt.agent.storage import budget as accounts
from ecckpt.agent.storage import disk as tiers_disk
from ecckpt.agent.storage import memory_tier
from ecckpt.client.effects import Join, StoreDrop, call_own
from ecckpt.client.restore import coordinator
from ecckpt.client.restore import protocol as ordering
from ecckpt.client.restore.refusals import Refusals
from ecckpt.client.restore.shard_source import ShardSource
from ecckpt.client.save import archive_protocol as archiving
from ecckpt.client.save.commit_protocol import CommitProtocol, Giving, key_of
from ecckpt.client.save.replica_check import ReplicaCheck
from ecckpt.client.save.ticket import Ticket
from ecckpt.errors import EcckptError
from ecckpt.format.block_ranges import Flags
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation
from ecckpt.policy import survival as recovery
from ecckpt.policy.gather_plan import GatherPlan
from ecckpt.policy.retention import Keep
from ecckpt.policy.survival import RecoveryPlan
from ecckpt.protocol.verbs import PROTECT
from ecckpt.sim import launcher as launching
from ecckpt.sim import simulate as simulating
from ecckpt.sim import state as sim_state
from ecckpt.sim.faults import NONE, Faults
from ecckpt.sim.hosts import platter, pulling
from ecckpt.sim.run_config import Rules
from ecckpt.sim.simulate import simulate
from tests.unit.sim.broken_rules import (
    DISKS,
    POWER,
    RESTARTS,
    has_no_memory_to_spare,
    retires_the_committed,
)


def _counts_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank counts before its shard is protected."""

    def protect(self: Any, save: Any) -> Any:
        yield from save.begin()

    monkeypatch.setattr(CommitProtocol, "_protect", protect)


def _tells_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks know that a save is committed, and keep it to themselves: nothing is ever let go."""

    def told(self: Any, shard: Any) -> Any:
        yield from ()
        return True

    monkeypatch.setattr(CommitProtocol, "_told", told)


def _skips_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not begin a save tells no other rank."""

    def abandon(self: Any, handle: Any, deadline: Any) -> Any:
        yield from ()
        handle.mark_left()

    monkeypatch.setattr(CommitProtocol, "abandon", abandon)


def _begins_before_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank forgets a save as soon as its own part has ended, and drops its keys at once."""

    def leave(self: Any, deadline: Any) -> Any:
        for counter in ("count", "left"):
            yield StoreDrop(key_of(counter, deadline.shard.generation))

    monkeypatch.setattr(CommitProtocol, "_leave", leave)


def _gives_up_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank for which the store breaks takes the save for given up: others may have committed."""

    def doubt(self: Any, save: Any, error: Any) -> Any:
        yield from ()
        return Giving.DONE

    monkeypatch.setattr(CommitProtocol, "_doubt", doubt)


def _lets_older_starts_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent does not ask how old a start is."""
    monkeypatch.setattr(run_record.RunRecord, "check_age", lambda *_: None)


def _compares_no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are believed what they say that all have."""

    def compare(self: Any) -> Any:
        yield from ()

    monkeypatch.setattr(ReplicaCheck, "compare", compare)
    _rule(monkeypatch, replicated=True, tickets=False)


def _takes_what_was_proven_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home copy that was proven ahead is loaded, whatever became of its slot since."""

    def take(self: Any, slot: Any) -> Any:
        if self._ahead is None:
            return None
        try:
            _, brought = yield Join(self._ahead[1], self._timeout_s)
        except EcckptError:
            return None
        return brought

    monkeypatch.setattr(ShardSource, "_take_ahead", take)


def _commits_tickets_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save by ticket is committed though this rank's shard is not protected."""

    def protect(self: Any) -> Any:
        yield from call_own(PROTECT, self.protection, 10.0)

    monkeypatch.setattr(Ticket, "protect", protect)
    _rule(monkeypatch, tickets=True, replicated=False)


def _takes_commits_of_fenced_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: run_record.RunRecord, generation: Generation) -> None:
        self.committed = max(self.committed or generation, generation)

    monkeypatch.setattr(run_record.RunRecord, "commit", commit)


def _believes_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody compares checksums, neither when bytes arrive nor before they are used."""
    for module in (pulling, sim_state):
        monkeypatch.setattr(module, "bad_blocks", lambda *_: [])

    def lacking(self: Taking) -> Flags:
        return np.full(self.message.header.rows, self.sums is None)

    monkeypatch.setattr(Taking, "lacking", lacking)


def _gives_slots_to_others_while_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is taken back is recycled: its trainer may still be writing."""
    monkeypatch.setattr(records, "Discard", Recycle)


def _recycles_what_tensors_lie_in(monkeypatch: pytest.MonkeyPatch) -> None:
    free = records.RunRecords._free

    def recycled(self: records.RunRecords, entry: entries.Entry) -> list[Action]:
        entry.region.assigned = False
        return free(self, entry)

    monkeypatch.setattr(records.RunRecords, "_free", recycled)


def _forgets_what_tensors_lie_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is started does not know what the one before it has assigned."""
    adopt = records.RunRecords.adopt

    def forgot(self: records.RunRecords, entry: entries.Entry) -> list[Action]:
        entry.region.assigned = False
        return adopt(self, entry)

    monkeypatch.setattr(records.RunRecords, "adopt", forgot)


def _orders_another_generation_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_recovery, way_home = coordinator.plan_recovery, ordering.way_home
    plans: list[RecoveryPlan] = []

    def plan(run: str, inventories: Any, **fields: Any) -> RecoveryPlan:
        plans.append(plan_recovery(run, inventories, **fields))
        return plans[-1]

    def way(shard: Any, *others: Any) -> Any:
        there = [each for each in plans[-1].generations if each.state != "lost"]
        return way_home(there[-1].shards[1] if shard.rank == 1 else shard, *others)

    monkeypatch.setattr(coordinator, "plan_recovery", plan)
    monkeypatch.setattr(ordering, "way_home", way)


def _takes_absence_for_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is complete is restored."""
    plan_recovery = coordinator.plan_recovery

    def plan(run: str, inventories: Any, **fields: Any) -> RecoveryPlan:
        found = plan_recovery(run, inventories, **fields)
        whole = [each for each in found.generations if each.state == "complete"]
        return replace(found, chosen=whole[0] if whole else None)

    monkeypatch.setattr(coordinator, "plan_recovery", plan)


def _takes_unread_disks_for_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is made of what agents list, though some of them still read their disks."""

    def plan(self: Any, wanted: Any, inventories: Any) -> Any:
        yield from ()
        made = self._plan(wanted, inventories)
        self._answering = tuple(each.node for each in inventories)
        return made

    monkeypatch.setattr(coordinator.Coordinator, "_await_disks", plan)


def _believes_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one node cannot gather twice is passed over; no other node is asked."""
    monkeypatch.setattr(Refusals, "witnesses", lambda self, generation: {})


def _spends_what_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget is no limit, and spare regions are never used again."""

    def reserve(self: Any, run: str, size_bytes: int, **_: Any) -> list[Any]:
        self._used_bytes[run] += size_bytes
        return []

    monkeypatch.setattr(accounts.Accounts, "reserve", reserve)
    monkeypatch.setattr(accounts.Accounts, "take", lambda *_: None)


def _puts_two_fragments_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder gets its neighbour's fragment as well."""
    plan_placement = launching.plan_placement

    def plan(nodes: Any, code: Any) -> Any:
        placement = plan_placement(nodes, code)
        crowded = {home: (each[0], each[0], *each[2:]) for home, each in placement.holders.items()}
        return replace(placement, holders=crowded)

    monkeypatch.setattr(launching, "plan_placement", plan)


def _waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has no deadline, and a save none either."""
    monkeypatch.setattr(protect.Protector, "due", lambda *_: [])
    monkeypatch.setattr(protect.Protector, "answer", lambda *_: [])


def _never_begins_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull that fails keeps its place for ever."""
    end = hold.Holder._end

    def leak(self: hold.Holder, taking: Any, problem: str) -> Any:
        actions = end(self, taking, problem)
        if problem:
            self._pulling.append(taking)
        return actions

    monkeypatch.setattr(hold.Holder, "_end", leak)


def _tries_every_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: a bit that flipped on the way was as bad as one in memory."""
    begin_pass = GatherPlan._begin_pass

    def once(self: GatherPlan, *, again: bool) -> None:
        begin_pass(self, again=again)
        if again:
            self._left = [{} for _ in self._left]

    monkeypatch.setattr(GatherPlan, "_begin_pass", once)
    _refuses_at_once(monkeypatch)


def _refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: a generation that failed once was passed over."""

    class Hasty(Refusals):
        def fail(self, generation: Generation, outcomes: Any, why: str) -> bool:
            self.refused[generation] = why
            return True

    monkeypatch.setattr(coordinator, "Refusals", Hasty)


def _names_too_few_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another number of ranks saved, the last of their shards is overlooked."""
    sources_of = ordering.sources_of
    monkeypatch.setattr(ordering, "sources_of", lambda chosen: sources_of(chosen)[:-1])


def _mixes_shards_of_two_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another number of ranks saved, one of the shards is an older one."""
    plan_recovery, sources_of = coordinator.plan_recovery, ordering.sources_of
    plans: list[RecoveryPlan] = []

    def plan(run: str, inventories: Any, **fields: Any) -> RecoveryPlan:
        plans.append(plan_recovery(run, inventories, **fields))
        return plans[-1]

    def mixed(chosen: Any) -> Any:
        alike = (each for each in plans[-1].generations if each.world_size == chosen.world_size)
        there = [each for each in alike if each.state != "lost"]
        return sources_of(chosen)[:-1] + sources_of(there[-1])[-1:]

    monkeypatch.setattr(coordinator, "plan_recovery", plan)
    monkeypatch.setattr(ordering, "sources_of", mixed)


def _takes_what_was_left_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart knows of no roll-backs."""
    monkeypatch.setattr(recovery, "abandoned_by", lambda *_: None)
    _rule(monkeypatch, roll_back=0.5, disk_every=1, keep=Keep(3))


def _keeps_roll_backs_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents write down what they are told of roll-backs, and do not say so later."""
    inventory = run_record.RunRecord.inventory
    monkeypatch.setattr(
        run_record.RunRecord,
        "inventory",
        lambda self, node: replace(inventory(self, node), roll_backs=()),
    )
    _rule(monkeypatch, roll_back=0.5, disk_every=1, keep=Keep(3))


def _rule(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Every run has these rules."""
    draw = simulating._draw_rules

    def drawn(*arguments: Any) -> Rules:
        rules = draw(*arguments)
        return replace(rules, **fields, disk_bytes=10 * rules.disk_bytes)

    monkeypatch.setattr(simulating, "_draw_rules", drawn)


def _does_not_flush_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platter._Draft, "flush", lambda *_: None)


def _does_not_flush_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platter.Platter, "flush_names", lambda *_: None)


def _overlooks_files_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what an earlier agent left, one file is not entered."""
    found = tiers_disk.DiskTier.found
    monkeypatch.setattr(tiers_disk.DiskTier, "found", lambda self: iter(list(found(self))[1:]))


def _overlooks_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what an earlier agent left in memory, one region is not entered."""
    found = memory_tier.MemoryTier.found
    monkeypatch.setattr(memory_tier.MemoryTier, "found", lambda self: iter(list(found(self))[1:]))


def _says_too_early_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archiving, "ranks_short", lambda *_, **__: ())


def _removes_from_disk_what_is_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored before is removed before this is on disk everywhere."""
    monkeypatch.setattr(
        run_record.RunRecord,
        "to_store",
        lambda self, generation: self.retain((generation,)) or to_store(self, generation),
    )


to_store = run_record.RunRecord.to_store


def _spends_what_it_likes_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget is no limit, and nothing is removed."""
    monkeypatch.setattr(tiers_disk.DiskTier, "check_room", lambda *_, **__: None)
    monkeypatch.setattr(run_record.RunRecord, "superseded", lambda _: [])


def _restores_from_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_recovery = coordinator.plan_recovery

    def plan(run: str, inventories: Any, **fields: Any) -> RecoveryPlan:
        return plan_recovery(
            run, [replace(each, disk=Headers.from_headers(())) for each in inventories], **fields
        )

    monkeypatch.setattr(coordinator, "plan_recovery", plan)


def _does_not_give_back_what_the_disk_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is lent to a slow disk is lent until that has done with it."""
    has_no_memory_to_spare(monkeypatch)
    monkeypatch.setattr(records.RunRecords, "recall", lambda *_: [])


def _writes_to_disk_what_has_rotted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: what a bit had flipped in, in memory, counted as stored."""
    monkeypatch.setattr(agent_disk, "bad_blocks", lambda *_: [])


def _puts_two_fragments_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    _puts_two_fragments_on_a_node(monkeypatch)
    _rule(monkeypatch, disk_every=1, roll_back=0.0, reshape=0.0)


POWER_AND_LOSSES = Faults(power_every_s=8.0, host_loss_every_s=5.0, burst=1.0, away_s=3.0)
RESTARTS_OF_ALL = Faults(rank_kill_every_s=5.0, agent_kill_every_s=1.0)
SLOW = Faults(late=0.5, late_s=4.0, rank_kill_every_s=3.0)
LOSSES = Faults(host_loss_every_s=6.0, burst=1.0, away_s=3.0)
ZOMBIES = Faults(rank_kill_every_s=6.0, rank_stall_every_s=1.0, stall_s=8.0)
SLEEPERS = Faults(rank_kill_every_s=6.0, rank_stall_every_s=1.0, stall_s=25.0)
STALLS = Faults(rank_stall_every_s=1.0, stall_s=8.0)
ROT = Faults(rot_every_s=0.5, flip=0.1, rank_kill_every_s=5.0, host_loss_every_s=10.0, away_s=3.0)
NOISE = Faults(flip=0.5)
SLOW_DISKS = Faults(power_every_s=8.0, away_s=3.0, disk_slow_every_s=1.0, disk_slow_s=10.0)
CUT_OFF = Faults(host_loss_every_s=10.0, away_s=1.0, bulk=1.0, bulk_s=300.0)
DRIFT = Faults(drift=0.2)
BREAKS = Faults(store_break=0.1, store_break_s=8.0)
LOSSES_AND_NOISE = replace(LOSSES, flip=0.5, rank_kill_every_s=6.0)
WEATHER = Faults(
    drop=0.03,
    flip=0.2,
    rank_kill_every_s=6.0,
    agent_kill_every_s=4.0,
    host_loss_every_s=15.0,
    burst=1.0,
    away_s=3.0,
)


LATE_STARTS = Faults(late_start=0.5, late_start_s=20.0, rank_kill_every_s=8.0)


# A rule, broken; the kind of violation; the faults that show it; the first seed that does.
BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], str, Faults, int]] = [
    (_counts_too_early, "commit", NONE, 2),
    (_tells_no_agent, "liveness", NONE, 5),
    (_skips_without_a_word, "liveness", STALLS, 3),
    (_begins_before_others_have_left, "retention", STALLS, 4),
    (_gives_up_in_doubt, "retention", BREAKS, 4),
    (_compares_no_claims, "replicas", DRIFT, 0),
    (_takes_what_was_proven_before, "mixed", SLOW, 1),
    (_commits_tickets_that_failed, "commit", NONE, 0),
    (retires_the_committed, "retention", NONE, 0),
    (_takes_commits_of_fenced_writers, "fencing", ZOMBIES, 6),
    (_lets_older_starts_begin, "order of starts", LATE_STARTS, 0),
    (_believes_every_byte, "bytes", ROT, 0),
    (_gives_slots_to_others_while_they_are_written, "bytes", SLEEPERS, 0),
    (_recycles_what_tensors_lie_in, "bytes", RESTARTS, 0),
    (_forgets_what_tensors_lie_in, "bytes", RESTARTS_OF_ALL, 1),
    (_orders_another_generation_for_one_rank, "mixed", SLOW, 0),
    (_takes_absence_for_loss, "recovery", LOSSES, 0),
    (_takes_unread_disks_for_empty, "recovery", SLOW_DISKS, 4),
    (_believes_one_node, "recovery", CUT_OFF, 1),
    (_spends_what_it_likes, "budget", NONE, 0),
    (_puts_two_fragments_on_a_node, "margin", LOSSES, 0),
    (_waits_for_ever, "liveness", NONE, 0),
    (_never_begins_what_is_queued, "liveness", NOISE, 0),
    (_tries_every_source_once, "recovery", WEATHER, 0),
    (_refuses_at_once, "recovery", LOSSES_AND_NOISE, 0),
    (_names_too_few_shards, "bytes", RESTARTS, 0),
    (_mixes_shards_of_two_generations, "mixed", SLOW, 24),
    (_takes_what_was_left_on_purpose, "roll-back", RESTARTS, 0),
    (_keeps_roll_backs_to_itself, "roll-back", RESTARTS, 0),
    (_does_not_flush_files, "torn", NONE, 4),
    (_does_not_flush_names, "torn", NONE, 4),
    (_writes_to_disk_what_has_rotted, "torn", ROT, 6),
    (_overlooks_files_on_disk, "adoption", POWER, 4),
    (_overlooks_files_in_memory, "adoption", RESTARTS_OF_ALL, 0),
    (_says_too_early_what_is_stored, "stored", DISKS, 4),
    (_removes_from_disk_what_is_newest, "retention", DISKS, 4),
    (_spends_what_it_likes_on_disk, "budget", NONE, 27),
    (_restores_from_memory_alone, "recovery", POWER, 4),
    (_puts_two_fragments_on_a_disk, "disk margin", POWER_AND_LOSSES, 1),
    (_does_not_give_back_what_the_disk_has, "disk", DISKS, 21),
]


IDS = [plant.__name__ for plant, *_ in BROKEN]


@pytest.mark.parametrize(("plant", "kind", "weather", "seed"), BROKEN, ids=IDS)
def test_a_broken_rule_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    weather: Faults,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the seed that showed it first; after a change of what is simulated, scan anew."""
    plant(monkeypatch)
    assert simulate(seed, 12, weather).kind == kind, "pytest -m long -k first_seed finds another"


@pytest.mark.long
@pytest.mark.parametrize(("plant", "kind", "weather", "seed"), BROKEN, ids=IDS)
def test_the_first_seed_that_notices_a_broken_rule(
    plant: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    weather: Faults,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    first = next(each for each in range(40) if simulate(each, 12, weather).kind == kind)
    assert first == seed
