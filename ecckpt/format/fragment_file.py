"""The bytes of a fragment file and of a home copy, as docs/FORMAT.md specifies them. Pure.

    superblock (4096 bytes) | payload | table | CRC32C of the table | end mark

A home copy has ``index = HOME``, and its payload is the k data fragments one after another. The
table holds the CRC32C of every block of all n fragments, so any one file verifies every other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, Self

import msgpack
import numpy as np

from ecckpt.coding.crc32c import crc32c
from ecckpt.errors import CorruptFragment, VersionMismatch
from ecckpt.format.ids import Generation, ShardId
from ecckpt.memory.buffers import Buffer

FORMAT_VERSION = 1
SUPERBLOCK_BYTES = 4096
BLOCK_BYTES = 1 << 20  # the largest block that is written
_LEAST_BLOCK_BYTES = 64 << 10
_BLOCKS = 8192  # about so many in a shard
HOME = -1

_MAGIC = b"\x89ecckpt\n"
_END_MARK = b"ecckpt.\n"
_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_STRIDE_BYTES = 4096
_STRIDE_OFFSET_BYTES = 832
_LIMIT_BYTES = 1 << 48
_BLOCK_RANGE = range(4096, (1 << 30) + 1)

# All fields but ``parent``, in the order of the constructor.
_FIELDS = (
    *("run", "generation", "rank", "world_size", "index", "k", "m"),
    *("shard_bytes", "fragment_bytes", "block_bytes", "home", "created_unix_s"),
)
_FIELD_TYPES = (str, str, int, int, int, int, int, int, int, int, str, int)
_fields_of: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*_FIELDS)


def fragment_bytes_for(shard_bytes: int, k: int) -> int:
    """Length of each of the k data fragments of a shard: at least a k-th of it, padded.

    The length is 832 modulo 4096. An odd multiple of 64 keeps vector stores aligned and spreads the
    k streams of a coding pass over the cache sets; streams at page-aligned distances would share
    sets.
    """
    least = -(-shard_bytes // k)
    return least + (_STRIDE_OFFSET_BYTES - least) % _STRIDE_BYTES


def block_bytes_for(shard_bytes: int) -> int:
    """Length of the blocks of a shard: a power of two, about 8192 of them in the shard.

    Blocks are the unit of verification. A reader of a part of the shard reads up to one block too
    much at each end, so blocks must be small compared with the pieces of tensors that a rank has.
    Small blocks cost time to encode, and in a large shard they make a large table.
    """
    most = max(shard_bytes // _BLOCKS, 1)
    return min(max(1 << (most.bit_length() - 1), _LEAST_BLOCK_BYTES), BLOCK_BYTES)


# Not keyword-only: a restore of a large run makes hundreds of thousands of headers, by position.
@dataclass(frozen=True, slots=True)
class Header:
    """What a fragment or home copy says of itself. All sizes in bytes.

    The constructor does not check its arguments; ``from_wire`` and ``parse_superblock`` check that
    the numbers fit together.
    """

    shard: ShardId
    world_size: int
    index: int
    k: int
    m: int
    shard_bytes: int
    fragment_bytes: int
    block_bytes: int
    home: str
    parent: Generation | None
    created_unix_s: int

    @property
    def n(self) -> int:
        """Number of fragments of the shard."""
        return self.k + self.m

    @property
    def rows(self) -> int:
        """Blocks in each fragment."""
        return -(-self.fragment_bytes // self.block_bytes)

    @property
    def payload_bytes(self) -> int:
        """Length of this file's payload: one fragment, or all k of them in a home copy."""
        return self.fragment_bytes * (self.k if self.index == HOME else 1)

    @property
    def trailer_offset(self) -> int:
        """Where the table begins."""
        return SUPERBLOCK_BYTES + self.payload_bytes

    @property
    def trailer_bytes(self) -> int:
        """Length of the table, its CRC and the end mark."""
        return 4 * self.n * self.rows + _CRC.size + len(_END_MARK)

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.trailer_offset + self.trailer_bytes

    def at(self, index: int) -> Self:
        """The header of another fragment, or of the home copy, of the same shard."""
        if index == self.index:
            return self
        return type(self)(  # takes a third of the time of ``replace``
            self.shard,
            self.world_size,
            index,
            self.k,
            self.m,
            self.shard_bytes,
            self.fragment_bytes,
            self.block_bytes,
            self.home,
            self.parent,
            self.created_unix_s,
        )

    def same_shard(self, other: Header) -> bool:
        """Whether both headers describe the same coded shard."""
        return self == replace(other, index=self.index, home=self.home)

    def block(self, row: int) -> slice:
        """Where block ``row`` lies within a fragment."""
        start = row * self.block_bytes
        return slice(start, min(start + self.block_bytes, self.fragment_bytes))

    def to_wire(self) -> dict[str, Any]:
        """The header as a plain dict, as superblocks and messages carry it."""
        generation, parent = self.shard.generation, self.parent
        return {
            "run": self.shard.run,
            "generation": str(generation),
            "rank": self.shard.rank,
            "world_size": self.world_size,
            "index": self.index,
            "k": self.k,
            "m": self.m,
            "shard_bytes": self.shard_bytes,
            "fragment_bytes": self.fragment_bytes,
            "block_bytes": self.block_bytes,
            "home": self.home,
            "parent": None if parent is None else str(parent),
            "created_unix_s": self.created_unix_s,
        }

    @classmethod
    def from_wire(cls, fields: object, where: str) -> Self:
        """The header in a decoded map; ``CorruptFragment`` if it is not a header."""
        try:
            header = cls._from_fields(fields)  # type: ignore[arg-type]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CorruptFragment(f"{where}: header cannot be read: {error!r}") from error
        problem = header.problem()
        if problem:
            raise CorruptFragment(f"{where}: header contradicts itself: {problem}")
        return header

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        # A restore of a large run reads hundreds of thousands of headers: check all types at once.
        values = _fields_of(fields)
        if tuple(map(type, values)) != _FIELD_TYPES:
            for name, value, kind in zip(_FIELDS, values, _FIELD_TYPES, strict=True):
                if type(value) is not kind:
                    raise TypeError(f"{name} is {type(value).__name__}")
        run, generation, rank, world_size, index, k, m, shard_bytes, *rest = values
        fragment_bytes, block_bytes, home, created_unix_s = rest
        parent = fields["parent"]
        return cls(
            ShardId(run, Generation.parse(generation), rank),
            world_size,
            index,
            k,
            m,
            shard_bytes,
            fragment_bytes,
            block_bytes,
            home,
            None if parent is None else Generation.parse(parent),
            created_unix_s,
        )

    def problem(self) -> str:
        """Why these numbers are impossible; empty if they fit together."""
        world_size, k, m = self.world_size, self.k, self.m
        wrong = _shape_problem(
            world_size, k, m, self.shard_bytes, self.fragment_bytes, self.block_bytes
        )
        if not 0 <= self.shard.rank < world_size:
            wrong = f"rank {self.shard.rank} of {world_size}, {wrong}".rstrip(", ")
        if not HOME <= self.index < k + m:
            wrong = f"index {self.index} of {k + m}, {wrong}".rstrip(", ")
        return wrong


