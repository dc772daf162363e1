"""What a home knows of the nodes that hold its shards: who answers, and what each of them has.

A node is lost when it has not answered three times in a row. What it has is what it says: nothing
is concluded from what it was once sent, so one that is back with an empty memory is seen for what
it is, and so is one that another node has replaced at the same address.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ecckpt.agent import deadlines
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.messages.repair import Guard, Presence, Probe

MISSES = 3


@dataclass(eq=False, kw_only=True, slots=True)
class PeerHealth:
    """A node that may hold fragments: what it ``held`` when it was last asked, at ``asked_s``.

    ``coming`` is what it was about to hold, ``committed`` what it was told of. ``misses`` is how
    often in a row it has not answered since, the next time to ask is ``ask_at_s``.
    """

    node: str
    domain: str
    address: str
    asking: bool = False
    misses: int = 0
    ask_at_s: float = 0.0
    asked_s: float = -math.inf
    committed: Generation | None = None
    held: Mapping[ShardId, Collection[int]] = field(default_factory=dict)
    coming: Mapping[ShardId, Collection[int]] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        """Whether it counts as lost."""
        return self.misses >= MISSES

    def knows(self, shard: ShardId, since_s: float) -> bool:
        """Whether it was asked about a shard at that time or later, or is lost."""
        return self.lost or (self.asked_s >= since_s and shard in self.held)


@dataclass(frozen=True, slots=True)
class ShardPieces:
    """Which living nodes have what of a shard; ``coming`` are fragments on their way to one."""

    homes: frozenset[str]
    fragments: Mapping[int, Collection[str]]
    coming: Mapping[int, Collection[str]]


class GroupHealth:
    """Watching over one run's home copies on the node ``home``."""

    def __init__(self, run: str, home: str) -> None:
        self.run = run
        self.peers: list[PeerHealth] = []
        self._home = home
        self._guard: Guard | None = None
        self._newest: Generation | None = None
        self._indices: Mapping[ShardId, int] = {}
        self._since_s: dict[ShardId, float] = {}  # from when on answers count

    def align(
        self,
        guard: Guard,
        indices: Mapping[ShardId, int],
        newest: Generation | None,
        now_s: float,
    ) -> None:
        """Watch these nodes from now on, for these shards of so many fragments each.

        ``newest`` is the newest generation that the home was told of.
        """
        if self._guard is None or self._guard.members != guard.members:
            self.peers = [
                PeerHealth(node=each.node, domain=each.domain, address=each.address)
                for each in guard.members
            ]
        self._guard = guard
        self._newest = newest
        self._indices = indices
        self._since_s = {shard: self._since_s.get(shard, now_s) for shard in indices}

    @property
    def holders(self) -> list[PeerHealth]:
        """The nodes that hold fragments 0, 1, ... when all is well."""
        return self.peers[: self._guard.holders if self._guard else 0]

    def to_ask(self, now_s: float) -> list[PeerHealth]:
        """Whom to ask now: the holders, and where they lack something the others too."""
        whole = all(self._whole(shard) for shard in self._indices)
        asked = self.holders if whole else self.peers
        due = [peer for peer in asked if not peer.asking and now_s >= peer.ask_at_s]
        for peer in due:
            peer.asking = True
        return due

    def answered(self, peer: PeerHealth, probe: Probe, seen: Presence, at_s: float) -> str:
        """A node that was asked at that time has answered; returns what people should know."""
        others = {self._home} | {each.node for each in self.peers if each is not peer}
        if seen.node in others:
            return self.missed(peer, at_s)  # an address that now is somebody else's
        back = f"node {seen.node} at {peer.address} answers again" if peer.lost else ""
        if seen.node != peer.node:
            back = f"node {seen.node} is where node {peer.node} was, at {peer.address}"
        peer.node, peer.asking, peer.misses, peer.asked_s = seen.node, False, 0, at_s
        peer.ask_at_s, peer.committed = 0.0, seen.committed
        peer.held = dict(zip(probe.shards, seen.held, strict=True))
        peer.coming = dict(zip(probe.shards, seen.coming, strict=True))
        return back

    def missed(self, peer: PeerHealth, now_s: float) -> str:
        """A node has not answered; returns what people should know."""
        peer.asking = False
        peer.misses += 1
        if peer.lost:
            peer.ask_at_s = now_s + deadlines.LOST_PEER_ROUND_S
        if peer.misses != MISSES:
            return ""
        return f"node {peer.node} at {peer.address} counts as lost: no answer {MISSES} times"

    def known(self, shard: ShardId, since_s: float) -> bool:
        """Whether all that matters for a shard was asked at that time or later.

        Where the holders have it whole, they are all that matters. Nothing is known of a home that
        has not been told of a commit yet: the others may have let go what came before.
        """
        if shard not in self._since_s or self._behind():
            return False
        since_s = max(since_s, self._since_s[shard])
        asked = self.holders if self._whole(shard) else self.peers
        return all(peer.knows(shard, since_s) for peer in asked)

    def pieces(self, shard: ShardId) -> ShardPieces:
        """Where what of a shard is, by the latest answers; the home's own copy is among them."""
        homes = {self._home}
        fragments: dict[int, list[str]] = defaultdict(list)
        coming: dict[int, list[str]] = defaultdict(list)
        for peer in self.peers:
            if peer.lost:
                continue
            for index in peer.held.get(shard, ()):
                if index == HOME:
                    homes.add(peer.node)
                else:
                    fragments[index].append(peer.node)
            for index in peer.coming.get(shard, ()):
                coming[index].append(peer.node)
        return ShardPieces(frozenset(homes), fragments, coming)

    def lost(self) -> list[str]:
        """Nodes that count as lost."""
        return [peer.node for peer in self.peers if peer.lost]

    def _behind(self) -> bool:
        told = [peer.committed for peer in self.peers if peer.committed and not peer.lost]
        return any(self._newest is None or each > self._newest for each in told)

    def _whole(self, shard: ShardId) -> bool:
        """Whether the holders have all of it, without the others."""
        held = {
            index for each in self.holders if not each.lost for index in each.held.get(shard, ())
        }
        return held.issuperset(range(self._indices.get(shard, 0)))
