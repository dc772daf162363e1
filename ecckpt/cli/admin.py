"""``ecckpt verify``, ``repair`` and ``forget``: check, rebuild or drop what agents hold of a run.

The work is in ``client/admin``. The keys of ``--json`` are the field names of its results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ecckpt.cli.argument_types import size_of
from ecckpt.client.config import NodeConfig, read_token

if TYPE_CHECKING:
    from ecckpt.client.admin.forget import Holding


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommands to the parser."""
    node = NodeConfig.from_environment()
    verify = commands.add_parser("verify", help="check all blocks of a run against their checksums")
    verify.add_argument("run")
    verify.add_argument(
        "agents", nargs="*", metavar="HOST:PORT", help="agents (default: the agent in --root)"
    )
    verify.add_argument("--root", type=Path, default=node.root, help="folder of an agent")
    verify.add_argument(
        "--max-mb-s",
        type=float,
        default=0,
        metavar="MB",
        help="limit of what each agent reads per second (default: 0, no limit)",
    )
    verify.add_argument("--token-file", type=Path, default=node.token_file)
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(act=_verify)
    repair = commands.add_parser("repair", help="rebuild the missing fragments of a run")
    repair.add_argument("run")
    repair.add_argument("agents", nargs="+", metavar="HOST:PORT", help="agents of all its nodes")
    repair.add_argument("--dry-run", action="store_true", help="only print the planned steps")
    repair.add_argument(
        "--memory-bytes", type=size_of, default=0, help="the run's budget on a node"
    )
    repair.add_argument("--token-file", type=Path, default=node.token_file)
    repair.add_argument("--json", action="store_true")
    repair.set_defaults(act=_repair)
    forget = commands.add_parser(
        "forget",
        help="drop a finished run from all its agents",
        description="Without --yes it only prints what the agents hold. If the run is still "
        "training, it goes on and its saves fail.",
    )
    forget.add_argument("run")
    forget.add_argument("agents", nargs="+", metavar="HOST:PORT", help="agents of all its nodes")
    forget.add_argument("--yes", action="store_true", help="drop the run")
    forget.add_argument("--token-file", type=Path, default=node.token_file)
    forget.add_argument("--json", action="store_true")
    forget.set_defaults(act=_forget)


def _verify(arguments: argparse.Namespace) -> int:
    from ecckpt.client.admin.verify import verify_run
    from ecckpt.client.cluster.local_agent import local_client
    from ecckpt.protocol.agent_client import AgentClient

    token = read_token(arguments.token_file)
    agents = [AgentClient(address, token) for address in arguments.agents]
    checked = verify_run(
        arguments.run,
        agents or [local_client(arguments.root)],
        bytes_per_s=int(arguments.max_mb_s * 1e6),
    )
    if arguments.json:
        print(json.dumps([asdict(node) for node in checked]))
    else:
        for node in checked:
            print(
                f"{node.node}: {node.silent or f'{node.files} files, {node.total_bytes:,} bytes'}"
            )
            for line in node.bad:
                print(f"  {line}")
    if not any(node.files for node in checked):
        print(f"ecckpt: nothing of run {arguments.run!r} was found", file=sys.stderr)
        return 2
    return 1 if any(node.bad or node.silent for node in checked) else 0


def _repair(arguments: argparse.Namespace) -> int:
    from ecckpt.client.admin.repair import repair_run
    from ecckpt.protocol.agent_client import AgentClient

    token = read_token(arguments.token_file)
    agents = [AgentClient(address, token) for address in arguments.agents]
    done = repair_run(
        arguments.run, agents, memory_bytes=arguments.memory_bytes, dry_run=arguments.dry_run
    )
    if arguments.json:
        print(json.dumps(asdict(done) | {"generation": str(done.generation)}))
    else:
        print(
            f"{done.generation}: {done.fragments} fragments to rebuild, {done.homes} shards to "
            f"decode; survived {done.margin_before} more node losses, now {done.margin}"
        )
        for step in done.steps if arguments.dry_run else ():
            print(f"  {step}")
        for problem in done.problems:
            print(f"  {problem}")
    return 0 if done.complete and not done.problems else 1


def _forget(arguments: argparse.Namespace) -> int:
    from ecckpt.client.admin.forget import forget_run, holdings
    from ecckpt.protocol.agent_client import AgentClient

    token = read_token(arguments.token_file)
    agents = [AgentClient(address, token) for address in arguments.agents]
    if arguments.yes:
        held = forget_run(arguments.run, agents)
    else:
        held, _ = holdings(arguments.run, agents)
    if arguments.json:
        fields = [asdict(holding) | {"newest": str(holding.newest or "")} for holding in held]
        print(json.dumps({"dropped": arguments.yes, "nodes": fields}))
    else:
        for holding in held:
            print(f"{holding.node}: {_describe(holding)}")
        if not arguments.yes:
            print("nothing was dropped; use --yes to drop the run")
    if all(holding.empty for holding in held):
        print(f"ecckpt: nothing of run {arguments.run!r} was found", file=sys.stderr)
        return 2
    return 1 if any(holding.problem for holding in held) else 0


def _describe(holding: Holding) -> str:
    if holding.empty:
        return "nothing"
    age_s = max(0, int(time.time()) - holding.saved_unix_s)
    newest = f", newest {holding.newest}, saved {age_s:,} s ago" if holding.saved_unix_s else ""
    amount = f"{holding.memory_bytes:,} bytes in memory, {holding.disk_bytes:,} on disk"
    return f"{amount}{newest}{f' ({holding.problem})' if holding.problem else ''}"
