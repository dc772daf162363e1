"""Where the time of saves and restores went. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.ids import ShardId


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of a save or restore: when it began by the node's clock, and how long it took.

    ``index`` is the fragment it was about, or -1.
    """

    name: str
    shard: ShardId
    index: int
    began_unix_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Spans:
    """A rank tells its node's agent where its time went."""

    run: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Where time went on one node: in its ranks and in its agent, the last few thousand spans."""

    node: str
    ranks: tuple[Span, ...]
    agent: tuple[Span, ...]
