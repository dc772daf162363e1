"""The demo: train over several nodes, lose some of them, continue, and compare bit for bit."""

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
_TIMEOUT_S = 240.0


@dataclass
class Story:
    """What happened so far: filled from events, read by the closing table."""

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
        """One line for the person who watches."""
        print(f"{time.monotonic() - self.started_s:7.1f} s  {text}", flush=True)

    def see(self, event: Event) -> None:
        """Take in one event of one rank; tells when all ranks have reached it."""
        kind, rank, step = event["event"], event["rank"], event["step"]
        act = getattr(self, f"_see_{kind}", None)
        if act is not None:
            act(rank, step, event)

    def safe_step(self) -> int:
        """The newest step that all ranks know as committed; -1 if none."""
        whole = [step for step, ranks in self.committed.items() if len(ranks) == self.ranks]
        return max(whole, default=-1)

    def _see_start(self, rank: int, step: int, event: Event) -> None:
        if rank == 0:
            self.say(f"training processes are up: {event['world']} ranks")

    def _see_step(self, rank: int, step: int, event: Event) -> None:
        self.done_steps[step].add(rank)
        self.losses[step][rank] = float.fromhex(event["loss"])
        if len(self.done_steps[step]) == self.ranks:
            self.last_step = max(self.last_step, step)
            mean = statistics.mean(self.losses[step].values())
            self.say(f"step {step:3}  loss {mean:.4f}")
            self.done_steps[step].clear()

    def _see_saved(self, rank: int, step: int, event: Event) -> None:
        self.stalls_s.append(event["stall_s"])
        self.copies_s.append(event["copy_s"])

    def _see_protected(self, rank: int, step: int, event: Event) -> None:
        self.protected_s.append(event["protected_s"])

    def _see_committed(self, rank: int, step: int, event: Event) -> None:
        self.committed[step].add(rank)
        if len(self.committed[step]) == self.ranks:
            self.say(f"step {step:3}  committed: every shard reached its redundancy")

    def _see_reprotected(self, rank: int, step: int, event: Event) -> None:
        self.say(f"rank {rank}: {event['held']} lost fragments of step {step} made again")

    def _see_failed(self, rank: int, step: int, event: Event) -> None:
        self.say(f"rank {rank}: step {step} was not saved: {event['error']}")

    def _see_restored(self, rank: int, step: int, event: Event) -> None:
        how = "its node's own memory"
        if event["source"] == "peers":
            how = f"peers ({event['pulled_bytes']:,} bytes, {event['rebuilt_fragments']} rebuilt)"
        self.sources[rank] = event["source"]
        self.restores_s.append(event["restore_s"])
        self.say(f"rank {rank}: step {step} restored from {how}")


def run_demo(*, nodes: int, code: str, lose: int, steps: int, as_json: bool) -> int:
    """Run the demo; returns 0 only if the two trainings ended bit-identical.

    Raises ``InvalidCode``, ``TooFewNodes`` or ``InvalidConfig`` for arguments that cannot work.
    """
    parsed = parse_code(code, nodes)
    if not 0 <= lose <= nodes:
        raise InvalidConfig(f"--lose {lose} of {nodes} nodes")
    if not 6 <= steps <= 10_000:
        raise InvalidConfig(f"--steps {steps}: from 6 to 10,000 make a demo")
    story = Story(nodes)
    # Ended from outside, it still takes its agents, processes and files along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="ecckpt-demo-") as folder:
        outcome = _act(story, Path(folder), nodes=nodes, code=parsed, lose=lose, steps=steps)
    _table(story, outcome)
    if as_json:
        print(json.dumps(outcome))
    return 0 if outcome["bit_identical"] else 1


