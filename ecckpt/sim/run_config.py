"""The configuration of a simulated run, and the bytes of its shards.

``Simulation`` draws the rules from the seed; sessions and the truth follow them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import shake_128

from ecckpt.format.fragment_file import HOME, Header, fragment_bytes_for
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.retention import Keep

BLOCK_BYTES = 4096  # small, so that a small shard has several rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The configuration of all sessions of a run.

    Attributes:
        step_s: the mean length of a training step.
        guarded: agents are asked to watch their peers and to repair in the background.
        roll_back: the probability that a session restores a generation by name.
        reshape: the probability that a session has another number of ranks than the one before.
        disk_every: every how many commits one goes to disk; 0: the cluster has no disks.
        tickets: ranks save by tickets, as the DCP writer does.
        replicated: each rank declares a part of its state as replicated on all ranks.
    """

    k: int
    m: int
    min_margin: int | None
    shard_bytes: int
    budget_bytes: int
    step_s: float
    save_timeout_s: float
    restore_timeout_s: float
    guarded: bool
    roll_back: float
    reshape: float
    disk_every: int
    disk_bytes: int
    keep: Keep
    tickets: bool
    replicated: bool

    def __str__(self) -> str:
        options = "".join(
            f", {name}={value:g}"
            for name, value in (("roll_back", self.roll_back), ("reshape", self.reshape))
            if value
        )
        if self.disk_every:
            options += f", disk_every={self.disk_every}, {self.keep}"
        options += ", by tickets" if self.tickets else ""
        options += ", replicated" if self.replicated else ""
        return f"RS({self.k}, {self.m}){options}"

    @property
    def least(self) -> int:
        """How many fragments a shard needs at its holders for a commit."""
        return min(self.k + (self.min_margin or 0), self.k + self.m)

    def header(self, shard: ShardId, *, ranks: int, home: str, parent: Generation | None) -> Header:
        """A shard's header as ``Requests.header`` makes it, with small blocks."""
        return Header(
            shard=shard,
            world_size=ranks,
            index=HOME,
            k=self.k,
            m=self.m,
            shard_bytes=self.shard_bytes,
            fragment_bytes=fragment_bytes_for(self.shard_bytes, self.k),
            block_bytes=BLOCK_BYTES,
            home=home,
            parent=parent,
            created_unix_s=0,
        )


def content_of(seed: int, shard: ShardId, size_bytes: int) -> bytes:
    """The state that a rank saves at a step; no two shards have the same bytes."""
    return shake_128(f"{seed} {shard}".encode()).digest(size_bytes)
