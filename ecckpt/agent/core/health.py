"""The health of the nodes that hold a home's fragments: which answer, and what each of them has.

A peer, as its home sees it:

    answering --no answer--> missed 1 --> missed 2 --> missed 3: lost, asked every LOST_PEER_ROUND_S
        ^                       |            |            |
        +------- answer --------+------------+------------+

Fragments of a lost node count as missing. Only a node's latest answer says what it has; nothing is
concluded from what was sent to it earlier. So a node that comes back with an empty memory is seen
as empty, and a node that another one has replaced at the same address is seen as the new one.

repair.py asks the peers and decides what is made again from the answers.
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

MISSES = 3  # in a row, until a node counts as lost


@dataclass(eq=False, kw_only=True, slots=True)
class PeerHealth:
    """A node that may hold fragments, as of its latest answer.

    Attributes:
        held: what it had when it was asked at ``asked_s``.
        coming: what it was about to hold then.
        committed: the newest generation that it had been told of.
        asking: a probe is under way.
        misses: probes in a row that were not answered.
        ask_at_s: the earliest time of the next probe.
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
        """Whether the node counts as lost."""
        return self.misses >= MISSES

    def knows(self, shard: ShardId, since_s: float) -> bool:
        """Whether the node was asked about a shard at ``since_s`` or later, or is lost."""
        return self.lost or (self.asked_s >= since_s and shard in self.held)


@dataclass(frozen=True, slots=True)
class ShardPieces:
    """Which answering nodes have what of a shard; ``coming`` are fragments about to be held."""

    homes: frozenset[str]
    fragments: Mapping[int, Collection[str]]
    coming: Mapping[int, Collection[str]]


class GroupHealth:
    """The health of the group of one run's home copies on the node ``home``."""

    def __init__(self, run: str, home: str) -> None:
        self.run = run
        self.peers: list[PeerHealth] = []
        self._home = home
        self._guard: Guard | None = None
        self._newest: Generation | None = None
        self._indices: Mapping[ShardId, int] = {}
        self._since_s: dict[ShardId, float] = {}  # answers before this time do not count

    def align(
        self,
        guard: Guard,
        indices: Mapping[ShardId, int],
        newest: Generation | None,
        now_s: float,
    ) -> None:
        """Take over the current guard, and the shards to watch with their numbers of fragments.

        ``newest`` is the newest generation that the home was told of. If the members are the same,
        what is known of them stays.
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
        """The members that hold fragments 0, 1, ... when nothing is lost."""
        return self.peers[: self._guard.holders if self._guard else 0]

    def to_ask(self, now_s: float) -> list[PeerHealth]:
        """The peers to probe now, marked as ``asking``.

        The holders; while they lack a fragment, the other members too, since one of them may have
        it.
        """
        whole = all(self._whole(shard) for shard in self._indices)
        asked = self.holders if whole else self.peers
        due = [peer for peer in asked if not peer.asking and now_s >= peer.ask_at_s]
        for peer in due:
            peer.asking = True
        return due

    def answered(self, peer: PeerHealth, probe: Probe, seen: Presence, at_s: float) -> str:
        """A node that was asked at ``at_s`` has answered; returns a text to log, or nothing.

        If the answer comes from another member or from the home itself, the address now belongs to
        that node, and the peer counts as missed.
        """
        others = {self._home} | {each.node for each in self.peers if each is not peer}
        if seen.node in others:
            return self.missed(peer, at_s)  # the address belongs to another node now
        back = f"node {seen.node} at {peer.address} answers again" if peer.lost else ""
        if seen.node != peer.node:
            back = f"node {seen.node} is where node {peer.node} was, at {peer.address}"
        peer.node, peer.asking, peer.misses, peer.asked_s = seen.node, False, 0, at_s
        peer.ask_at_s, peer.committed = 0.0, seen.committed
        peer.held = dict(zip(probe.shards, seen.held, strict=True))
        peer.coming = dict(zip(probe.shards, seen.coming, strict=True))
        return back

    def missed(self, peer: PeerHealth, now_s: float) -> str:
        """A node has not answered; returns a text to log, or nothing."""
        peer.asking = False
        peer.misses += 1
        if peer.lost:
            peer.ask_at_s = now_s + deadlines.LOST_PEER_ROUND_S
        if peer.misses != MISSES:
            return ""
        return f"node {peer.node} at {peer.address} counts as lost: no answer {MISSES} times"

    def known(self, shard: ShardId, since_s: float) -> bool:
        """Whether every peer that matters for a shard was asked at ``since_s`` or later.

        The holders are enough while they have all fragments. Nothing counts as known while a peer
        was told of a newer commit than the home: the peers may have dropped the older fragments
        already.
        """
        if shard not in self._since_s or self._behind():
            return False
        since_s = max(since_s, self._since_s[shard])
        asked = self.holders if self._whole(shard) else self.peers
        return all(peer.knows(shard, since_s) for peer in asked)

    def pieces(self, shard: ShardId) -> ShardPieces:
        """Where the pieces of a shard are, by the latest answers, the home's own copy included."""
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
        """Names of the nodes that count as lost."""
        return [peer.node for peer in self.peers if peer.lost]

    def _behind(self) -> bool:
        """Whether a peer was told of a newer commit than the home."""
        told = [peer.committed for peer in self.peers if peer.committed and not peer.lost]
        return any(self._newest is None or each > self._newest for each in told)

    def _whole(self, shard: ShardId) -> bool:
        """Whether the holders that answer have all fragments of the shard."""
        held = {
            index for each in self.holders if not each.lost for index in each.held.get(shard, ())
        }
        return held.issuperset(range(self._indices.get(shard, 0)))
