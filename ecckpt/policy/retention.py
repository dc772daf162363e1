"""Which generations stay on disk, and when a generation counts as stored. Pure.

Used by rank 0, which decides for all disks (client/save/archive_protocol.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ecckpt.errors import InvalidConfig
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import Generation
from ecckpt.policy.rollbacks import RollBack, abandoned_by


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the last ``last`` generations, and each whose step ``every_steps`` divides (0: none)."""

    last: int = 1
    every_steps: int = 0

    def __post_init__(self) -> None:
        if self.last < 1:
            raise InvalidConfig(f"keep={self.last}: the newest generation is always kept")
        if self.every_steps < 0:
            raise InvalidConfig(f"keep_every_steps={self.every_steps} is negative")

    def kept_of(
        self, stored: Iterable[Generation], roll_backs: Sequence[RollBack]
    ) -> tuple[Generation, ...]:
        """The stored generations that stay, oldest first.

        Generations that a roll-back abandons do not stay and do not count toward ``last``. The
        newest of the others always stays.
        """
        counting = sorted({each for each in stored if abandoned_by(each, roll_backs) is None})
        newest = set(counting[-self.last :])
        return tuple(
            each
            for each in counting
            if each in newest or (self.every_steps and each.step % self.every_steps == 0)
        )


def ranks_short(pieces: Iterable[tuple[int, int]], *, ranks: int, least: int) -> tuple[int, ...]:
    """Ranks whose shard is not on enough disks yet.

    ``pieces`` are (rank, index) of the files on all nodes. ``least`` is how many different
    fragments a shard needs; 0 if it has no holders, and then its home copy is needed.
    """
    fragments: dict[int, set[int]] = defaultdict(set)
    homes: set[int] = set()
    for rank, index in pieces:
        if index == HOME:
            homes.add(rank)
        else:
            fragments[rank].add(index)
    return tuple(
        rank
        for rank in range(ranks)
        if (len(fragments[rank]) < least if least else rank not in homes)
    )
