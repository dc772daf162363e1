"""The simulator: what it says of the real rules, what its network does, and its command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ecckpt import cli
from ecckpt.errors import AgentUnreachable
from ecckpt.sim.faults import NONE, Faults
from ecckpt.sim.hosts.network import SimulatedNetwork
from ecckpt.sim.simulate import simulate
from ecckpt.sim.world import Actor, Steps, World, sleep
from tests.unit.sim.broken_rules import (
    DISKS,
    POWER,
    RESTARTS,
    has_no_memory_to_spare,
    retires_the_committed,
)

NODES = 64
SEEDS, LONG_SEEDS, STRIDE = 40, 200, 10


def _failures(seeds: range) -> list[str]:
    outcomes = [simulate(seed, NODES) for seed in seeds]
    return [f"seed {each.seed}: {each.violation}" for each in outcomes if each.violation]


# -- the real rules -------------------------------------------------------------------------------


@pytest.mark.parametrize("start", range(0, SEEDS, STRIDE))
def test_no_seed_breaks_a_promise(start: int) -> None:
    """The strides are separate tests, so that every worker runs some."""
    assert _failures(range(start, start + STRIDE)) == []


@pytest.mark.long
@pytest.mark.parametrize("start", range(SEEDS, LONG_SEEDS, STRIDE))
def test_no_further_seed_breaks_a_promise(start: int) -> None:
    assert _failures(range(start, start + STRIDE)) == []


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
    has_no_memory_to_spare(monkeypatch)
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
    network = SimulatedNetwork(world)
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
    network = SimulatedNetwork(world)
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
    retires_the_committed(monkeypatch)
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