@lru_cache(
    maxsize=4096
)  # all files of a shard, and often all shards of a run, have the same numbers
def _shape_problem(  # noqa: PLR0917  (positional: they are the key of the cache)
    world_size: int, k: int, m: int, shard_bytes: int, fragment_bytes: int, block_bytes: int
) -> str:
    checks = {
        f"k={k}, m={m}": k >= 1 and m >= 0 and k + m <= 256,
        f"world_size={world_size}": 1 <= world_size <= 1 << 24,
        f"shard_bytes={shard_bytes}": 0 <= shard_bytes < _LIMIT_BYTES,
        f"block_bytes={block_bytes}": block_bytes in _BLOCK_RANGE,
    }
    wrong = [what for what, fits in checks.items() if not fits]
    if not wrong and fragment_bytes != fragment_bytes_for(shard_bytes, k):
        wrong = [f"fragment_bytes={fragment_bytes} for {shard_bytes} over {k}"]
    return ", ".join(wrong)


def pack_superblock(header: Header) -> bytes:
    """The first 4096 bytes of a file: magic, version, header, zeros, CRC32C of all before it."""
    body: bytes = msgpack.packb(header.to_wire())
    prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(body))
    block = (prefix + body).ljust(SUPERBLOCK_BYTES - _CRC.size, b"\0")
    if len(block) > SUPERBLOCK_BYTES - _CRC.size:
        raise CorruptFragment(f"a header of {len(body)} bytes does not fit into a superblock")
    return block + _CRC.pack(crc32c(block))


def parse_superblock(data: Buffer, where: str) -> Header | None:
    """The header in the first bytes of a file; None if they are not a superblock at all.

    Raises ``VersionMismatch`` for another format version, and ``CorruptFragment`` for bytes that
    begin like a superblock but are not one.
    """
    block = bytes(memoryview(data)[:SUPERBLOCK_BYTES])
    if not block.startswith(_MAGIC):
        return None
    if len(block) < SUPERBLOCK_BYTES:
        raise CorruptFragment(f"{where}: superblock cut off at {len(block)} bytes")
    _, version, body_bytes = _PREFIX.unpack_from(block)
    if version != FORMAT_VERSION:
        raise VersionMismatch(where, found=version, known=FORMAT_VERSION)
    (crc,) = _CRC.unpack_from(block, SUPERBLOCK_BYTES - _CRC.size)
    if crc != crc32c(block[: -_CRC.size]):
        raise CorruptFragment(f"{where}: superblock fails its CRC32C")
    if body_bytes > SUPERBLOCK_BYTES - _PREFIX.size - _CRC.size:
        raise CorruptFragment(f"{where}: header of {body_bytes} bytes in a superblock")
    try:
        fields = msgpack.unpackb(block[_PREFIX.size : _PREFIX.size + body_bytes])
    except ValueError as error:
        raise CorruptFragment(f"{where}: header is not msgpack: {error}") from error
    return Header.from_wire(fields, where)


def pack_table(table: np.ndarray) -> bytes:
    """The trailer of a file: table (n, rows) of uint32, its CRC32C, the end mark."""
    body = bytes(table.astype("<u4", copy=False).data.cast("B"))
    return body + _CRC.pack(crc32c(body)) + _END_MARK


def parse_table(data: Buffer, header: Header, where: str) -> np.ndarray:
    """The checksum table, uint32 (n, rows), in a trailer; ``CorruptFragment`` if it is damaged."""
    trailer = bytes(data)
    if len(trailer) != header.trailer_bytes:
        raise CorruptFragment(
            f"{where}: trailer of {len(trailer)} bytes, {header.trailer_bytes} expected"
        )
    if not trailer.endswith(_END_MARK):
        raise CorruptFragment(f"{where}: no end mark; the file was never completed")
    body = trailer[: -len(_END_MARK) - _CRC.size]
    (crc,) = _CRC.unpack_from(trailer, len(body))
    if crc != crc32c(body):
        raise CorruptFragment(f"{where}: checksum table fails its CRC32C")
    return np.frombuffer(body, dtype="<u4").reshape(header.n, header.rows)
