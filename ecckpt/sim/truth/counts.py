"""Counters of how often a simulation put a promise to the test."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class Counts:
    """Of one run, or summed over several.

    Attributes:
        commits: generations that were committed.
        restores: sessions whose ranks went on, including those from scratch.
        roll_backs: of these, the ones for which a generation was named.
        reshaped: of these, the ones on another number of ranks than had saved.
        stored: generations that agents were told are on disk everywhere.
    """

    commits: int = 0
    restores: int = 0
    roll_backs: int = 0
    reshaped: int = 0
    stored: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of another run."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def __str__(self) -> str:
        return ", ".join(
            f"{getattr(self, field.name):,} {field.name.replace('_', '-')}"
            for field in fields(self)
        )
