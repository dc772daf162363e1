"""What a simulated run is configured with, and the bytes and headers that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import shake_128

from ecckpt.format.fragment_file import HOME, Header, fragment_bytes_for
from ecckpt.format.ids import Generation, ShardId
from ecckpt.policy.retention import Keep

BLOCK_BYTES = 4096  # small, so that a small shard has several rows


@dataclass(frozen=True, slots=True)
class Rules:
    """Of all sessions of a run.

    ``roll_back`` and ``reshape`` are how likely a session goes back to a generation by name, and
    how likely it has another number of ranks than the one before. Without ``disk_every`` there are
    no disks. With ``tickets`` ranks save by them, as DCP does; with ``replicated`` each rank claims
    that a part of its state is on all ranks.
    """

    k: int
    m: int
    min_margin: int
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
        habits = "".join(
            f", {name}={value:g}"
            for name, value in (("roll_back", self.roll_back), ("reshape", self.reshape))
            if value
        )
        if self.disk_every:
            habits += f", disk_every={self.disk_every}, {self.keep}"
        habits += ", by tickets" if self.tickets else ""
        habits += ", replicated" if self.replicated else ""
        return f"RS({self.k}, {self.m}){habits}"

    @property
    def least(self) -> int:
        """Fragments that a shard needs at its holders."""
        return min(self.k + self.min_margin, self.k + self.m)

    def header(self, shard: ShardId, *, ranks: int, home: str, parent: Generation | None) -> Header:
        """As the Checkpointer makes it, with small blocks."""
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
    """The state that a rank saves: bytes that belong to nothing else."""
    return shake_128(f"{seed} {shard}".encode()).digest(size_bytes)
