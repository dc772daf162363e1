"""Who an agent is, and the answers that say only whether something was done. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Who an agent is. ``instance`` is new whenever the agent's memory is."""

    node: str
    instance: str
    domain: str
    address: str
    root: str
    protocol_version: int
    format_version: int
    pid: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not done: the error's class name, its text and its whole numbers."""

    error: str
    message: str
    facts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Done:
    """The empty answer."""
