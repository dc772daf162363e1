"""Disks: write a generation, remove older ones, verify a file. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.ids import Generation, RunWriter, ShardId


@dataclass(frozen=True, slots=True)
class Store:
    """Write what this node has of the generation to disk; repeated, it asks for the progress.

    ``disk_bytes`` is the run's budget on the node's disk (0: the agent's default). ``discard``
    names generations whose storing the sender has given up.
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
    """The files of the generation on this node's disk; they survive a loss of power.

    ``disk``: whether the node has a disk. ``waiting_bytes`` are still to be written. ``problems``
    says why some files will not be written.
    """

    disk: bool
    pieces: tuple[Piece, ...]
    waiting_bytes: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Retain:
    """These generations, oldest first, are on disk everywhere and are kept.

    All others that are older than the last of them may be removed from disk.
    """

    run: str
    writer: RunWriter
    generations: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """Verify every block of a home copy (index -1) or fragment, in memory or on ``disk``.

    At most ``bytes_per_s`` are read (0: as fast as possible).
    """

    shard: ShardId
    index: int
    disk: bool
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Block:
    """One block: the index of its fragment, and its row."""

    index: int
    row: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The blocks that fail their checksum, and another problem of the file, if there is one."""

    bad: tuple[Block, ...]
    problem: str