def _act(
    story: Story, folder: Path, *, nodes: int, code: Code, lose: int, steps: int
) -> dict[str, Any]:
    arguments = ["--run-name", _RUN, "--steps", str(steps), "--code", f"{code.k}+{code.m}"]
    every = max(2, steps // 4)
    arguments += ["--save-every", str(every)]
    with LocalCluster(nodes=nodes) as cluster:
        story.say(f"{nodes} agents, {code}: any {code.m + 1} nodes may be lost")
        _until_loss(story, folder, cluster, arguments, halfway=steps // 2)
        lost = cluster.nodes[:lose]
        cluster.kill(*lost)
        story.say(f"lost {', '.join(lost) or 'no node'}: agents and memory gone, all ranks killed")
        plan = _survey(cluster)
        restored = _tell(story, plan)
        reached = story.last_step
        if restored is None:
            return _outcome(story, reached, nodes=nodes, code=code, lost=lost, restored=None)
        if lost:
            fresh = cluster.replace(*lost)
            story.say(f"{len(fresh)} empty nodes take their places: {', '.join(fresh)}")
        again = Launch(folder, "again", ranks=nodes, arguments=[*arguments, *_agents(cluster)])
        results = _to_end(story, again)
    story.say("the same training once more, undisturbed")
    calm = Story(nodes, story.started_s)
    alone = Launch(folder, "calm", ranks=nodes, arguments=[*arguments, "--undisturbed"])
    reference = _to_end(calm, alone)
    outcome = _outcome(story, reached, nodes=nodes, code=code, lost=lost, restored=restored)
    return outcome | {"bit_identical": results == reference}


def _until_loss(
    story: Story, folder: Path, cluster: LocalCluster, arguments: list[str], *, halfway: int
) -> None:
    """Train until a save from about the middle is committed and more steps were done; then kill."""
    launch = Launch(folder, "first", ranks=story.ranks, arguments=[*arguments, *_agents(cluster)])
    try:
        launch.follow(
            story.see,
            until=lambda: (
                story.safe_step() >= halfway // 2
                and story.last_step >= max(halfway, story.safe_step() + 1)
            ),
            timeout_s=_TIMEOUT_S,
        )
    finally:
        launch.kill()


def _to_end(story: Story, launch: Launch) -> list[Any]:
    try:
        launch.follow(story.see, until=lambda: False, timeout_s=_TIMEOUT_S)
        return launch.results()
    finally:
        launch.kill()


def _agents(cluster: LocalCluster) -> list[str]:
    return ["--agents", ",".join(str(cluster.root(node)) for node in cluster.nodes)]


def _survey(cluster: LocalCluster) -> RecoveryPlan:
    alive = [node for node in cluster.nodes if cluster.root(node).exists()]
    return plan_recovery(_RUN, [cluster.client(node).call(INVENTORY, _RUN) for node in alive])


def _tell(story: Story, plan: RecoveryPlan) -> Generation | None:
    """Say what the loss cost, as the survivors' memory tells it."""
    for name, why in plan.rejected().items():
        step = Generation.parse(name).step
        begun = "" if step <= story.safe_step() else " (its save had only begun)"
        story.say(f"generation {name} cannot be rebuilt{begun}: {why}")
    if plan.chosen is None:
        story.say("nothing is left to go back to")
        return None
    chosen = plan.chosen
    story.say(f"generation {chosen.generation} can be rebuilt, {chosen.margin} more nodes could go")
    return chosen.generation


def _outcome(
    story: Story,
    reached: int,
    *,
    nodes: int,
    code: Code,
    lost: list[str],
    restored: Generation | None,
) -> dict[str, Any]:
    # What there was none of is null in JSON, which knows no NaN.
    stall_s = statistics.median(story.stalls_s) if story.stalls_s else None
    copy_s = statistics.median(story.copies_s) if story.copies_s else None
    return {
        "nodes": nodes,
        "code": f"{code.k}+{code.m}",
        "nodes_lost": len(lost),
        "restored_step": None if restored is None else restored.step,
        "lost_steps": reached + 1 if restored is None else reached - restored.step,
        "bit_identical": False,
        "sources": dict(Counter(story.sources.values())),
        "save_stall_s": stall_s,
        "stall_over_memcpy": stall_s / copy_s if stall_s is not None and copy_s else None,
        "protected_s": max(story.protected_s, default=None),
        "restore_s": max(story.restores_s, default=None),
    }


def _table(story: Story, outcome: dict[str, Any]) -> None:
    ranks = ", ".join(f"{rank}: {source}" for rank, source in sorted(story.sources.items()))
    restored = outcome["restored_step"]
    rows = {
        "nodes lost": f"{outcome['nodes_lost']} of {outcome['nodes']}, code {outcome['code']}",
        "went back to": "nothing was left" if restored is None else f"step {restored}",
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
