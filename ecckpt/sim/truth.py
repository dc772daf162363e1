"""What is really there, and what was promised. Raises ``Violation`` where the two differ.

It sees every file that agents complete and give up, every fault, every commit and every restore,
and believes nothing that the agents say of themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from ecckpt import wire
from ecckpt.agent.actions import Allocate, Discard, Event, Recycle
from ecckpt.agent.ledger import Entry
from ecckpt.agent.ledgers import Ledgers
from ecckpt.fragment import HOME, SUPERBLOCK_BYTES, Header
from ecckpt.generation import Generation, ShardId

if TYPE_CHECKING:
    from ecckpt.sim.host import Host
    from ecckpt.tiers.memory import Region

_REMEMBERED = 4  # generations of whose bytes a copy is kept, beyond the safe one


class Violation(Exception):
    """A promise was broken: ``kind`` names it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(eq=False, slots=True)
class Piece:
    """A complete file on a host; ``rotten`` are its blocks (fragment, row) that are wrong."""

    node: str
    header: Header
    rotten: set[tuple[int, int]] = field(default_factory=set)


class Truth:
    """Of one run. ``least`` is how many fragments a commit needs; ``ranks`` how many shards."""

    def __init__(self, run: str, *, ranks: int, least: int, survived: int) -> None:
        self.run = run
        self.safe: Generation | None = None
        self.commits = 0
        self.restores = 0
        self._ranks, self._least, self._survived = ranks, least, survived
        self._saved: dict[ShardId, bytes] = {}
        self._pieces: dict[tuple[str, str], Piece] = {}
        self._of: dict[ShardId, list[Piece]] = defaultdict(list)
        self._sealed: dict[ShardId, set[int]] = defaultdict(set)
        self._owed: dict[ShardId, list[Piece]] = {}
        self._committed: set[Generation] = set()
        self._timeline = 0
        self._begun_at: Generation | None = None
        self._loaded: dict[str, Generation] = {}

    # -- what agents do ---------------------------------------------------------------------------

    def sealed(self, host: Host, entry: Entry) -> None:
        """A file is complete."""
        if entry.header.shard.run != self.run:
            return
        piece = Piece(host.node, entry.header)
        self._pieces[host.node, entry.region.name] = piece
        self._of[entry.header.shard].append(piece)
        self._sealed[entry.header.shard].add(entry.header.index)

    def going(self, host: Host, action: Recycle | Discard) -> None:
        """A region is about to be given up: the safe generation must not need it."""
        piece = self._pieces.pop((host.node, action.region.name), None)
        if piece is None:
            return
        shard = piece.header.shard
        before = self._restorable(shard)
        self._of[shard].remove(piece)
        if shard.generation == self.safe and before and not self._restorable(shard):
            raise Violation(
                "retention", f"{host.node} gave up the last of {shard}, which nothing replaces"
            )

    def adopted(self, host: Host, ledgers: Ledgers) -> None:
        """What an agent could not read again is gone, as far as it is concerned."""
        known = {
            (host.node, entry.region.name) for entry in ledgers.look(self.run).entries.values()
        }
        for key in [each for each in self._pieces if each[0] == host.node and each not in known]:
            piece = self._pieces.pop(key)
            self._of[piece.header.shard].remove(piece)
            if not piece.rotten:
                raise Violation("adoption", f"{host.node} did not take over {piece.header.shard}")

    def decided(self, host: Host, event: Event) -> None:
        """An agent has handled an event: no commit of a writer that is fenced off."""
        if not isinstance(event, wire.Commit) or event.run != self.run:
            return
        assert host.agent is not None
        fence = host.agent.core.ledgers.look(self.run).fence
        if event.generation.timeline < fence:
            raise Violation("fencing", f"{host.node}, fenced at {fence}, took {event.generation}")
        if event.generation.timeline >= self._timeline:
            self._commit(event.generation)

    def allocated(self, host: Host, action: Allocate) -> None:
        """A region was given to a task: what the run occupies is within its budget."""
        used_bytes = host.memory.used_bytes[action.run]
        budget_bytes = action.budget_bytes or host.cluster.budget_bytes
        if used_bytes > budget_bytes:
            raise Violation("budget", f"{host.node}: {used_bytes} of {budget_bytes} bytes")

    # -- what faults do ---------------------------------------------------------------------------

    def lost(self, host: Host) -> None:
        """A host's memory is gone."""
        for key in [each for each in self._pieces if each[0] == host.node]:
            piece = self._pieces.pop(key)
            self._of[piece.header.shard].remove(piece)

    def rot(self, rng: Random, hosts: Mapping[str, Host]) -> None:
        """Flip a bit of some complete file: in a block, or in what says what it is."""
        if not self._pieces:
            return
        (node, name), piece = rng.choice(list(self._pieces.items()))
        header, view = piece.header, hosts[node].memory.files[name].view
        if rng.random() < 0.2:
            at = rng.randrange(SUPERBLOCK_BYTES - 4)  # superblock
            piece.rotten.add((HOME, 0))
        else:
            within = rng.randrange(header.payload_bytes)
            at = SUPERBLOCK_BYTES + within
            fragment, offset = divmod(within, header.fragment_bytes)
            index = fragment if header.index == HOME else header.index
            piece.rotten.add((index, offset // header.block_bytes))
        view[at] ^= 1 << rng.randrange(8)

    # -- what trainers do -------------------------------------------------------------------------

    def writes(self, host: Host, region: Region) -> None:
        """A rank writes into a slot that it was given, perhaps long ago."""
        piece = self._pieces.get((host.node, region.name))
        if piece is not None and host.memory.files.get(region.name) is region:
            raise Violation("bytes", f"{host.node}: a slot is written that is {piece.header.shard}")

    def saved(self, shard: ShardId, data: bytes) -> None:
        """A rank has put these bytes into its slot."""
        self._saved[shard] = data

    def committed(self, host: Host, generation: Generation) -> None:
        """A trainer on that host was told that a generation is committed."""
        fenced = host.agent and host.agent.core.ledgers.look(self.run).fence >= self._timeline
        left = self._begun_at is None or generation > self._begun_at
        if generation.timeline >= self._timeline:
            self._commit(generation)
        elif fenced and left and generation not in self._committed:
            raise Violation(
                "fencing",
                f"{generation} was committed after timeline {self._timeline} "
                f"had gone back to {self._begun_at}",
            )

    def _commit(self, generation: Generation) -> None:
        if generation in self._committed:
            return
        self._committed.add(generation)
        self.commits += 1
        for rank in range(self._ranks):
            shard = ShardId(self.run, generation, rank)
            fragments = self._sealed[shard] - {HOME}
            if shard not in self._saved or len(fragments) < self._least:
                raise Violation(
                    "commit", f"{shard} had {len(fragments)} fragments of {self._least} ever"
                )
            self._owed[shard] = list(self._of[shard])
        if self.safe is None or generation > self.safe:
            self.safe = generation
            self._forget()

    def chosen(self, generation: Generation | None, answering: Collection[str]) -> None:
        """A plan was made from what these nodes say: the safe generation, if they have it."""
        if self.safe is None or (generation is not None and generation >= self.safe):
            return
        shards = [ShardId(self.run, self.safe, rank) for rank in range(self._ranks)]
        if all(self._restorable(shard, answering) for shard in shards):
            raise Violation("recovery", f"{generation} was chosen, {self.safe} could be restored")
        for shard in shards:
            if not self._restorable(shard, answering):
                self._check_margin(shard, answering)

    def refused(self, generation: Generation, answering: Collection[str], why: str) -> None:
        """All ranks pass over a generation: not the safe one while it could be had."""
        if generation == self.safe and all(
            self._restorable(ShardId(self.run, generation, rank), answering)
            for rank in range(self._ranks)
        ):
            raise Violation("recovery", f"{generation} was refused and is there: {why}")

    def loaded(self, start: str, rank: int, generation: Generation, data: bytes) -> None:
        """A rank goes on from these bytes, in a start of the run: timeline and session."""
        shard = ShardId(self.run, generation, rank)
        if self._saved.get(shard) != data:
            raise Violation("bytes", f"{shard} is not what was saved")
        if self._loaded.setdefault(start, generation) != generation:
            raise Violation("mixed", f"rank {rank} of {start} loaded {generation}")

    def begins(self, timeline: int, generation: Generation | None) -> None:
        """All ranks have what they go on from."""
        if timeline < self._timeline:
            return  # stopped in between, and fenced off without knowing
        # An equal one begins where all who answer have lost their memory, and the others are away.
        self._timeline, self._begun_at = timeline, generation
        self.safe = generation
        self.restores += 1
        for shard in [each for each in self._owed if each.generation == generation]:
            self._owed[shard] = list(self._of[shard])

    # -- looking ----------------------------------------------------------------------------------

    def is_lost(self) -> bool:
        """Whether no host has the safe generation any more, whatever it says."""
        return self.safe is not None and not all(
            self._restorable(ShardId(self.run, self.safe, rank)) for rank in range(self._ranks)
        )

    def is_whole(self) -> bool:
        """Whether every piece of the safe generation is there, and right."""
        return self.safe is not None and all(
            self._whole(self._of[ShardId(self.run, self.safe, rank)]) for rank in range(self._ranks)
        )

    def _whole(self, pieces: Iterable[Piece]) -> bool:
        good = [piece for piece in pieces if not piece.rotten]
        nodes = {piece.header.index: piece.node for piece in good}
        return bool(good) and len(set(nodes.values())) == len(nodes) == good[0].header.n + 1

    def _restorable(self, shard: ShardId, nodes: Collection[str] | None = None) -> bool:
        """Whether the pieces on these nodes (None: all) suffice for every row of a shard."""
        pieces = [each for each in self._of[shard] if nodes is None or each.node in nodes]
        if not pieces:
            return False
        k, rows = pieces[0].header.k, pieces[0].header.rows
        if not any(piece.rotten for piece in pieces):
            indices = {piece.header.index for piece in pieces}
            return HOME in indices or len(indices) >= k
        return all(len(set(_good(pieces, row))) >= k for row in range(rows))

    def _check_margin(self, shard: ShardId, answering: Collection[str]) -> None:
        """Of a shard that was held whole, the loss of any m + 1 nodes loses nothing."""
        owed = self._owed.get(shard, [])
        if not owed or len({piece.header.index for piece in owed}) <= owed[0].header.n:
            return
        left = [piece for piece in self._of[shard] if piece.node in answering]
        gone = {piece.node for piece in owed if piece not in left or piece.rotten}
        if len(gone) <= self._survived:
            raise Violation(
                "margin", f"{shard} is lost with {len(gone)} nodes: {', '.join(sorted(gone))}"
            )

    def _forget(self) -> None:
        """Drop the bytes of generations that nobody can want any more."""
        kept = set(sorted({shard.generation for shard in self._saved})[-_REMEMBERED:])
        kept |= {shard.generation for shard, pieces in self._of.items() if pieces}
        for table in (self._saved, self._of, self._sealed, self._owed):
            for shard in [each for each in table if each.generation not in kept]:
                del table[shard]


def _good(pieces: Iterable[Piece], row: int) -> Iterable[int]:
    """Indices of which a right block of that row is there."""
    for piece in pieces:
        if (HOME, 0) in piece.rotten:
            continue
        index = piece.header.index
        for each in range(piece.header.k) if index == HOME else (index,):
            if (each, row) not in piece.rotten:
                yield each
