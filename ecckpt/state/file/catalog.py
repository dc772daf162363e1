"""The catalog of a generation: all its tensors, made from the headers of all its shards.

``client/read/open.py`` and the exports use it. Under one name there is one tensor: the catalog
joins the parts of a global tensor. A tensor that is not sharded should be equal on all ranks that
have it; the reader compares them (``CatalogPiece.copies``). This module reads no tensor bytes.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogPiece:
    """A box of a tensor in one rank's shard.

    Attributes:
        rank: the rank whose shard has it.
        shape: shape of the box.
        offset: where the box begins in the tensor, in elements per dimension.
        begin: where its bytes begin, from the start of the shard.
        copies: the same box in other shards, where nothing guarantees that they are equal. The
            reader compares them.
    """

    rank: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    begin: int
    copies: tuple[CatalogPiece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogTensor:
    """A whole tensor of a generation, and the pieces that it consists of.

    ``problem`` says why the pieces do not make up the tensor; empty if they do.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[CatalogPiece, ...]
    problem: str = ""

    @property
    def size_bytes(self) -> int:
        """Length of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def require(self) -> None:
        """Raise ``StateMismatch`` if the pieces do not make up the tensor."""
        if self.problem:
            raise StateMismatch([f"{self.name}: {self.problem}"])


@dataclass(frozen=True, slots=True)
class Catalog:
    """Tensors by name. ``aliases`` maps each other name of a tied tensor to its name there."""

    tensors: Mapping[str, CatalogTensor]
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _ShardTensor:
    """What one rank's shard has under a name."""

    piece: CatalogPiece
    dtype: torch.dtype
    sharding: Sharding | None


@dataclass(eq=False, slots=True)
class _Boxes:
    """The distinct boxes of one tensor, by (offset, shape) joined in one tuple.

    ``first`` is the piece to read, ``coordinates`` the mesh coordinates of the ranks that have the
    box, ``copies`` the pieces to compare with the first one.
    """

    first: dict[tuple[int, ...], CatalogPiece] = field(default_factory=dict)
    coordinates: dict[tuple[int, ...], set[tuple[int, ...] | None]] = field(default_factory=dict)
    copies: dict[tuple[int, ...], list[CatalogPiece]] = field(default_factory=dict)


def build_catalog(
    shards: Mapping[int, tuple[ShardHeader, ShardNotes]], *, prefer: int | None = None
) -> Catalog:
    """Make the catalog of a generation.

    Args:
        shards: header and notes of each rank's shard, by rank.
        prefer: a rank. Tensors that are not sharded are taken from its shard if it has them, and
            then not compared with those of other ranks.

    Raises:
        CorruptFragment: notes that do not fit their header.
    """
    parts_of: dict[str, list[_ShardTensor]] = {}
    tied: set[str] = set()
    for rank in sorted(shards, key=lambda rank: (rank != prefer, rank)):
        header, notes = shards[rank]
        own = {entry.name: _shard_tensor(rank, entry, header, notes) for entry in header.entries}
        if not own.keys() >= set(notes.aliases.values()) or own.keys() & notes.aliases.keys():
            raise CorruptFragment(f"rank {rank}: the aliases do not match the tensors")
        others = {alias: own[name] for alias, name in notes.aliases.items()}
        for name, part in (own | others).items():
            parts_of.setdefault(name, []).append(part)
        tied |= {*notes.aliases, *notes.aliases.values()}
    tensors = {name: _joined(name, parts, prefer) for name, parts in parts_of.items()}
    # Two names are aliases in the catalog only if they have the same pieces on all ranks. A rank
    # whose part is empty does not tie it, and two names may be tied on some ranks only.
    first: dict[CatalogTensor, str] = {}
    aliases: dict[str, str] = {}
    for name in [name for name in tensors if name in tied]:
        kept = first.setdefault(replace(tensors[name], name=""), name)
        if kept != name:
            aliases[name] = kept
            del tensors[name]
    return Catalog(tensors, aliases)


def _shard_tensor(
    rank: int, entry: TensorEntry, header: ShardHeader, notes: ShardNotes
) -> _ShardTensor:
    dtype, shape = DTYPE_OF.get(entry.code), entry.shape
    if entry.name in notes.dtypes:
        dtype = BYTES_DTYPES.get(notes.dtypes[entry.name])
        shape = shape[:-1]
    if dtype is None or math.prod(shape) * dtype.itemsize != entry.end - entry.begin:
        raise CorruptFragment(
            f"rank {rank}: the dtype of {entry.name!r:.80} is unknown or does not fit its length"
        )
    sharding = notes.shardings.get(entry.name)
    offset = sharding.offset if sharding else None
    begin = header.data_start + entry.begin
    piece = CatalogPiece(rank=rank, shape=shape, offset=offset or (0,) * len(shape), begin=begin)
    return _ShardTensor(piece, dtype, sharding)


def _joined(name: str, parts: list[_ShardTensor], prefer: int | None) -> CatalogTensor:
    sharded = [part for part in parts if part.sharding is not None]
    if len(sharded) not in (0, len(parts)):
        return _impossible(name, parts, "sharded on some ranks, but not on others")
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
            return _impossible(
                name, parts, f"its part on rank {part.piece.rank} is not a single box"
            )
        if not len(part.piece.shape) == len(part.piece.offset) == len(shape):
            raise CorruptFragment(
                f"{name!r:.80} has other dimensions than the tensor it is a part of"
            )
    pieces = _pieces(parts)
    return CatalogTensor(
        name=name, shape=shape, dtype=first.dtype, pieces=pieces, problem=_gaps(pieces, shape)
    )


def _pieces(parts: Sequence[_ShardTensor]) -> tuple[CatalogPiece, ...]:
    """Return one piece per distinct box.

    Ranks at different coordinates of a mesh that have the same box are replicas of one DTensor,
    which torch keeps equal. Two ranks at the same coordinate belong to two meshes (pipeline stages,
    for instance), and nothing keeps their tensors equal: the second one becomes a copy to compare.
    """
    boxes = _Boxes()
    for part in parts:
        piece, sharding = part.piece, part.sharding
        if (sharding and sharding.coordinate is None) or not math.prod(piece.shape):
            continue
        box = (*piece.offset, *piece.shape)
        coordinate = sharding.coordinate if sharding else None
        boxes.first.setdefault(box, piece)
        coordinates = boxes.coordinates.setdefault(box, set())
        if coordinate in coordinates:
            boxes.copies.setdefault(box, []).append(piece)
        coordinates.add(coordinate)
    return tuple(
        replace(piece, copies=tuple(boxes.copies.get(box, ())))
        for box, piece in boxes.first.items()
    )


def _gaps(pieces: Sequence[CatalogPiece], shape: tuple[int, ...]) -> str:
    """Return why the boxes do not fill the tensor exactly, as a grid does; empty if they do."""
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


def _impossible(name: str, parts: Sequence[_ShardTensor], problem: str) -> CatalogTensor:
    first = parts[0]
    return CatalogTensor(
        name=name, shape=first.piece.shape, dtype=first.dtype, pieces=(), problem=problem
    )
