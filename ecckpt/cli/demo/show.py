"""Runs the demo and prints it: train over several nodes, lose some, continue, compare bit for bit.

1. LocalCluster with one agent per node; train until a save is committed and some steps more
2. kill all ranks, and the agents and memory of ``lose`` nodes
3. replace the lost nodes by empty ones and train to the end
4. train the same without interruption and without checkpoints; compare losses and weights
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecckpt.cli.demo.launch import Event, Launch
from ecckpt.errors import InvalidConfig
from ecckpt.format.ids import Generation
from ecckpt.policy.placement import Code, parse_code
from ecckpt.policy.survival import RecoveryPlan, plan_recovery
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.testing.local_cluster import LocalCluster

_RUN = "demo"
_TIMEOUT_S = 240.0  # of each training; it takes a few seconds, and minutes on a busy machine


@dataclass(kw_only=True)
class DemoReport:
    """What happened so far: filled from the events of the ranks, read by the closing table.

    Attributes:
        ranks: number of ranks.
        started_s: start of the demo, on the monotonic clock.
        last_step: the newest step that all ranks have done; -1 before the first.
        done_steps: step -> ranks that have done it, until all have.
        committed: step -> ranks that know it as committed.
        stalls_s, copies_s, protected_s, restores_s: durations that ranks have reported.
        sources: rank -> where its restore came from.
        losses: step -> rank -> loss in nats per byte.
    """

    ranks: int
    started_s: float = field(default_factory=time.monotonic)
    last_step: int = -1
    done_steps: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    committed: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    stalls_s: list[float] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)
    protected_s: list[float] = field(default_factory=list)
    sources: dict[int, str] = field(default_factory=dict)
    restores_s: list[float] = field(default_factory=list)
    losses: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        print(f"{time.monotonic() - self.started_s:7.1f} s  {text}", flush=True)

    def record(self, event: Event) -> None:
        """Record one event of one rank, and print it when all ranks have reached it."""
        kind, rank, step = event["event"], event["rank"], event["step"]
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(rank, step, event)

    def safe_step(self) -> int:
        """Return the newest step that all ranks know as committed; -1 if there is none."""
        by_all = [step for step, ranks in self.committed.items() if len(ranks) == self.ranks]
        return max(by_all, default=-1)

    def _on_start(self, rank: int, step: int, event: Event) -> None:
        if rank == 0:
            self.say(f"training processes are up: {event['world']} ranks")

    def _on_step(self, rank: int, step: int, event: Event) -> None:
        self.done_steps[step].add(rank)
        self.losses[step][rank] = float.fromhex(event["loss"])
        if len(self.done_steps[step]) == self.ranks:
            self.last_step = max(self.last_step, step)
            mean = statistics.mean(self.losses[step].values())
            self.say(f"step {step:3}  loss {mean:.4f}")
            self.done_steps[step].clear()

    def _on_saved(self, rank: int, step: int, event: Event) -> None:
        self.stalls_s.append(event["stall_s"])
        self.copies_s.append(event["copy_s"])

    def _on_protected(self, rank: int, step: int, event: Event) -> None:
        self.protected_s.append(event["protected_s"])

    def _on_committed(self, rank: int, step: int, event: Event) -> None:
        self.committed[step].add(rank)
        if len(self.committed[step]) == self.ranks:
            self.say(f"step {step:3}  committed: all shards have their full redundancy")

    def _on_reprotected(self, rank: int, step: int, event: Event) -> None:
        self.say(f"rank {rank}: {event['held']} lost fragments of step {step} rebuilt")

    def _on_failed(self, rank: int, step: int, event: Event) -> None:
        self.say(f"rank {rank}: step {step} was not saved: {event['error']}")

    def _on_restored(self, rank: int, step: int, event: Event) -> None:
        how = "its node's own memory"
        if event["source"] == "peers":
            how = f"peers ({event['pulled_bytes']:,} bytes, {event['rebuilt_fragments']} rebuilt)"
        self.sources[rank] = event["source"]
        self.restores_s.append(event["restore_s"])
        self.say(f"rank {rank}: step {step} restored from {how}")


def run_demo(*, nodes: int, code: str, lose: int, steps: int, as_json: bool) -> int:
    """Run the demo; return 0 if the two trainings ended bit-identical, else 1.

    Args:
        nodes: number of nodes, with one rank each.
        code: k and m, such as "3+2", or "auto".
        lose: number of nodes to lose.
        steps: number of training steps.
        as_json: print the outcome as a JSON object in the last line.

    Raises:
        InvalidCode, TooFewNodes, InvalidConfig: the arguments do not fit together.
    """
    parsed = parse_code(code, nodes)
    if not 0 <= lose <= nodes:
        raise InvalidConfig(f"--lose {lose} of {nodes} nodes")
    if not 6 <= steps <= 10_000:
        raise InvalidConfig(f"--steps {steps}: 6 to 10,000 are allowed")
    report = DemoReport(ranks=nodes)
    # By SystemExit, `finally` and `with` blocks run, which end agents and trainings.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="ecckpt-demo-") as folder:
        outcome = _play(report, Path(folder), nodes=nodes, code=parsed, lose=lose, steps=steps)
    _table(report, outcome)
    if as_json:
        print(json.dumps(outcome))
    return 0 if outcome["bit_identical"] else 1


def _play(
    report: DemoReport, folder: Path, *, nodes: int, code: Code, lose: int, steps: int
) -> dict[str, Any]:
    arguments = ["--run-name", _RUN, "--steps", str(steps), "--code", f"{code.k}+{code.m}"]
    every = max(2, steps // 4)
    arguments += ["--save-every", str(every)]
    with LocalCluster(nodes=nodes) as cluster:
        report.say(f"{nodes} agents, {code}: any {code.m + 1} nodes may be lost")
        _train_until_loss(report, folder, cluster, arguments, halfway=steps // 2)
        lost = cluster.nodes[:lose]
        cluster.kill(*lost)
        report.say(f"lost {', '.join(lost) or 'no node'}: agents, memory and all ranks killed")
        plan = _survey(cluster)
        restored = _say_what_survived(report, plan)
        reached = report.last_step
        if restored is None:
            return _outcome(report, reached, nodes=nodes, code=code, lost=lost, restored=None)
        if lost:
            fresh = cluster.replace(*lost)
            report.say(f"{len(fresh)} empty nodes replace them: {', '.join(fresh)}")
        resumed = Launch(folder, "again", ranks=nodes, arguments=[*arguments, *_agents(cluster)])
        results = _train_to_end(report, resumed)
    report.say("the same training again, without interruption")
    calm = DemoReport(ranks=nodes, started_s=report.started_s)
    undisturbed = Launch(folder, "calm", ranks=nodes, arguments=[*arguments, "--undisturbed"])
    reference = _train_to_end(calm, undisturbed)
    outcome = _outcome(report, reached, nodes=nodes, code=code, lost=lost, restored=restored)
    return outcome | {"bit_identical": results == reference}


def _train_until_loss(
    report: DemoReport, folder: Path, cluster: LocalCluster, arguments: list[str], *, halfway: int
) -> None:
    """Train until half of the steps are done and an older step is committed; then kill all ranks.

    There are steps after the committed one, so that the loss costs some.
    """
    launch = Launch(folder, "first", ranks=report.ranks, arguments=[*arguments, *_agents(cluster)])
    try:
        launch.follow(
            report.record,
            until=lambda: (
                report.safe_step() >= halfway // 2
                and report.last_step >= max(halfway, report.safe_step() + 1)
            ),
            timeout_s=_TIMEOUT_S,
        )
    finally:
        launch.kill()


def _train_to_end(report: DemoReport, launch: Launch) -> list[Any]:
    try:
        launch.follow(report.record, until=lambda: False, timeout_s=_TIMEOUT_S)
        return launch.results()
    finally:
        launch.kill()


def _agents(cluster: LocalCluster) -> list[str]:
    return ["--agents", ",".join(str(cluster.root(node)) for node in cluster.nodes)]


def _survey(cluster: LocalCluster) -> RecoveryPlan:
    alive = [node for node in cluster.nodes if cluster.root(node).exists()]
    return plan_recovery(_RUN, [cluster.client(node).call(INVENTORY, _RUN) for node in alive])


def _say_what_survived(report: DemoReport, plan: RecoveryPlan) -> Generation | None:
    """Print which generations the remaining nodes can rebuild; return the one to restore."""
    for name, why in plan.rejected().items():
        step = Generation.parse(name).step
        begun = "" if step <= report.safe_step() else " (its save had only begun)"
        report.say(f"generation {name} cannot be rebuilt{begun}: {why}")
    if plan.chosen is None:
        report.say("no generation can be rebuilt")
        return None
    chosen = plan.chosen
    report.say(
        f"generation {chosen.generation} can be rebuilt and survives {chosen.margin} more node "
        "losses"
    )
    return chosen.generation


def _outcome(
    report: DemoReport,
    reached: int,
    *,
    nodes: int,
    code: Code,
    lost: list[str],
    restored: Generation | None,
) -> dict[str, Any]:
    # Durations without a measurement are null: JSON has no NaN.
    stall_s = statistics.median(report.stalls_s) if report.stalls_s else None
    copy_s = statistics.median(report.copies_s) if report.copies_s else None
    return {
        "nodes": nodes,
        "code": f"{code.k}+{code.m}",
        "nodes_lost": len(lost),
        "restored_step": None if restored is None else restored.step,
        "lost_steps": reached + 1 if restored is None else reached - restored.step,
        "bit_identical": False,
        "sources": dict(Counter(report.sources.values())),
        "save_stall_s": stall_s,
        "stall_over_memcpy": stall_s / copy_s if stall_s is not None and copy_s else None,
        "protected_s": max(report.protected_s, default=None),
        "restore_s": max(report.restores_s, default=None),
    }


def _table(report: DemoReport, outcome: dict[str, Any]) -> None:
    ranks = ", ".join(f"{rank}: {source}" for rank, source in sorted(report.sources.items()))
    restored = outcome["restored_step"]
    rows = {
        "nodes lost": f"{outcome['nodes_lost']} of {outcome['nodes']}, code {outcome['code']}",
        "restored": "nothing, no generation survived" if restored is None else f"step {restored}",
        "steps lost": str(outcome["lost_steps"]),
        "state came from": ranks or "-",
        "save stall": f"{_shown(outcome['save_stall_s'], '.3f')} s, "
        f"{_shown(outcome['stall_over_memcpy'], '.1f')} x one copy of these few MB",
        "time to protected": f"{_shown(outcome['protected_s'], '.2f')} s",
        "time to restore": f"{_shown(outcome['restore_s'], '.2f')} s",
        "losses and weights": "bit-identical to the undisturbed training"
        if outcome["bit_identical"]
        else "NOT shown to be identical",
    }
    width = max(map(len, rows))
    print()
    for name, value in rows.items():
        print(f"  {name:{width}}  {value}")
    print(flush=True)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
