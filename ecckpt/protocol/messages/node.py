"""The identity of an agent, and the answers that only say whether a request was done. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """The identity of an agent. ``instance`` changes whenever the agent's memory is a new one."""

    node: str
    instance: str
    domain: str
    address: str
    root: str
    protocol_version: int
    format_version: int
    pid: int


@dataclass(frozen=True, slots=True)
class Identities:
    """Full names of the runs of one name that an agent has or had generations of.

    ``awaits_disk``: there may be more on the disk, which is still being read.
    """

    runs: tuple[str, ...]
    awaits_disk: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was refused: the error's class name, its text and its whole numbers."""

    error: str
    message: str
    facts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Done:
    """The empty answer: the request was done."""
