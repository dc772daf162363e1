"""The entry point of ``ecckpt``: parses the command line and runs the subcommand.

Exit status: 0 success, 1 degraded (see each command), 2 error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ecckpt.cli import admin, agent, demo_simulate, export_import, status
from ecckpt.errors import EcckptError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command (default: that of ``sys.argv``) and return its exit status."""
    try:
        parsed = _parser().parse_args(arguments)
        exit_status: int = parsed.act(parsed)
    except (EcckptError, OSError) as error:
        print(f"ecckpt: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ecckpt", description="Erasure-coded checkpoints in the memory of the nodes that train"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (agent, status, admin, export_import, demo_simulate):  # the order in --help
        group.add_commands(commands)
    return parser
