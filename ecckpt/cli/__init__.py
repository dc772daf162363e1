"""The ``ecckpt`` command. One file per group of subcommands; ``command.py`` has the entry point.

Commands import what they need when they run: ``ecckpt agent`` must not load torch, and the others
must start fast.
"""

from ecckpt.cli.command import main

__all__ = ["main"]
