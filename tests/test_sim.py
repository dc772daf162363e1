"""The simulator: what it says of the real rules, and that it would notice if one were broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ecckpt import archiving, cli, counting, ordering, recovery
from ecckpt.agent import disk as agent_disk
from ecckpt.agent import gathering, hold, ledger, ledgers, protect
from ecckpt.agent.actions import Recycle
from ecckpt.counting import Count, Tell
from ecckpt.errors import AgentUnreachable
from ecckpt.generation import Generation
from ecckpt.recovery import RecoveryPlan
from ecckpt.retention import Keep
from ecckpt.sim import agent, launching, leading, platter, pulling, restoring, saving
from ecckpt.sim import simulate as simulating
from ecckpt.sim.faults import NONE, Faults
from ecckpt.sim.network import Network
from ecckpt.sim.rules import Rules
from ecckpt.sim.simulate import simulate
from ecckpt.sim.world import Actor, Steps, World, sleep
from ecckpt.tiers import accounts
from ecckpt.tiers import disk as tiers_disk

NODES = 64


def _failures(seeds: range, nodes: int) -> list[str]:
    outcomes = (simulate(seed, nodes) for seed in seeds)
    return [f"seed {each.seed}: {each.violation}" for each in outcomes if each.violation]


# -- the real rules -------------------------------------------------------------------------------


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_no_seed_breaks_a_promise(start: int) -> None:
    assert _failures(range(start, start + 20), NODES) == []


@pytest.mark.long
@pytest.mark.parametrize("start", range(200, 600, 40))
def test_no_further_seed_breaks_a_promise(start: int) -> None:
    assert _failures(range(start, start + 40), NODES) == []


def test_a_seed_is_the_same_every_time() -> None:
    first, again, other = simulate(7, 16), simulate(7, 16), simulate(8, 16)
    assert first == again
    assert first.digest != other.digest
    assert first.injected > 0


def test_without_faults_every_save_is_committed() -> None:
    outcome = simulate(3, 12, NONE)
    assert (outcome.violation, outcome.injected, outcome.lost) == ("", 0, 0)
    assert outcome.counts.restores == 1
    assert outcome.counts.commits >= 8


def test_runs_are_rolled_back_and_go_on_with_other_numbers_of_ranks() -> None:
    outcomes = [simulate(seed, 12, RESTARTS) for seed in range(20)]
    assert {each.violation for each in outcomes} == {""}
    assert sum(each.counts.roll_backs for each in outcomes) >= 5
    assert sum(each.counts.reshaped for each in outcomes) >= 5


def test_disks_that_fail_cost_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else fails, so every save has to be committed (a rule that the simulator checks)."""
    _has_no_memory_to_spare(monkeypatch)
    outcomes = [simulate(seed, 12, DISKS) for seed in range(12)]
    assert {each.violation for each in outcomes} == {""}
    assert sum(each.injected for each in outcomes) > 300
    assert sum(each.counts.stored for each in outcomes) >= 12


def test_what_is_on_disk_comes_back_after_the_power_of_all() -> None:
    outcomes = [simulate(seed, 12, POWER) for seed in range(12)]
    assert {each.violation for each in outcomes} == {""}
    assert sum(each.counts.stored for each in outcomes) >= 20
    assert sum(each.counts.restores for each in outcomes) >= 20


def test_requests_and_answers_are_lost_late_doubled_and_overtaken() -> None:
    """What the network does to messages, it does to both kinds."""
    world = World(1)
    network = Network(world)
    network.faults = Faults(drop=0.1, duplicate=0.2, late=0.1, late_s=9.0, jitter_s=0.05)
    server, client = Actor(world), Actor(world)
    requests: list[int] = []
    answers: dict[int, Any] = {}

    def ask(number: int) -> Steps:
        def handle(answer: Any) -> None:
            requests.append(number)
            answer(number)

        try:
            answers[number] = yield network.call("a", "b", lambda: server, handle, timeout_s=5.0)
        except AgentUnreachable as error:
            answers[number] = error

    for number in range(500):
        client.spawn(ask(number))
    world.run(60.0)
    came = [number for number, answer in answers.items() if answer == number]
    assert len(answers) == 500
    assert len(set(requests)) < 490  # requests were lost
    assert len(requests) > len(set(requests)) + 50  # or came twice
    assert len(came) < len(set(requests)) - 30  # answers were lost, or too late
    assert came != sorted(came)
    firsts = list(dict.fromkeys(requests))
    assert firsts != sorted(firsts)


