"""The complete files that are really there, on all hosts, and what of them is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from random import Random

from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header
from ecckpt.format.ids import ShardId


@dataclass(eq=False, slots=True)
class TruthPiece:
    """A complete file on a host; ``rotten`` are its blocks (fragment, row) that are wrong.

    Of one whose superblock is wrong that is (HOME, 0).
    """

    node: str
    name: str
    header: Header
    rotten: set[tuple[int, int]] = field(default_factory=set)


class TruthPieces:
    """By place and by shard; ``wrong`` are blocks that have rotted on a node, ever."""

    def __init__(self) -> None:
        self._on: dict[str, dict[str, TruthPiece]] = defaultdict(dict)
        self._of: dict[ShardId, list[TruthPiece]] = defaultdict(list)
        self.wrong: dict[tuple[str, ShardId, int], set[tuple[int, int]]] = defaultdict(set)

    def add(self, piece: TruthPiece) -> None:
        """A file is complete; it takes the place of one of the same name."""
        self.pop(piece.node, piece.name)
        self._on[piece.node][piece.name] = piece
        self._of[piece.header.shard].append(piece)

    def find(self, node: str, name: str) -> TruthPiece | None:
        """The piece in that place."""
        return self._on[node].get(name)

    def pop(self, node: str, name: str) -> TruthPiece | None:
        """It is gone, if it was there."""
        piece = self._on[node].pop(name, None)
        if piece is not None:
            left = self._of[piece.header.shard]
            left.remove(piece)
            if not left:
                del self._of[piece.header.shard]
        return piece

    def on(self, node: str) -> list[TruthPiece]:
        """Those of a host."""
        return list(self._on[node].values())

    def of(self, shard: ShardId) -> list[TruthPiece]:
        """Those of a shard."""
        return list(self._of.get(shard, ()))

    def shards(self) -> Collection[ShardId]:
        """All shards of which anything is there."""
        return self._of.keys()

    def rot(self, rng: Random, view_of: Callable[[TruthPiece], memoryview]) -> None:
        """Flip a bit of some file: in a block, or in what says what it is."""
        pieces = [piece for each in self._on.values() for piece in each.values()]
        if not pieces:
            return
        piece = rng.choice(pieces)
        header = piece.header
        if rng.random() < 0.2:
            at = rng.randrange(SUPERBLOCK_BYTES - 4)
            piece.rotten.add((HOME, 0))
        else:
            within = rng.randrange(header.payload_bytes)
            at = SUPERBLOCK_BYTES + within
            fragment, offset = divmod(within, header.fragment_bytes)
            index = fragment if header.index == HOME else header.index
            piece.rotten.add((index, offset // header.block_bytes))
        self.wrong[piece.node, header.shard, header.index] |= piece.rotten
        view_of(piece)[at] ^= 1 << rng.randrange(8)


def restorable(pieces: Collection[TruthPiece]) -> bool:
    """Whether these pieces of one shard suffice for every row of it."""
    if not pieces:
        return False
    header = next(iter(pieces)).header
    if not any(piece.rotten for piece in pieces):
        indices = {piece.header.index for piece in pieces}
        return HOME in indices or len(indices) >= header.k
    return all(len(set(_good(pieces, row))) >= header.k for row in range(header.rows))


def promised_losses(pieces: Collection[TruthPiece]) -> int:
    """Node losses that these pieces of a shard have to survive: fragments to spare, and the home.

    Not the home where a restart has brought it to a node that holds for it: both go at once.
    """
    homes = {piece.node for piece in pieces if piece.header.index == HOME}
    fragments = [piece for piece in pieces if piece.header.index != HOME]
    spare = len({piece.header.index for piece in fragments}) - next(iter(pieces)).header.k
    return spare + bool(homes and not homes & {piece.node for piece in fragments})


def whole(pieces: Iterable[TruthPiece]) -> bool:
    """Whether every fragment and the home copy are there and right, each on a node of its own."""
    good = [piece for piece in pieces if not piece.rotten]
    nodes = {piece.header.index: piece.node for piece in good}
    return bool(good) and len(set(nodes.values())) == len(nodes) == good[0].header.n + 1


def _good(pieces: Iterable[TruthPiece], row: int) -> Iterable[int]:
    """Indices of which a right block of that row is there."""
    for piece in pieces:
        if (HOME, 0) in piece.rotten:
            continue
        index = piece.header.index
        for each in range(piece.header.k) if index == HOME else (index,):
            if (each, row) not in piece.rotten:
                yield each
