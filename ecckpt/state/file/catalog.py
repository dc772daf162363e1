"""What a whole generation holds, from the headers of all its shards: names, and where they lie.

One name is one tensor: parts of a global tensor are joined, and a tensor that is not sharded is
what the ranks that have it agree on (whoever reads it compares). No bytes of tensors are read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ecckpt.errors import CorruptFragment, StateMismatch
from ecckpt.state.file.header import ShardHeader
from ecckpt.state.file.layout import TensorEntry
from ecckpt.state.file.metadata import ShardNotes
from ecckpt.state.tensors.dtypes import BYTES_DTYPES, DTYPE_OF
from ecckpt.state.tensors.sharding import Sharding


@dataclass(frozen=True, slots=True)
class CatalogPiece:
    """A box of a tensor: ``shape`` elements at ``offset``, ``begin`` bytes into a rank's shard.

    ``copies`` are the same box in other shards that should be equal and may not be.
    """

    rank: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    begin: int
    copies: tuple[CatalogPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor, put together from ``pieces``; ``problem`` says why it cannot be, if so."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[CatalogPiece, ...]
    problem: str = ""

    @property
    def size_bytes(self) -> int:
        """Length of all its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def require(self) -> None:
        """Raise ``StateMismatch`` if there is no such tensor to be had."""
        if self.problem:
            raise StateMismatch([f"{self.name}: {self.problem}"])


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Tensors by name, each stored once; ``aliases`` maps the other names of tied ones to these."""

    tensors: Mapping[str, Whole]
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Found:
    """One rank's entry under a name."""

    piece: CatalogPiece
    dtype: torch.dtype
    sharding: Sharding | None


@dataclass(eq=False, slots=True)
class _Boxes:
    """Distinct boxes of one tensor, with whoever has them at the same place of a mesh."""

    first: dict[tuple[int, ...], CatalogPiece] = field(default_factory=dict)
    places: dict[tuple[int, ...], set[tuple[int, ...] | None]] = field(default_factory=dict)
    doubts: dict[tuple[int, ...], list[CatalogPiece]] = field(default_factory=dict)


def catalogue(
    shards: Mapping[int, tuple[ShardHeader, ShardNotes]], *, prefer: int | None = None
) -> Catalogue:
    """The tensors of a generation, given header and notes of every rank's shard.

    A tensor that is not sharded is taken from ``prefer`` if that rank has it, and then not compared
    with other ranks' tensors of the same name.
    """
    found: dict[str, list[_Found]] = {}
    tied: set[str] = set()
    for rank in sorted(shards, key=lambda rank: (rank != prefer, rank)):
        header, notes = shards[rank]
        own = {entry.name: _found(rank, entry, header, notes) for entry in header.entries}
        if not own.keys() >= set(notes.aliases.values()) or own.keys() & notes.aliases.keys():
            raise CorruptFragment(f"rank {rank}: aliases that do not lead to tensors")
        others = {alias: own[name] for alias, name in notes.aliases.items()}
        for name, part in (own | others).items():
            found.setdefault(name, []).append(part)
        tied |= {*notes.aliases, *notes.aliases.values()}
    tensors = {name: _whole(name, parts, prefer) for name, parts in found.items()}
    # Tied is what is the same bytes on all ranks: an empty part is tied to nothing, and two names
    # may be one tensor on some ranks only.
    first: dict[Whole, str] = {}
    aliases: dict[str, str] = {}
    for name in [name for name in tensors if name in tied]:
        kept = first.setdefault(replace(tensors[name], name=""), name)
        if kept != name:
            aliases[name] = kept
            del tensors[name]
    return Catalogue(tensors, aliases)