def test_an_answer_that_comes_twice_counts_once() -> None:
    world = World(1)
    network = Network(world)
    network.faults = Faults(duplicate=1.0)
    server, client = Actor(world), Actor(world)
    seen: list[str] = []

    def ask() -> Steps:
        seen.append((yield network.call("a", "b", lambda: server, lambda a: a("x"), timeout_s=5.0)))
        yield sleep(10.0)
        seen.append("end")

    client.spawn(ask())
    world.run(60.0)
    assert network.injected >= 2  # the request and an answer
    assert seen == ["x", "end"]


def test_faults_tell_what_they_are() -> None:
    assert str(NONE) == "none"
    assert str(Faults(drop=0.5, stall_s=2.0)) == "drop=0.5, stall_s=2"


# -- broken rules ---------------------------------------------------------------------------------


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

    def outdated(self: ledger.Ledger) -> list[ledger.Entry]:
        committed = self.noted.committed
        return [
            entry
            for (shard, _), entry in self.entries.items()
            if committed is not None and shard.generation <= committed
        ]

    monkeypatch.setattr(ledger.Ledger, "outdated", outdated)


def _takes_commits_of_fenced_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: ledger.Ledger, generation: Generation) -> None:
        self.committed = max(self.committed or generation, generation)

    monkeypatch.setattr(ledger.Ledger, "commit", commit)


def _believes_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody compares checksums, neither when bytes arrive nor before they are used."""
    for module in (agent, pulling, restoring):
        monkeypatch.setattr(module, "bad_blocks", lambda *_: [])


def _gives_slots_to_others_while_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is taken back is recycled: its trainer may still be writing."""
    monkeypatch.setattr(ledgers, "Discard", Recycle)


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
    of = gathering.Gathering.of

    def once(message: Any) -> gathering.Gathering:
        found = of(message)
        found.again.clear()
        return found

    monkeypatch.setattr(gathering.Gathering, "of", once)
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
    inventory = ledger.Ledger.inventory
    monkeypatch.setattr(
        ledger.Ledger,
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


def _says_too_early_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archiving, "ranks_short", lambda *_, **__: ())


def _removes_from_disk_what_is_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored before is removed before this is on disk everywhere."""
    monkeypatch.setattr(
        ledger.Ledger,
        "to_store",
        lambda self, generation: self.retain((generation,)) or to_store(self, generation),
    )


to_store = ledger.Ledger.to_store


def _spends_what_it_likes_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget is no limit, and nothing is removed."""
    monkeypatch.setattr(tiers_disk.DiskTier, "check_room", lambda *_, **__: None)
    monkeypatch.setattr(ledger.Ledger, "superseded", lambda _: [])


def _restores_from_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_recovery = leading.plan_recovery

    def plan(run: str, inventories: Any, **fields: Any) -> RecoveryPlan:
        return plan_recovery(run, [replace(each, disk=()) for each in inventories], **fields)

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
    monkeypatch.setattr(ledgers.Ledgers, "recall", lambda *_: [])


def _writes_to_disk_what_has_rotted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: what a bit had flipped in, in memory, counted as stored."""
    monkeypatch.setattr(agent_disk, "bad_blocks", lambda *_: [])


POWER = Faults(power_every_s=12.0, away_s=5.0, agent_kill_every_s=3.0)
DISKS = Faults(
    disk_rot_every_s=3.0,
    disk_full_every_s=5.0,
    disk_sick_every_s=5.0,
    disk_slow_every_s=5.0,
    disk_slow_s=20.0,
)
RESTARTS = Faults(rank_kill_every_s=5.0)
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
    (_says_too_early_what_is_stored, "stored", DISKS),
    (_removes_from_disk_what_is_newest, "retention", DISKS),
    (_spends_what_it_likes_on_disk, "budget", NONE),
    (_restores_from_memory_alone, "recovery", POWER),
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


# -- the command ----------------------------------------------------------------------------------


def test_the_command_describes_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--seed", "5", "--nodes", "8"]) == 0
    shown = capsys.readouterr().out
    assert "seed 5, 8 nodes" in shown
    assert "faults: " in shown
    assert "every promise was kept" in shown
    assert "0 violations" in shown


def test_the_command_counts_many_and_names_those_that_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _retires_the_committed(monkeypatch)
    assert cli.main(["simulate", "--seeds", "3", "--nodes", "8", "--json"]) == 1
    tally = json.loads(capsys.readouterr().out)
    assert (tally["seeds"], tally["nodes"]) == (3, 8)
    assert [each["seed"] for each in tally["failed"]] == [0, 1, 2]
    assert {each["kind"] for each in tally["failed"]} == {"retention"}
    assert cli.main(["simulate", "--seeds", "3", "--nodes", "8"]) == 1
    assert "retention: " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--nodes", "2"], ["--nodes", "2049"], ["--seeds", "0"]])
def test_the_command_refuses_what_it_cannot_do(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", *arguments])
