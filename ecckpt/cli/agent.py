"""``ecckpt agent``: runs this node's agent in the foreground, or ends it (``--stop``)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ecckpt.client.config import NodeConfig, read_token
from ecckpt.memory.native import prefer


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the parser."""
    node = NodeConfig.from_environment()
    agent = commands.add_parser("agent", help="run this node's agent, or --stop it")
    agent.add_argument("--root", type=Path, default=node.root, help="the agent's folder in a tmpfs")
    agent.add_argument("--node", default=node.node, help="the node's id, unique in the cluster")
    agent.add_argument(
        "--domain", help="failure domain: nodes that fail together (default: the node itself)"
    )
    agent.add_argument(
        "--listen", default=node.listen, metavar="HOST:PORT", help="address for peers"
    )
    agent.add_argument(
        "--token-file", type=Path, default=node.token_file, help="file with the shared credential"
    )
    agent.add_argument(
        "--engine", default=node.engine, help="engine of the codec (default: the fastest one)"
    )
    agent.add_argument(
        "--disk", type=Path, default=node.disk, help="folder on a disk (default: none)"
    )
    agent.add_argument(
        "--scrub-mb-s",
        type=float,
        default=10.0,
        metavar="MB",
        help="rate of the continuous check of files on disk (default: 10; 0: no check)",
    )
    agent.add_argument(
        "--cpus", default=node.cpus, help="CPUs to run on, such as 0-3,8 (default: all)"
    )
    agent.add_argument("--nice", type=int, default=node.nice, help="priority, 0 to 19 (default: 0)")
    agent.add_argument(
        "--pull-mb-s",
        type=float,
        default=node.pull_mb_s,
        metavar="MB",
        help="limit of pulling fragments of peers' saves, per second (default: 0, no limit)",
    )
    agent.add_argument("--stop", action="store_true", help="end the agent that runs in --root")
    agent.set_defaults(act=_agent)


def _agent(arguments: argparse.Namespace) -> int:
    if arguments.stop:
        from ecckpt.client.cluster.local_agent import stop

        stop(arguments.root)
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
        # Several ranks of a node start an agent at the same time. The first one gets the lock and
        # serves all of them; the others end here.
        print(f"ecckpt: {error}", file=sys.stderr)
        return 1
    return 0
