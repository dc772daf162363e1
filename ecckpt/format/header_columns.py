"""The headers of all files that a node has of a run, as inventories carry them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from ecckpt.format.fragment_file import HOME, Header


@dataclass(frozen=True, slots=True)
class Headers:
    """Two columns, because the headers of a shard's files differ only in their index.

    ``shards`` has each file's header with the index of a home copy; ``indices`` has the file's own
    index. In inventories that came as messages, files of a shard on several nodes share one header
    object, because a restore of a large run looks at hundreds of thousands of files.
    """

    shards: tuple[Header, ...]
    indices: tuple[int, ...]

    @classmethod
    def from_headers(cls, headers: Iterable[Header]) -> Self:
        """The columns for these headers."""
        files = list(headers)
        return cls(tuple([each.at(HOME) for each in files]), tuple([each.index for each in files]))

    def __len__(self) -> int:
        """The number of files."""
        return len(self.shards)

    def __iter__(self) -> Iterator[Header]:
        """The header of each file."""
        return map(Header.at, self.shards, self.indices)
