"""The complete files that really exist, on all hosts, and which of their blocks are wrong.

``Truth`` has one collection for memory, ``TruthDisk`` one for disks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from random import Random

from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header
from ecckpt.format.ids import ShardId


@dataclass(eq=False, slots=True)
class TruthPiece:
    """One complete file on a host.

    ``rotten`` are its wrong blocks as (fragment, row); a wrong superblock is (HOME, 0).
    """

    node: str
    name: str
    header: Header
    rotten: set[tuple[int, int]] = field(default_factory=set)


class TruthPieces:
    """Pieces by node and by shard.

    ``ever_rotten`` are all blocks that ever rotted, by node, shard and fragment index. It outlives
    the pieces.
    """

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, TruthPiece]] = defaultdict(dict)
        self._by_shard: dict[ShardId, list[TruthPiece]] = defaultdict(list)
        self.ever_rotten: dict[tuple[str, ShardId, int], set[tuple[int, int]]] = defaultdict(set)

    def add(self, piece: TruthPiece) -> None:
        """Add a complete file, in place of one of the same name."""
        self.pop(piece.node, piece.name)
        self._by_node[piece.node][piece.name] = piece
        self._by_shard[piece.header.shard].append(piece)

    def find(self, node: str, name: str) -> TruthPiece | None:
        """The piece in that file, None if there is none."""
        return self._by_node[node].get(name)

    def pop(self, node: str, name: str) -> TruthPiece | None:
        """Remove a piece and return it, None if there is none."""
        piece = self._by_node[node].pop(name, None)
        if piece is not None:
            others = self._by_shard[piece.header.shard]
            others.remove(piece)
            if not others:
                del self._by_shard[piece.header.shard]
        return piece

    def on(self, node: str) -> list[TruthPiece]:
        """The pieces on a node."""
        return list(self._by_node[node].values())

    def of(self, shard: ShardId) -> list[TruthPiece]:
        """The pieces of a shard."""
        return list(self._by_shard.get(shard, ()))

    def shards(self) -> Collection[ShardId]:
        """All shards that have a piece."""
        return self._by_shard.keys()

    def rot(self, rng: Random, view_of: Callable[[TruthPiece], memoryview]) -> None:
        """Flip a random bit of a random file, in its payload or in its superblock."""
        pieces = [piece for files in self._by_node.values() for piece in files.values()]
        if not pieces:
            return
        piece = rng.choice(pieces)
        header = piece.header
        if rng.random() < 0.2:
            position = rng.randrange(SUPERBLOCK_BYTES - 4)
            piece.rotten.add((HOME, 0))
        else:
            within = rng.randrange(header.payload_bytes)
            position = SUPERBLOCK_BYTES + within
            fragment, offset = divmod(within, header.fragment_bytes)
            index = fragment if header.index == HOME else header.index
            piece.rotten.add((index, offset // header.block_bytes))
        self.ever_rotten[piece.node, header.shard, header.index] |= piece.rotten
        view_of(piece)[position] ^= 1 << rng.randrange(8)


def is_restorable(pieces: Collection[TruthPiece]) -> bool:
    """Whether these pieces of one shard suffice to rebuild every row of it."""
    if not pieces:
        return False
    header = next(iter(pieces)).header
    if not any(piece.rotten for piece in pieces):
        indices = {piece.header.index for piece in pieces}
        return HOME in indices or len(indices) >= header.k
    return all(len(set(_good_indices(pieces, row))) >= header.k for row in range(header.rows))


def unexpected_loss(promised: Collection[TruthPiece], available: Collection[TruthPiece]) -> str:
    """The lost nodes in words, if the shard must survive so few losses; empty if it need not.

    ``promised`` are the pieces that the shard had, ``available`` those that can be read now.
    """
    nodes = {piece.node for piece in promised if piece not in available or piece.rotten}
    if len(nodes) > _promised_losses(promised):
        return ""
    return f"{len(nodes)} nodes: {', '.join(sorted(nodes))}"


def _promised_losses(pieces: Collection[TruthPiece]) -> int:
    """How many node losses these pieces of a shard must survive.

    Every fragment beyond k counts one, and the home copy one more. The home copy does not count
    where a restart has moved the home to a holder, because one loss then takes both.
    """
    homes = {piece.node for piece in pieces if piece.header.index == HOME}
    fragments = [piece for piece in pieces if piece.header.index != HOME]
    spare = len({piece.header.index for piece in fragments}) - next(iter(pieces)).header.k
    return spare + bool(homes and not homes & {piece.node for piece in fragments})


def is_whole(pieces: Iterable[TruthPiece]) -> bool:
    """Whether the home copy and all n fragments exist and are right, each on its own node."""
    good = [piece for piece in pieces if not piece.rotten]
    nodes = {piece.header.index: piece.node for piece in good}
    return bool(good) and len(set(nodes.values())) == len(nodes) == good[0].header.n + 1


def _good_indices(pieces: Iterable[TruthPiece], row: int) -> Iterable[int]:
    """Indices of the fragments that have a right block in that row."""
    for piece in pieces:
        if (HOME, 0) in piece.rotten:
            continue
        own = piece.header.index
        for index in range(piece.header.k) if own == HOME else (own,):
            if (index, row) not in piece.rotten:
                yield index
