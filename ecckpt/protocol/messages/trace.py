"""Spans: how long the phases of saves and restores took. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.ids import ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One phase of a save or restore: when it began by the node's clock, and how long it took.

    ``index`` is the fragment that it was about, or -1.
    """

    name: str
    shard: ShardId
    index: int
    began_unix_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Spans:
    """A rank sends its spans to its node's agent."""

    run: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """The last few thousand spans of one node: of its ranks and of its agent."""

    node: str
    ranks: tuple[Span, ...]
    agent: tuple[Span, ...]
