"""What is really on the disks of all hosts, and what was promised of it.

``Truth`` (truth/ledger.py) passes on here what concerns disks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from ecckpt.agent.runtime.shard_bytes import bad_blocks
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.disk import Retain, Store
from ecckpt.sim.run_config import Rules
from ecckpt.sim.truth.pieces import TruthPiece, TruthPieces, unexpected_loss
from ecckpt.sim.truth.violation import Violation

if TYPE_CHECKING:
    from ecckpt.agent.core.run_records import RunRecords
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.sim.hosts.interfaces import HostView


class TruthDisk:
    """The disks of one run.

    ``told`` are the generations that agents were last told are on disk everywhere, oldest first.
    The newest of them must stay, as many as the run keeps.
    """

    def __init__(self, run: str, rules: Rules) -> None:
        self.told: tuple[Generation, ...] = ()
        self.pieces = TruthPieces()
        self._run, self._k, self._least = run, rules.k, rules.least
        self._kept_generations = rules.keep.last
        self._ever_written: dict[ShardId, set[int]] = defaultdict(set)  # fragment indices
        # The pieces of each shard when agents were told that its generation is on disk.
        self._promised: dict[ShardId, list[TruthPiece]] = {}
        # Pieces whose removal was begun, by node and file. They may still come back.
        self._removing: dict[tuple[str, str], TruthPiece] = {}
        self._unreadable: set[str] = set()  # nodes whose agents do not know what is on their disk

    # -- reports of agents and hosts --------------------------------------------------------------

    def disk_written(self, host: HostView, file: DiskFile, message: Store) -> None:
        """A reported file must be right, durable and within the disk budget."""
        platter, shard = host.platter, file.header.shard
        if shard.run != self._run:
            return
        assert platter is not None
        self.pieces.add(TruthPiece(host.node, str(file.path), file.header))
        self._ever_written[shard].add(file.header.index)
        if not platter.is_durable(file.path):
            text = f"{host.node} reports {shard} on disk, but a loss of power would tear it"
            raise Violation("torn", text)
        self._check_bytes(host, file)
        used_bytes = platter.used_bytes(self._run)
        if used_bytes > message.disk_bytes:
            text = f"{host.node} has {used_bytes} bytes on disk, the budget is {message.disk_bytes}"
            raise Violation("budget", text)

    def disk_adopted(self, host: HostView, records: RunRecords) -> None:
        """An agent has read its disk: it must know every right file and no torn one."""
        self._unreadable.discard(host.node)
        files = {str(file.path): file for file in records.get(self._run).files.values()}
        for piece in self.pieces.on(host.node):
            if piece.name not in files:
                self.pieces.pop(host.node, piece.name)
                if (HOME, 0) not in piece.rotten:  # a file with a rotten superblock is refused
                    text = f"{host.node} did not adopt {piece.header.shard} from its disk"
                    raise Violation("adoption", text)
        for name, file in files.items():
            if self.pieces.find(host.node, name) is None:
                # A removal did not reach the disk, or a write did that was never reported.
                returned = self._removing.get((host.node, name))
                self.pieces.add(returned or TruthPiece(host.node, name, file.header))
                self._ever_written[file.header.shard].add(file.header.index)
            self._check_bytes(host, file)
        self._end_removals(host)

    def disk_unreadable(self, host: HostView) -> None:
        """An agent does not know what is on its disk: its files cannot be restored."""
        self._unreadable.add(host.node)

    def disk_removing(
        self, host: HostView, files: Iterable[DiskFile], abandoned: Callable[[Generation], bool]
    ) -> None:
        """No file may go that belongs to the generations that must stay.

        Except those that a roll-back has ``abandoned``.
        """
        for file in files:
            generation = file.header.shard.generation
            if file.header.shard.run != self._run:
                continue
            kept = self.told[-self._kept_generations :]
            if generation in kept and not abandoned(generation):
                raise Violation("retention", f"{host.node} removes {file.header.shard} from disk")
            piece = self.pieces.pop(host.node, str(file.path))
            if piece is not None:
                self._removing[host.node, piece.name] = piece

    def disk_removed(self, host: HostView, files: Iterable[DiskFile]) -> None:
        """The files are gone, unless a removal failed or a loss of power may undo it."""
        assert host.platter is not None
        for file in files:
            if not host.platter.may_have(file.path):
                self._removing.pop((host.node, str(file.path)), None)

    def retention_told(self, message: Retain, shards: Iterable[ShardId]) -> bool:
        """An agent was told which generations are on disk everywhere.

        Their shards must have been written to enough disks. Returns whether the newest was not told
        before.
        """
        newest, before = message.generations[-1], self.told
        if before and newest < before[-1]:
            return False  # a late message
        self.told = message.generations
        if newest in before:
            return False
        # An earlier session may have died before it told of this one. The current session tells
        # agents of it as soon as it can be restored, for which k fragments are enough.
        least = self._least if newest.timeline == message.writer.timeline else self._k
        for shard in shards:
            fragments = self._ever_written[shard] - {HOME}
            if len(fragments) < least:
                text = f"{shard}: {len(fragments)} fragments were ever on disk, {least} are needed"
                raise Violation("stored", text)
            self._promised[shard] = self.pieces.of(shard)
        return True

    def rot(self, rng: Random, hosts: Mapping[str, HostView]) -> None:
        """Flip a bit of a random file."""

        def view(piece: TruthPiece) -> memoryview:
            platter = hosts[piece.node].platter
            assert platter is not None
            return platter.view(Path(piece.name))

        self.pieces.rot(rng, view)

    def disk_lost(self, host: HostView) -> None:
        """A host came back with another disk."""
        self._unreadable.discard(host.node)
        for piece in self.pieces.on(host.node):
            self.pieces.pop(host.node, piece.name)
        self._end_removals(host)

    # -- queries ----------------------------------------------------------------------------------

    def generations(self) -> set[Generation]:
        """All generations that have a file, or may have one again."""
        removing = {piece.header.shard.generation for piece in self._removing.values()}
        return removing | {shard.generation for shard in self.pieces.shards()}

    def of(self, shard: ShardId) -> list[TruthPiece]:
        """The pieces of a shard that can be read."""
        return [piece for piece in self.pieces.of(shard) if piece.node not in self._unreadable]

    def check_margin(self, shard: ShardId, answering: Collection[str]) -> None:
        """A shard on disk must survive as many losses as when it was told to be on disk."""
        promised = self._promised.get(shard, [])
        readable = [piece for piece in self.of(shard) if piece.node in answering]
        loss = unexpected_loss(promised, readable) if promised else ""
        if loss:
            raise Violation("disk margin", f"{shard} is lost on disk with only {loss}")

    def forget(self, kept: Collection[Generation]) -> None:
        """Drop what is known of generations that are not in ``kept``."""
        for shard in [shard for shard in self._ever_written if shard.generation not in kept]:
            del self._ever_written[shard]
        for shard in [shard for shard in self._promised if shard.generation not in kept]:
            del self._promised[shard]

    def _end_removals(self, host: HostView) -> None:
        """What the host's disk has is known again, so no removal is pending."""
        for key in [key for key in self._removing if key[0] == host.node]:
            del self._removing[key]

    def _check_bytes(self, host: HostView, file: DiskFile) -> None:
        """A file with its final name must be right, except where this disk has rotted."""
        assert host.platter is not None
        piece = self.pieces.find(host.node, str(file.path))
        assert piece is not None
        header, view = file.header, host.platter.view(file.path)
        size_bytes = header.fragment_bytes
        key = host.node, header.shard, header.index
        ever_rotten = self.pieces.ever_rotten.get(key, set())
        for position in range(header.k if header.index == HOME else 1):
            index = position if header.index == HOME else header.index
            start = SUPERBLOCK_BYTES + position * size_bytes
            bad = bad_blocks(header, index, view[start : start + size_bytes], file.table)
            # A piece that was lost from view and adopted again has forgotten what rotted in it.
            piece.rotten |= ever_rotten.intersection(bad)
            if not piece.rotten.issuperset(bad):
                raise Violation("torn", f"{host.node}: the file of {header.shard} on disk is wrong")
