"""How often what is promised was put to the test."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counts:
    """Of one run, or of many.

    ``restores`` are starts that went on, new ones included; ``roll_backs`` those of them that
    somebody named a generation for, ``reshaped`` those on another number of ranks than had saved.
    ``stored`` are generations that all were told are on disk.
    """

    commits: int = 0
    restores: int = 0
    roll_backs: int = 0
    reshaped: int = 0
    stored: int = 0

    def add(self, other: Counts) -> None:
        """Count those of another run as well."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def __str__(self) -> str:
        return ", ".join(
            f"{getattr(self, field.name):,} {field.name.replace('_', '-')}"
            for field in fields(self)
        )
