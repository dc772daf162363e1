"""``ecckpt agent``: run this node's agent, or end it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ecckpt.client.config import NodeConfig, read_token
from ecckpt.memory.native import prefer


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    node = NodeConfig.from_environment()
    agent = commands.add_parser("agent", help="run this node's agent, or --stop it")
    agent.add_argument("--root", type=Path, default=node.root, help="its folder, in a tmpfs")
    agent.add_argument("--node", default=node.node, help="the node's id, unique in the cluster")
    agent.add_argument("--domain", help="what it fails together with (default: only itself)")
    agent.add_argument("--listen", default=node.listen, metavar="HOST:PORT", help="for its peers")
    agent.add_argument("--token-file", type=Path, default=node.token_file, help="shared credential")
    agent.add_argument("--engine", default=node.engine, help="of the codec (default: the best one)")
    agent.add_argument(
        "--disk", type=Path, default=node.disk, help="folder on disk (default: none)"
    )
    agent.add_argument(
        "--scrub-mb-s",
        type=float,
        default=10.0,
        metavar="MB",
        help="how fast files on disk are checked, all the time (default: 10; 0: not)",
    )
    agent.add_argument("--cpus", default=node.cpus, help="to run on, such as 0-3,8 (default: all)")
    agent.add_argument("--nice", type=int, default=node.nice, help="0 to 19 (default: 0)")
    agent.add_argument(
        "--pull-mb-s",
        type=float,
        default=node.pull_mb_s,
        metavar="MB",
        help="how fast it takes fragments of its peers' saves (default: 0, no limit)",
    )
    agent.add_argument("--stop", action="store_true", help="end the agent that runs in --root")
    agent.set_defaults(act=_agent)


def _agent(arguments: argparse.Namespace) -> int:
    if arguments.stop:
        from ecckpt.client.cluster.local_agent import local_client

        local_client(arguments.root).shutdown()
        return 0
    from ecckpt.agent.runtime.cpu_limits import ProcessLimits
    from ecckpt.agent.runtime.daemon import AlreadyRunning, run_agent

    prefer(arguments.engine)
    try:
        run_agent(
            arguments.root,
            node=arguments.node,
            domain=arguments.domain or arguments.node,
            listen=arguments.listen,
            token=read_token(arguments.token_file),
            disk=arguments.disk,
            scrub_bytes_per_s=arguments.scrub_mb_s * 1e6,
            limits=ProcessLimits(arguments.cpus, arguments.nice, arguments.pull_mb_s * 1e6),
        )
    except AlreadyRunning as error:
        # Several ranks of a node start it at once; whoever is first serves them all.
        print(f"ecckpt: {error}", file=sys.stderr)
        return 1
    return 0
