"""A region: one file of a tmpfs under ``<root>/regions``, and its mapping.

Its name never changes; its superblock says what it holds now.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class Region:
    """One file of the tier, mapped as long as the object lives.

    ``use`` is drawn anew each time that the region is allocated, also by later processes: a trainer
    that has mapped the region compares it to learn whether the content is still the one it knew.
    The tensors of some process lie in an ``assigned`` region: it is never written to again, and
    never recycled. A ``removed`` region has no name in the file system any more: no other process
    can open it and no later agent finds it, so its content counts as lost.
    """

    path: Path
    size_bytes: int
    view: memoryview = field(repr=False)
    _: KW_ONLY
    use: int = 0
    assigned: bool = False
    removed: bool = False

    @property
    def name(self) -> str:
        """The name of the region, which never changes."""
        return self.path.stem
