"""Converters for ``type=`` of argparse; each raises ``ArgumentTypeError`` for a bad text."""

from __future__ import annotations

import argparse
import re


def tie_of(text: str) -> tuple[str, str]:
    """Parse NAME=STORED into a pair."""
    name, equals, stored = text.partition("=")
    if not (name and equals and stored):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=STORED")
    return name, stored


def size_of(text: str) -> int:
    """Parse a size such as 5GB (10^9) or 512MiB (2^20) into bytes."""
    match = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]i?)?B?", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size (such as 5GB or 512MiB)")
    power = " KMGT".index((match[2] or " ")[0])
    size: int = int(match[1]) * (1024 if (match[2] or "").endswith("i") else 1000) ** power
    return size


def seeds_of(text: str) -> int:
    """Parse a number of seeds, at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seeds")
    return int(text)


def nodes_of(text: str) -> int:
    """Parse a number of simulated nodes, 3 to 2048."""
    if not text.isdecimal() or not 3 <= int(text) <= 2048:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes from 3 to 2048")
    return int(text)
