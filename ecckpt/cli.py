"""The ``ecckpt`` command. Exit status: 0 fine, 1 degraded or not equal, 2 error."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ecckpt.config import NodeConfig, read_token
from ecckpt.errors import AgentUnreachable, EcckptError
from ecckpt.native import prefer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        parsed = _parser().parse_args(arguments)
        status: int = parsed.act(parsed)
    except EcckptError as error:
        print(f"ecckpt: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ecckpt", description="Erasure-coded checkpoints in the memory of the nodes that train"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_agent(commands)
    _add_looks(commands)
    _add_demo(commands)
    return parser


def _add_agent(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    node = NodeConfig.from_environment()
    agent = commands.add_parser("agent", help="run this node's agent, or --stop it")
    agent.add_argument("--root", type=Path, default=node.root, help="its folder, in a tmpfs")
    agent.add_argument("--node", default=node.node, help="the node's id, unique in the cluster")
    agent.add_argument("--domain", help="what it fails together with (default: only itself)")
    agent.add_argument("--listen", default=node.listen, metavar="HOST:PORT", help="for its peers")
    agent.add_argument("--token-file", type=Path, default=node.token_file, help="shared credential")
    agent.add_argument("--engine", default=node.engine, help="of the codec (default: the best one)")
    agent.add_argument("--stop", action="store_true", help="end the agent that runs in --root")
    agent.set_defaults(act=_agent)


def _add_looks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    node = NodeConfig.from_environment()
    status = commands.add_parser("status", help="what this node's agent holds")
    status.add_argument("--root", type=Path, default=node.root)
    status.add_argument("--json", action="store_true")
    status.set_defaults(act=_status)
    plan = commands.add_parser("plan-restore", help="what a restore would find, and take")
    plan.add_argument("run")
    plan.add_argument("agents", nargs="+", metavar="HOST:PORT", help="agents to ask")
    plan.add_argument("--without", nargs="*", default=[], metavar="NODE", help="as if these died")
    plan.add_argument("--token-file", type=Path, default=node.token_file)
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(act=_plan_restore)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="train over several nodes, lose some, continue exactly")
    demo.add_argument("--nodes", type=int, default=6, help="nodes, with one rank each")
    demo.add_argument("--code", default="3+2", metavar="K+M")
    demo.add_argument("--lose", type=int, default=3, help="nodes to lose at once")
    demo.add_argument("--steps", type=int, default=12, help="training steps")
    demo.add_argument("--json", action="store_true", help="the last line is one JSON object")
    demo.set_defaults(act=_demo)


def _agent(arguments: argparse.Namespace) -> int:
    if arguments.stop:
        from ecckpt.agents import local_client

        local_client(arguments.root).shutdown()
        return 0
    from ecckpt.agent.daemon import AlreadyRunning, run_agent

    prefer(arguments.engine)
    try:
        run_agent(
            arguments.root,
            node=arguments.node,
            domain=arguments.domain or arguments.node,
            listen=arguments.listen,
            token=read_token(arguments.token_file),
        )
    except AlreadyRunning as error:
        # Several ranks of a node start it at once; whoever is first serves them all.
        print(f"ecckpt: {error}", file=sys.stderr)
        return 1
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from ecckpt.agents import local_client

    status = local_client(arguments.root).status()
    if arguments.json:
        print(json.dumps(status))
        return 0
    print(f"node {status['node']} (domain {status['domain']}) at {status['address']}")
    for run, facts in status["runs"].items():
        print(
            f"  run {run}: committed {facts['committed'] or 'nothing'}, "
            f"{facts['home_copies']} home copies, {facts['fragments']} fragments, "
            f"{facts['used_bytes']:,} bytes"
        )
        for name, why in facts["rejected"].items():
            print(f"    not adopted: {name}: {why}")
    return 0


def _plan_restore(arguments: argparse.Namespace) -> int:
    from ecckpt.client import AgentClient
    from ecckpt.recovery import plan_recovery

    token = read_token(arguments.token_file)
    inventories = []
    for address in arguments.agents:
        try:
            inventories.append(AgentClient(address, token).inventory(arguments.run))
        except AgentUnreachable as error:  # what people look at a plan for
            if len(arguments.agents) == 1:
                raise
            print(f"no answer: {error}", file=sys.stderr)
    left = [each for each in inventories if each.node not in arguments.without]
    plan = plan_recovery(arguments.run, left)
    chosen = plan.chosen
    if arguments.json:
        rows = [
            {"generation": str(report.generation), "state": report.state, "margin": report.margin}
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
            print(f"nothing of run {arguments.run!r} on {len(left)} nodes")
    return 0 if chosen and chosen.state == "complete" else 1 if chosen else 2


def _demo(arguments: argparse.Namespace) -> int:
    from ecckpt.demo.show import run_demo

    return run_demo(
        nodes=arguments.nodes,
        code=arguments.code,
        lose=arguments.lose,
        steps=arguments.steps,
        as_json=arguments.json,
    )
