"""The simulator would notice if a rule were broken: each is broken here, on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ecckpt.agent.core import hold, protect
from ecckpt.agent.core import run_record as ledger
from ecckpt.agent.core import run_records as ledgers
from ecckpt.agent.core.actions import Action, Recycle, Taking
from ecckpt.agent.runtime import disk_store as agent_disk
from ecckpt.agent.storage import budget as accounts
from ecckpt.agent.storage import disk as tiers_disk
from ecckpt.agent.storage import memory_tier
from ecckpt.client.restore import protocol as ordering
from ecckpt.client.save import archive_protocol as archiving
from ecckpt.client.save import commit_protocol as counting
from ecckpt.client.save.commit_protocol import Count, Tell
from ecckpt.format.block_ranges import Flags
from ecckpt.format.header_columns import Headers
from ecckpt.format.ids import Generation
from ecckpt.policy import survival as recovery
from ecckpt.policy.gather_plan import GatherPlan
from ecckpt.policy.retention import Keep
from ecckpt.policy.survival import RecoveryPlan
from ecckpt.sim import launcher as launching
from ecckpt.sim import leading, restoring, saving
from ecckpt.sim import simulate as simulating
from ecckpt.sim.faults import NONE, Faults
from ecckpt.sim.hosts import platter, pulling
from ecckpt.sim.run_config import Rules
from ecckpt.sim.simulate import simulate


def _counts_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank counts before its shard is protected."""

    def see_through(shard: Any, ranks: int, *, counted: bool) -> Any:
        if counted and (yield Count("count", 1)) == ranks:
            yield Tell()
        yield from counting.see_through(shard, ranks, counted=False)

    monkeypatch.setattr(saving, "see_through", see_through)


def _tells_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks know that a save is committed, and keep it to themselves: nothing is ever let go."""

    def told() -> Any:
        return True
        yield

    monkeypatch.setattr(counting, "_told", told)


def _skips_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not begin a save tells nobody."""
    monkeypatch.setattr(saving, "give_up", lambda ranks: iter(()))


def _retires_the_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit also lets go what it commits."""

    def outdated(self: ledger.RunRecord) -> list[ledger.Entry]:
        committed = self.noted.committed
        return [
            entry
            for (shard, _), entry in self.entries.items()
            if committed is not None and shard.generation <= committed
        ]

    monkeypatch.setattr(ledger.RunRecord, "outdated", outdated)


def _takes_commits_of_fenced_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: ledger.RunRecord, generation: Generation) -> None:
        self.committed = max(self.committed or generation, generation)

    monkeypatch.setattr(ledger.RunRecord, "commit", commit)


def _believes_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody compares checksums, neither when bytes arrive nor before they are used."""
    for module in (pulling, restoring):
        monkeypatch.setattr(module, "bad_blocks", lambda *_: [])

    def lacking(self: Taking) -> Flags:
        return np.full(self.message.header.rows, self.sums is None)

    monkeypatch.setattr(Taking, "lacking", lacking)


def _gives_slots_to_others_while_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is taken back is recycled: its trainer may still be writing."""
    monkeypatch.setattr(ledgers, "Discard", Recycle)


def _recycles_what_tensors_lie_in(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ledgers.RunRecords._free

    def recycled(self: ledgers.RunRecords, entry: ledger.Entry) -> list[Action]:
        entry.region.assigned = False
        return free(self, entry)

    monkeypatch.setattr(ledgers.RunRecords, "_free", recycled)


def _forgets_what_tensors_lie_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is started does not know what the one before it has assigned."""
    adopt = ledgers.RunRecords.adopt

    def forgot(self: ledgers.RunRecords, entry: ledger.Entry) -> list[Action]:
        entry.region.assigned = False
        return adopt(self, entry)

    monkeypatch.setattr(ledgers.RunRecords, "adopt", forgot)


