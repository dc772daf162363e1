"""``ecckpt status``, ``plan-restore`` and ``trace``: read-only views of agents and their runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ecckpt.client.config import NodeConfig, read_token
from ecckpt.errors import AgentUnreachable
from ecckpt.protocol.verbs import INVENTORY, TRACE


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommands to the parser."""
    node = NodeConfig.from_environment()
    status = commands.add_parser("status", help="show what this node's agent holds")
    status.add_argument("--root", type=Path, default=node.root, help="folder of the agent")
    status.add_argument("--json", action="store_true")
    status.set_defaults(act=_status)
    plan = commands.add_parser(
        "plan-restore", help="show a run's generations and which one a restore would take"
    )
    plan.add_argument("run")
    plan.add_argument("agents", nargs="+", metavar="HOST:PORT", help="agents of all its nodes")
    plan.add_argument(
        "--without", nargs="*", default=[], metavar="NODE", help="plan as if these nodes were lost"
    )
    plan.add_argument(
        "--without-memory",
        action="store_true",
        help="plan as after a loss of power: with the files on disk only",
    )
    plan.add_argument("--token-file", type=Path, default=node.token_file)
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(act=_plan_restore)
    trace = commands.add_parser(
        "trace", help="write the phases of the last saves and restores as a Perfetto trace"
    )
    trace.add_argument("run")
    trace.add_argument("agents", nargs="+", metavar="HOST:PORT", help="agents of all its nodes")
    trace.add_argument("--out", type=Path, help="file to write (default: standard output)")
    trace.add_argument("--token-file", type=Path, default=node.token_file)
    trace.set_defaults(act=_trace)


def _status(arguments: argparse.Namespace) -> int:
    from ecckpt.client.cluster.local_agent import local_client

    status = local_client(arguments.root).status()
    if arguments.json:
        print(json.dumps(status))
        return 0
    print(f"node {status['node']} (domain {status['domain']}) at {status['address']}")
    for run, facts in status["runs"].items():
        print(
            f"  run {run}: committed {facts['committed'] or 'nothing'}, "
            f"{facts['home_copies']} home copies, {facts['fragments']} fragments, "
            f"{facts['used_bytes']:,} bytes{_age(facts['saved_unix_s'])}"
        )
        _print_guard(facts["guard"])
        _print_disk(facts)
        for name, why in facts["damaged"].items():
            print(f"    damaged: {name}: {why}")
        for name, why in facts["rejected"].items():
            print(f"    not adopted: {name}: {why}")
    if status["disk"]["problem"]:
        print(f"  disk: {status['disk']['problem']}")
    return 0


def _age(saved_unix_s: int) -> str:
    """How old the newest save in memory is: a run that is over shows here (``ecckpt forget``)."""
    if not saved_unix_s:
        return ""
    minutes = max(0, int(time.time()) - saved_unix_s) // 60
    return f", last save {minutes // 60} h {minutes % 60:02} min ago"


def _print_guard(guard: dict[str, Any] | None) -> None:
    if guard is None:
        return
    margin = "not known yet" if guard["margin"] is None else guard["margin"]
    print(f"    shards of this node's ranks survive further node losses: {margin}")
    if guard["missing"]:
        lost = f", lost nodes: {', '.join(guard['lost'])}" if guard["lost"] else ""
        repairing = f", being repaired: {guard['repairing']}" if guard["repairing"] else ""
        print(f"    missing fragments: {guard['missing']}{lost}{repairing}")
    if guard["problem"]:
        print(f"    last repair: {guard['problem']}")


def _print_disk(facts: dict[str, Any]) -> None:
    if facts["disk_files"] or facts["stored"]:
        newest = facts["stored"][-1] if facts["stored"] else "nothing"
        print(
            f"    on disk: stored everywhere {newest}, here {facts['disk_files']} files, "
            f"{facts['disk_bytes']:,} bytes, {facts['disk_waiting_bytes']:,} bytes to write"
        )
    for problem in facts["disk_problems"]:
        print(f"    not on disk: {problem}")


def _plan_restore(arguments: argparse.Namespace) -> int:
    from ecckpt.format.header_columns import Headers
    from ecckpt.policy.survival import Inventory, plan_recovery
    from ecckpt.protocol.agent_client import AgentClient
    from ecckpt.protocol.fan_out import call_each

    token = read_token(arguments.token_file)

    def ask(address: str) -> Inventory | AgentUnreachable:
        try:
            return AgentClient(address, token).call(INVENTORY, arguments.run)
        except AgentUnreachable as error:  # a lost node: the plan is made with the others
            if len(arguments.agents) == 1:
                raise
            return error

    inventories = []
    for answer in call_each(arguments.agents, ask):
        if isinstance(answer, AgentUnreachable):
            print(f"no answer: {answer}", file=sys.stderr)
        else:
            inventories.append(answer)
    left = [inventory for inventory in inventories if inventory.node not in arguments.without]
    if arguments.without_memory:
        left = [replace(inventory, headers=Headers.from_headers(())) for inventory in left]
    plan = plan_recovery(arguments.run, left)
    chosen = plan.chosen
    if arguments.json:
        rows = [
            {
                "generation": str(report.generation),
                "state": report.state,
                "margin": report.margin,
                "abandoned": report.abandoned is not None,
            }
            for report in plan.generations
        ]
        print(
            json.dumps({"chosen": str(chosen.generation) if chosen else None, "generations": rows})
        )
    else:
        for report in plan.generations:
            mark = "*" if report is chosen else " "
            detail = report.why() or f"survives {report.margin} more node losses"
            print(f"{mark} {report.generation}  {report.state:11}  {detail}")
        if not plan.generations:
            print(f"no generation of run {arguments.run!r} on {len(left)} nodes")
    return 0 if chosen and chosen.state == "complete" else 1 if chosen else 2


def _trace(arguments: argparse.Namespace) -> int:
    from ecckpt.protocol.agent_client import AgentClient
    from ecckpt.protocol.tracing import chrome_trace

    token = read_token(arguments.token_file)
    traces = []
    for address in arguments.agents:
        try:
            traces.append(AgentClient(address, token).call(TRACE, arguments.run))
        except AgentUnreachable as error:
            print(f"no answer: {error}", file=sys.stderr)
    if not traces:
        return 2
    text = json.dumps(chrome_trace(traces))
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text)
        spans = sum(len(trace.ranks) + len(trace.agent) for trace in traces)
        print(f"{spans} spans of {len(traces)} nodes written to {arguments.out}")
    return 0 if len(traces) == len(arguments.agents) else 1
