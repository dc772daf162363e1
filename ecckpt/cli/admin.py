"""What agents hold of a run: check it, make it whole, drop it (verify, repair, forget)."""

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


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    node = NodeConfig.from_environment()
    verify = commands.add_parser("verify", help="check every block that agents hold of a run")
    verify.add_argument("run")
    verify.add_argument("agents", nargs="*", metavar="HOST:PORT", help="(default: that of --root)")
    verify.add_argument("--root", type=Path, default=node.root)
    verify.add_argument(
        "--max-mb-s", type=float, default=0, metavar="MB", help="read by each agent"
    )
    verify.add_argument("--token-file", type=Path, default=node.token_file)
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(act=_verify)
    repair = commands.add_parser("repair", help="make again what nodes lack of a run")
    repair.add_argument("run")
    repair.add_argument("agents", nargs="+", metavar="HOST:PORT", help="of all its nodes")
    repair.add_argument("--dry-run", action="store_true", help="only say what would be done")
    repair.add_argument(
        "--memory-bytes", type=size_of, default=0, help="the run's budget on a node"
    )
    repair.add_argument("--token-file", type=Path, default=node.token_file)
    repair.add_argument("--json", action="store_true")
    repair.set_defaults(act=_repair)
    forget = commands.add_parser(
        "forget",
        help="drop a run that is over from all its agents",
        description="Without --yes: only say what would be dropped. A run that is still at work "
        "goes on without being saved.",
    )
    forget.add_argument("run")
    forget.add_argument("agents", nargs="+", metavar="HOST:PORT", help="of all its nodes")
    forget.add_argument("--yes", action="store_true", help="drop it")
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
        print(json.dumps([asdict(each) for each in checked]))
    else:
        for each in checked:
            print(
                f"{each.node}: {each.silent or f'{each.files} files, {each.total_bytes:,} bytes'}"
            )
            for line in each.bad:
                print(f"  {line}")
    if not any(each.files for each in checked):
        print(f"ecckpt: nothing of run {arguments.run!r} was found", file=sys.stderr)
        return 2
    return 1 if any(each.bad or each.silent for each in checked) else 0


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
            f"{done.generation}: {done.fragments} fragments to make again, {done.homes} shards "
            f"decoded; survived {done.margin_before} more node losses, now {done.margin}"
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
        found = forget_run(arguments.run, agents)
    else:
        found, _ = holdings(arguments.run, agents)
    if arguments.json:
        fields = [asdict(each) | {"newest": str(each.newest or "")} for each in found]
        print(json.dumps({"dropped": arguments.yes, "nodes": fields}))
    else:
        for each in found:
            print(f"{each.node}: {_had(each)}")
        if not arguments.yes:
            print("nothing was dropped; --yes drops it")
    if all(each.empty for each in found):
        print(f"ecckpt: nothing of run {arguments.run!r} was found", file=sys.stderr)
        return 2
    return 1 if any(each.problem for each in found) else 0


def _had(each: Holding) -> str:
    if each.empty:
        return "nothing"
    age_s = max(0, int(time.time()) - each.saved_unix_s)
    newest = f", newest {each.newest}, saved {age_s:,} s ago" if each.saved_unix_s else ""
    amount = f"{each.memory_bytes:,} bytes in memory, {each.disk_bytes:,} on disk"
    return f"{amount}{newest}{f' ({each.problem})' if each.problem else ''}"