def _found(rank: int, entry: TensorEntry, header: ShardHeader, notes: ShardNotes) -> _Found:
    dtype, shape = DTYPE_OF.get(entry.code), entry.shape
    if entry.name in notes.dtypes:
        dtype = BYTES_DTYPES.get(notes.dtypes[entry.name])
        shape = shape[:-1]
    if dtype is None or math.prod(shape) * dtype.itemsize != entry.end - entry.begin:
        raise CorruptFragment(f"rank {rank}: {entry.name!r:.80} has a dtype that is none")
    sharding = notes.shardings.get(entry.name)
    offset = sharding.offset if sharding else None
    begin = header.data_start + entry.begin
    return _Found(CatalogPiece(rank, shape, offset or (0,) * len(shape), begin), dtype, sharding)


def _whole(name: str, parts: list[_Found], prefer: int | None) -> Whole:
    sharded = [part for part in parts if part.sharding is not None]
    if len(sharded) not in (0, len(parts)):
        return _impossible(name, parts, "sharded on some ranks, not on others")
    if not sharded and parts[0].piece.rank == prefer:
        parts = parts[:1]
    first = parts[0]
    shape = first.sharding.shape if first.sharding else first.piece.shape
    for part in parts:
        other = part.sharding.shape if part.sharding else part.piece.shape
        if (other, part.dtype) != (shape, first.dtype):
            return _impossible(
                name,
                parts,
                f"{first.dtype} of shape {list(shape)} on rank {first.piece.rank}, "
                f"{part.dtype} of shape {list(other)} on rank {part.piece.rank}",
            )
        if part.sharding is None or part.sharding.coordinate is None:
            continue
        if part.sharding.offset is None:
            return _impossible(name, parts, f"its part on rank {part.piece.rank} is no single box")
        if not len(part.piece.shape) == len(part.piece.offset) == len(shape):
            raise CorruptFragment(f"{name!r:.80} has another rank than the tensor it is a part of")
    pieces = _pieces(parts)
    problem = _gaps(pieces, shape)
    return Whole(name, shape, first.dtype, pieces, problem)


def _pieces(parts: Sequence[_Found]) -> tuple[CatalogPiece, ...]:
    """One piece per box. Two ranks at one place of a mesh are in two meshes: to be compared."""
    boxes = _Boxes()
    for part in parts:
        piece, sharding = part.piece, part.sharding
        if (sharding and sharding.coordinate is None) or not math.prod(piece.shape):
            continue
        box = (*piece.offset, *piece.shape)
        place = sharding.coordinate if sharding else None
        boxes.first.setdefault(box, piece)
        places = boxes.places.setdefault(box, set())
        if place in places:
            boxes.doubts.setdefault(box, []).append(piece)
        places.add(place)
    return tuple(
        CatalogPiece(
            piece.rank, piece.shape, piece.offset, piece.begin, tuple(boxes.doubts.get(box, ()))
        )
        for box, piece in boxes.first.items()
    )


def _gaps(pieces: Sequence[CatalogPiece], shape: tuple[int, ...]) -> str:
    """What is wrong with the boxes; empty when they fill the tensor exactly, as a grid does."""
    have, need = sum(math.prod(piece.shape) for piece in pieces), math.prod(shape)
    if have < need:
        return f"{have} of {need} elements were saved"
    cells = min(need, 1)
    for dim, extent in enumerate(shape):
        sizes: dict[int, int] = {}
        for piece in pieces:
            sizes[piece.offset[dim]] = piece.shape[dim]
        if any(sizes[piece.offset[dim]] != piece.shape[dim] for piece in pieces):
            return f"its parts overlap in dimension {dim}"
        end = 0
        for start in sorted(sizes):
            if start != end:
                return f"its parts leave gaps in dimension {dim}"
            end += sizes[start]
        if pieces and end != extent:
            return f"its parts end at {end} of {extent} in dimension {dim}"
        cells *= len(sizes)
    return "" if len(pieces) == cells else f"{len(pieces)} parts on a grid of {cells}"


def _impossible(name: str, parts: Sequence[_Found], problem: str) -> Whole:
    first = parts[0]
    return Whole(name, first.piece.shape, first.dtype, (), problem)
