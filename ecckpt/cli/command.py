"""Which command, and its exit status: 0 fine, 1 degraded or not equal, 2 error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ecckpt.cli import admin as checks
from ecckpt.cli import agent
from ecckpt.cli import demo_simulate as trials
from ecckpt.cli import export_import as exchange
from ecckpt.cli import status as looks
from ecckpt.errors import EcckptError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        parsed = _parser().parse_args(arguments)
        status: int = parsed.act(parsed)
    except (EcckptError, OSError) as error:
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
    for group in (agent, looks, checks, exchange, trials):
        group.add(commands)
    return parser
