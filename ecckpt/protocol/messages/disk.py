"""Disks: what shall be written and what may go, and whether all of a file is as it was. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.ids import Generation, ShardId


@dataclass(frozen=True, slots=True)
class Store:
    """Write to disk what you have of this generation; asked again, it tells how far that is.

    ``disk_bytes`` is the run's budget on the node's disk (0: the agent's default); ``discard``
    names generations whose storing the sender gave up.
    """

    run: str
    generation: Generation
    disk_bytes: int
    discard: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A home copy (index -1) or fragment of a rank's shard."""

    rank: int
    index: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What of the generation is on this node's disk, and survives a loss of power.

    ``disk``: whether there is one. ``waiting_bytes`` are still to be written; ``problems`` says
    what will not be.
    """

    disk: bool
    pieces: tuple[Piece, ...]
    waiting_bytes: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Retain:
    """These generations, oldest first, are on disk everywhere and stay.

    All others that are older than the last of them may go from disk. ``writer`` is the timeline of
    whoever says so.
    """

    run: str
    writer: int
    generations: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """Check every block of a home copy (index -1) or fragment, in memory or on ``disk``.

    At most ``bytes_per_s`` are read (0: as fast as it goes).
    """

    shard: ShardId
    index: int
    disk: bool
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Block:
    """One block: which fragment's, and which row."""

    index: int
    row: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Blocks that fail their checksum, and what else is wrong with the file, if anything."""

    bad: tuple[Block, ...]
    problem: str
