"""What is really on the disks, and what was promised of that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.runtime.shard_bytes import bad_blocks
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.disk import Retain, Store
from ecckpt.sim.run_config import Rules
from ecckpt.sim.truth.pieces import TruthPiece, TruthPieces, promised_losses
from ecckpt.sim.truth.violation import Violation

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.sim.hosts.host import SimulatedHost


class TruthDisk:
    """Of one run. ``told`` are the generations that agents were told last are on disk, and stay.

    The last of them stay, as many as ``rules`` say.
    """

    def __init__(self, run: str, rules: Rules) -> None:
        self.told: tuple[Generation, ...] = ()
        self.pieces = TruthPieces()
        self._run, self._k, self._least, self._last = run, rules.k, rules.least, rules.keep.last
        self._ever: dict[ShardId, set[int]] = defaultdict(set)
        self._owed: dict[ShardId, list[TruthPiece]] = {}
        self._going: dict[tuple[str, str], TruthPiece] = {}  # decided, and not yet done
        self._blind: set[str] = set()  # nodes that could not read their disk

    # -- what agents do ---------------------------------------------------------------------------

    def written(self, host: SimulatedHost, file: DiskFile, message: Store) -> None:
        """A file is said to be on disk: whole, for good, and within the budget."""
        platter, shard = host.platter, file.header.shard
        if shard.run != self._run:
            return
        assert platter is not None
        self.pieces.add(TruthPiece(host.node, str(file.path), file.header))
        self._ever[shard].add(file.header.index)
        if not platter.lasts(file.path):
            raise Violation("torn", f"{host.node} has {shard} on disk, but for a loss of power")
        self._check_bytes(host, file)
        used_bytes = platter.used_bytes(self._run)
        if used_bytes > message.disk_bytes:
            text = f"{host.node}: {used_bytes} of {message.disk_bytes} bytes on disk"
            raise Violation("budget", text)

    def looked(self, host: SimulatedHost, ledgers: RunRecords) -> None:
        """An agent has read its disk: all that is right is entered, and nothing that is torn."""
        self._blind.discard(host.node)
        found = {str(file.path): file for file in ledgers.look(self._run).files.values()}
        for piece in self.pieces.on(host.node):
            if piece.name not in found:
                self.pieces.pop(host.node, piece.name)
                if (HOME, 0) not in piece.rotten:
                    text = f"{host.node} did not take over {piece.header.shard} from its disk"
                    raise Violation("adoption", text)
        for name, file in found.items():
            if self.pieces.find(host.node, name) is None:
                again = self._going.get((host.node, name))
                self.pieces.add(again or TruthPiece(host.node, name, file.header))
            self._check_bytes(host, file)
        for key in [key for key in self._going if key[0] == host.node]:
            del self._going[key]

    def blinded(self, host: SimulatedHost) -> None:
        """An agent could not read its disk."""
        self._blind.add(host.node)

    def removing(
        self, host: SimulatedHost, files: Iterable[DiskFile], left: Callable[[Generation], bool]
    ) -> None:
        """Files are about to go: none of what stays, but what people have ``left``."""
        for file in files:
            generation = file.header.shard.generation
            if file.header.shard.run != self._run:
                continue
            if generation in self.told[-self._last :] and not left(generation):
                raise Violation("retention", f"{host.node} removes {file.header.shard} from disk")
            piece = self.pieces.pop(host.node, str(file.path))
            if piece is not None:
                self._going[host.node, piece.name] = piece

    def removed(self, host: SimulatedHost, files: Iterable[DiskFile]) -> None:
        """They are gone; but for those that could not be removed, or may come back."""
        assert host.platter is not None
        for file in files:
            if not host.platter.may_have(file.path):
                self._going.pop((host.node, str(file.path)), None)

    def retained(self, message: Retain, shards: Iterable[ShardId]) -> bool:
        """An agent was told what is on disk everywhere; whether its newest is news."""
        newest, before = message.generations[-1], self.told
        if before and newest < before[-1]:
            return False  # said before, and late
        self.told = message.generations
        if newest in before:
            return False
        # What an earlier start had not told of counts as soon as it can be restored.
        least = self._least if newest.timeline == message.writer else self._k
        for shard in shards:
            fragments = self._ever[shard] - {HOME}
            if len(fragments) < least:
                text = f"{shard} had {len(fragments)} fragments of {least} on disk ever"
                raise Violation("stored", text)
            self._owed[shard] = self.pieces.of(shard)
        return True

    def lost(self, host: SimulatedHost) -> None:
        """A host has another disk."""
        self._blind.discard(host.node)
        for piece in self.pieces.on(host.node):
            self.pieces.pop(host.node, piece.name)
        for key in [key for key in self._going if key[0] == host.node]:
            del self._going[key]

    # -- looking ----------------------------------------------------------------------------------

    def generations(self) -> set[Generation]:
        """All of which there is anything, or may be again."""
        going = {piece.header.shard.generation for piece in self._going.values()}
        return going | {shard.generation for shard in self.pieces.shards()}

    def of(self, shard: ShardId) -> list[TruthPiece]:
        """What can be read of a shard."""
        return [piece for piece in self.pieces.of(shard) if piece.node not in self._blind]

    def check_margin(self, shard: ShardId, answering: Collection[str]) -> None:
        """What was more than enough when it was told is enough after so many losses."""
        owed = self._owed.get(shard, [])
        left = [piece for piece in self.of(shard) if piece.node in answering]
        gone = {piece.node for piece in owed if piece not in left or piece.rotten}
        if owed and len(gone) <= promised_losses(owed):
            text = f"{shard} is lost with {len(gone)} nodes: {', '.join(sorted(gone))}"
            raise Violation("disk margin", text)

    def forget(self, kept: Collection[Generation]) -> None:
        """Drop what is known of other generations."""
        for shard in [each for each in self._ever if each.generation not in kept]:
            del self._ever[shard]
        for shard in [each for each in self._owed if each.generation not in kept]:
            del self._owed[shard]

    def _check_bytes(self, host: SimulatedHost, file: DiskFile) -> None:
        """A file that has its name is right, but for what has rotted on this disk."""
        assert host.platter is not None
        piece = self.pieces.find(host.node, str(file.path))
        assert piece is not None
        header, view = file.header, host.platter.view(file.path)
        size_bytes = header.fragment_bytes
        key = host.node, header.shard, header.index
        wrong = self.pieces.wrong.get(key, set())
        for at in range(header.k if header.index == HOME else 1):
            index = at if header.index == HOME else header.index
            start = SUPERBLOCK_BYTES + at * size_bytes
            bad = bad_blocks(header, index, view[start : start + size_bytes], file.table)
            piece.rotten |= wrong.intersection(bad)
            if not piece.rotten.issuperset(bad):
                raise Violation("torn", f"{host.node} has {header.shard} on disk, and it is wrong")


def name_of(piece: TruthPiece) -> Path:
    """Where a piece lies on its platter."""
    return Path(piece.name)
