"""The ``ecckpt`` command."""

from ecckpt.cli.command import main

__all__ = ["main"]
