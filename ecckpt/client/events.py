"""What the client's protocols report: for the log, callbacks, and the simulator's checks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ecckpt.errors import EcckptError
from ecckpt.format.ids import Generation, ShardId


@dataclass(frozen=True, slots=True)
class Message:
    """A line for the log, at a level of ``logging``."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class SaveCommitted:
    """A rank learned that all shards of a generation are protected."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """A rank's save was given up, or skipped."""

    shard: ShardId
    error: EcckptError


@dataclass(frozen=True, slots=True)
class RestorePlanned:
    """Rank 0 chose a generation, or none, from the inventories of the nodes that answered."""

    timeline: int
    generation: Generation | None
    answering: Collection[str]
    is_first: bool  # nothing was refused before


@dataclass(frozen=True, slots=True)
class GenerationRefused:
    """All ranks pass over a generation that failed twice."""

    generation: Generation
    answering: Collection[str]
    why: str


@dataclass(frozen=True, slots=True)
class RestoreDecided:
    """All ranks can load; agents are about to be told so.

    ``on_purpose``: the generation was asked for by name.
    """

    timeline: int
    generation: Generation
    on_purpose: bool


@dataclass(frozen=True, slots=True)
class TimelineBegun:
    """All ranks go on from a generation, or from the start; agents were told of a roll-back."""

    timeline: int
    generation: Generation | None
    on_purpose: bool


Event = (
    Message
    | SaveCommitted
    | SaveFailure
    | RestorePlanned
    | GenerationRefused
    | RestoreDecided
    | TimelineBegun
)
