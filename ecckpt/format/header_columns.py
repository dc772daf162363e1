"""The headers of all files that a node has of a run: what inventories are made of. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from ecckpt.format.fragment_file import HOME, Header


@dataclass(frozen=True, slots=True)
class Headers:
    """In two columns: the files of a shard differ in nothing but their index.

    ``shards`` has every file's header with the index of a home copy, ``indices`` its own index. In
    inventories that came as messages, files of a shard on several nodes share one object: a
    restore of a large run looks at hundreds of thousands.
    """

    shards: tuple[Header, ...]
    indices: tuple[int, ...]

    @classmethod
    def of(cls, headers: Iterable[Header]) -> Self:
        """Of these files."""
        files = list(headers)
        return cls(tuple([each.at(HOME) for each in files]), tuple([each.index for each in files]))

    def __len__(self) -> int:
        """How many files."""
        return len(self.shards)

    def __iter__(self) -> Iterator[Header]:
        """Each file's own header."""
        return map(Header.at, self.shards, self.indices)