def _orders_another_generation_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_recovery, way_home = leading.plan_recovery, ordering.way_home
    plans: list[RecoveryPlan] = []

    def plan(run: str, inventories: Any, **fields: Any) -> RecoveryPlan:
        plans.append(plan_recovery(run, inventories, **fields))
        return plans[-1]

    def way(shard: Any, *others: Any) -> Any:
        there = [each for each in plans[-1].generations if each.state != "lost"]
        return way_home(there[-1].shards[1] if shard.rank == 1 else shard, *others)

    monkeypatch.setattr(leading, "plan_recovery", plan)
    monkeypatch.setattr(ordering, "way_home", way)


def _takes_absence_for_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is complete is restored."""
    plan_recovery = leading.plan_recovery

    def plan(run: str, inventories: Any, **fields: Any) -> RecoveryPlan:
        found = plan_recovery(run, inventories, **fields)
        whole = [each for each in found.generations if each.state == "complete"]
        return replace(found, chosen=whole[0] if whole else None)

    monkeypatch.setattr(leading, "plan_recovery", plan)


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

    class Hasty(ordering.Refusals):
        def fail(self, generation: Generation, why: str) -> bool:
            self.refused[generation] = why
            return True

    monkeypatch.setattr(leading, "Refusals", Hasty)


def _names_too_few_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another number of ranks saved, the last of their shards is overlooked."""
    sources_of = ordering.sources_of
    monkeypatch.setattr(ordering, "sources_of", lambda chosen: sources_of(chosen)[:-1])


def _mixes_shards_of_two_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another number of ranks saved, one of the shards is an older one."""
    plan_recovery, sources_of = leading.plan_recovery, ordering.sources_of
    plans: list[RecoveryPlan] = []

    def plan(run: str, inventories: Any, **fields: Any) -> RecoveryPlan:
        plans.append(plan_recovery(run, inventories, **fields))
        return plans[-1]

    def mixed(chosen: Any) -> Any:
        alike = (each for each in plans[-1].generations if each.world_size == chosen.world_size)
        there = [each for each in alike if each.state != "lost"]
        return sources_of(chosen)[:-1] + sources_of(there[-1])[-1:]

    monkeypatch.setattr(leading, "plan_recovery", plan)
    monkeypatch.setattr(ordering, "sources_of", mixed)


def _takes_what_was_left_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart knows of no roll-backs."""
    monkeypatch.setattr(recovery, "abandoned_by", lambda *_: None)
    _rule(monkeypatch, roll_back=0.5, disk_every=1, keep=Keep(3))


def _keeps_roll_backs_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents write down what they are told of roll-backs, and do not say so later."""
    inventory = ledger.RunRecord.inventory
    monkeypatch.setattr(
        ledger.RunRecord,
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
        ledger.RunRecord,
        "to_store",
        lambda self, generation: self.retain((generation,)) or to_store(self, generation),
    )


to_store = ledger.RunRecord.to_store


def _spends_what_it_likes_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget is no limit, and nothing is removed."""
    monkeypatch.setattr(tiers_disk.DiskTier, "check_room", lambda *_, **__: None)
    monkeypatch.setattr(ledger.RunRecord, "superseded", lambda _: [])


def _restores_from_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_recovery = leading.plan_recovery

    def plan(run: str, inventories: Any, **fields: Any) -> RecoveryPlan:
        return plan_recovery(
            run, [replace(each, disk=Headers.of(())) for each in inventories], **fields
        )

    monkeypatch.setattr(leading, "plan_recovery", plan)


def _has_no_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than two generations of one rank need, in a third of the seeds."""
    draw = simulating._draw_rules

    def drawn(*arguments: Any) -> Rules:
        rules = draw(*arguments)
        return replace(rules, disk_every=1, budget_bytes=rules.budget_bytes // 2)

    monkeypatch.setattr(simulating, "_draw_rules", drawn)


def _does_not_give_back_what_the_disk_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is lent to a slow disk is lent until that has done with it."""
    _has_no_memory_to_spare(monkeypatch)
    monkeypatch.setattr(ledgers.RunRecords, "recall", lambda *_: [])


def _writes_to_disk_what_has_rotted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: what a bit had flipped in, in memory, counted as stored."""
    monkeypatch.setattr(agent_disk, "bad_blocks", lambda *_: [])


def _puts_two_fragments_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    _puts_two_fragments_on_a_node(monkeypatch)
    _rule(monkeypatch, disk_every=1, roll_back=0.0, reshape=0.0)


POWER_AND_LOSSES = Faults(power_every_s=8.0, host_loss_every_s=5.0, burst=1.0, away_s=3.0)
POWER = Faults(power_every_s=12.0, away_s=5.0, agent_kill_every_s=3.0)
DISKS = Faults(
    disk_rot_every_s=3.0,
    disk_full_every_s=5.0,
    disk_sick_every_s=5.0,
    disk_slow_every_s=5.0,
    disk_slow_s=20.0,
)
RESTARTS = Faults(rank_kill_every_s=5.0)
RESTARTS_OF_ALL = Faults(rank_kill_every_s=5.0, agent_kill_every_s=1.0)
SLOW = Faults(late=0.5, late_s=4.0, rank_kill_every_s=3.0)
LOSSES = Faults(host_loss_every_s=6.0, burst=1.0, away_s=3.0)
ZOMBIES = Faults(rank_kill_every_s=6.0, rank_stall_every_s=1.0, stall_s=8.0)
SLEEPERS = Faults(rank_kill_every_s=6.0, rank_stall_every_s=1.0, stall_s=25.0)
STALLS = Faults(rank_stall_every_s=1.0, stall_s=8.0)
ROT = Faults(rot_every_s=0.5, flip=0.1, rank_kill_every_s=5.0, host_loss_every_s=10.0, away_s=3.0)
NOISE = Faults(flip=0.5)
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


BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], str, Faults]] = [
    (_counts_too_early, "commit", NONE),
    (_tells_no_agent, "liveness", NONE),
    (_skips_without_a_word, "liveness", STALLS),
    (_retires_the_committed, "retention", NONE),
    (_takes_commits_of_fenced_writers, "fencing", ZOMBIES),
    (_believes_every_byte, "bytes", ROT),
    (_gives_slots_to_others_while_they_are_written, "bytes", SLEEPERS),
    (_recycles_what_tensors_lie_in, "bytes", RESTARTS),
    (_forgets_what_tensors_lie_in, "bytes", RESTARTS_OF_ALL),
    (_orders_another_generation_for_one_rank, "mixed", SLOW),
    (_takes_absence_for_loss, "recovery", LOSSES),
    (_spends_what_it_likes, "budget", NONE),
    (_puts_two_fragments_on_a_node, "margin", LOSSES),
    (_waits_for_ever, "liveness", NONE),
    (_never_begins_what_is_queued, "liveness", NOISE),
    (_tries_every_source_once, "recovery", WEATHER),
    (_refuses_at_once, "recovery", LOSSES_AND_NOISE),
    (_names_too_few_shards, "bytes", RESTARTS),
    (_mixes_shards_of_two_generations, "mixed", SLOW),
    (_takes_what_was_left_on_purpose, "roll-back", RESTARTS),
    (_keeps_roll_backs_to_itself, "roll-back", RESTARTS),
    (_does_not_flush_files, "torn", NONE),
    (_does_not_flush_names, "torn", NONE),
    (_writes_to_disk_what_has_rotted, "torn", ROT),
    (_overlooks_files_on_disk, "adoption", POWER),
    (_overlooks_files_in_memory, "adoption", RESTARTS_OF_ALL),
    (_says_too_early_what_is_stored, "stored", DISKS),
    (_removes_from_disk_what_is_newest, "retention", DISKS),
    (_spends_what_it_likes_on_disk, "budget", NONE),
    (_restores_from_memory_alone, "recovery", POWER),
    (_puts_two_fragments_on_a_disk, "disk margin", POWER_AND_LOSSES),
    (_does_not_give_back_what_the_disk_has, "disk", DISKS),
]


@pytest.mark.parametrize(
    ("plant", "kind", "weather"), BROKEN, ids=[plant.__name__ for plant, _, _ in BROKEN]
)
def test_a_broken_rule_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    weather: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    seen: set[str] = set()
    for seed in range(40):
        seen.add(simulate(seed, 12, weather).kind)
        if kind in seen:
            return
    pytest.fail(f"not noticed in 40 seeds, but {seen}")
