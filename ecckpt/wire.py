"""Control messages and their bytes: small msgpack maps, checked field by field. Pure.

A message is a frozen dataclass; its fields say what may be on the wire. ``unpack`` takes nothing
else: a missing, unknown or wrongly typed field is an ``InvalidMessage``.
"""

from __future__ import annotations

import collections.abc
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin

import msgpack

from ecckpt.errors import CorruptFragment, InvalidMessage
from ecckpt.fragment import Header
from ecckpt.generation import Generation, ShardId
from ecckpt.lineage import RollBack

PROTOCOL_VERSION = 4
REQUEST_LIMIT_BYTES = 8 << 20
MESSAGE_LIMIT_BYTES = 64 << 20  # of an answer: an inventory grows with the cluster

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Who an agent is. ``instance`` is new whenever the agent's memory is."""

    node: str
    instance: str
    domain: str
    address: str
    root: str
    protocol_version: int
    format_version: int
    pid: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not done: the error's class name, its text and its whole numbers."""

    error: str
    message: str
    facts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Reserve:
    """A trainer wants a slot for its next shard, which may be as large as ``header`` says.

    Of the header, run, rank, timeline and sizes count: the step need not be known yet.
    ``memory_bytes`` is the run's budget on this node (0: the agent's default), ``local_ranks`` how
    many ranks will ask for a slot of this kind, ``holders`` how many peers will keep a fragment of
    it; ``discard`` names generations this rank gave up.
    """

    header: Header
    memory_bytes: int
    local_ranks: int
    holders: int
    discard: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """A reserved file: map ``path``, the shard belongs at ``payload_offset``.

    ``region`` names the file for life: a mapping made once stays good for it. ``file_bytes`` is
    how much fits into it.
    """

    path: str
    region: str
    file_bytes: int
    payload_offset: int
    header: Header


@dataclass(frozen=True, slots=True)
class Stage:
    """The shard that ``header`` describes is in the reserved slot of that ``region``."""

    header: Header
    region: str


@dataclass(frozen=True, slots=True)
class Target:
    """A node that shall hold one fragment."""

    index: int
    node: str
    address: str


@dataclass(frozen=True, slots=True)
class Protect:
    """Encode the staged shard (or take the sealed home copy) and have the targets hold it.

    ``writer`` is the timeline of whoever asks: what fencing goes by, since a restarted run also
    protects the older generation that it came back with.
    """

    shard: ShardId
    writer: int
    targets: tuple[Target, ...]
    min_fragments: int
    memory_bytes: int
    timeout_s: float
    discard: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Watch:
    """Ask how far a shard is; the answer may take up to ``wait_s`` unless there is news."""

    shard: ShardId
    known_state: str
    known_committed: bool
    wait_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a shard is.

    ``state``: unknown, staging, encoding, scattering, protected or failed. ``held`` fragments are
    verified at their holders; ``problems`` says what went wrong with the others.
    """

    state: str
    held: int
    problems: tuple[str, ...]
    committed: bool
    encode_s: float
    protected_s: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Please hold this fragment: pull it from ``source`` and verify it against ``table``.

    For a ``repair`` nothing else is dropped.
    """

    header: Header
    writer: int
    table: bytes
    source: str
    memory_bytes: int
    timeout_s: float
    discard: tuple[Generation, ...]
    repair: bool


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to ``Hold``, when the work is done: ``problem`` is empty on success."""

    shard: ShardId
    index: int
    node: str
    problem: str


@dataclass(frozen=True, slots=True)
class Member:
    """A node of a group: where it is, and what it fails together with."""

    node: str
    domain: str
    address: str


@dataclass(frozen=True, slots=True)
class Guard:
    """Watch over the home copies of a run on this node, and re-make what their holders lose.

    ``members`` are the other nodes of the group in ring order: the first ``holders`` of them keep
    fragments 0, 1, ...; the others may take what a lost one had. ``local_ranks`` have their home
    here; ``memory_bytes`` is the run's budget on each node (0: the agent's default), of which a
    repair leaves what saves need. ``timeout_s`` is for the repair of one shard.
    """

    run: str
    writer: int
    members: tuple[Member, ...]
    holders: int
    local_ranks: int
    memory_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A home asks another node whether it lives, and what it has of these shards."""

    run: str
    shards: tuple[ShardId, ...]


@dataclass(frozen=True, slots=True)
class Presence:
    """What a node has of the shards it was asked about, in their order: indices (-1: home copy).

    ``coming`` are fragments that it is about to pull, or pulling; ``committed`` is the newest
    generation that it was told of.
    """

    node: str
    committed: Generation | None
    held: tuple[tuple[int, ...], ...]
    coming: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Every shard of this generation reached its redundancy; older ones may go."""

    run: str
    generation: Generation


@dataclass(frozen=True, slots=True)
class Store:
    """Write to disk what you have of this generation; asked again, it tells how far that is.

    ``disk_bytes`` is the run's budget on the node's disk (0: the agent's default); ``discard``
    names generations whose storing the sender gave up.
    """

    run: str
    generation: Generation
    disk_bytes: int
    discard: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A home copy (index -1) or fragment of a rank's shard."""

    rank: int
    index: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What of the generation is on this node's disk, and survives a loss of power.

    ``disk``: whether there is one. ``waiting_bytes`` are still to be written; ``problems`` says
    what will not be.
    """

    disk: bool
    pieces: tuple[Piece, ...]
    waiting_bytes: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Retain:
    """These generations, oldest first, are on disk everywhere and stay.

    All others that are older than the last of them may go from disk. ``writer`` is the timeline of
    whoever says so.
    """

    run: str
    writer: int
    generations: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """Check every block of a home copy (index -1) or fragment, in memory or on ``disk``.

    At most ``bytes_per_s`` are read (0: as fast as it goes).
    """

    shard: ShardId
    index: int
    disk: bool
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Block:
    """One block: which fragment's, and which row."""

    index: int
    row: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Blocks that fail their checksum, and what else is wrong with the file, if anything."""

    bad: tuple[Block, ...]
    problem: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a timeline of a session, unless another start of the run has; show what is there.

    Refuses all writers of older timelines from then on. Asked again, it is answered again.
    """

    run: str
    timeline: int
    session: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Refuse all writers of older timelines from now on.

    ``restored`` is the generation the new timeline continues, once that is known; ``roll_backs``
    are all that the sender knows of, so that an agent which was not there learns them.
    """

    run: str
    timeline: int
    restored: Generation | None
    roll_backs: tuple[RollBack, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where one fragment can be pulled from."""

    index: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the shard into a slot on this node, from whatever sources are left."""

    header: Header
    writer: int
    sources: tuple[Sources, ...]
    memory_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """A slot with the verified shard in it, and where the bytes came from."""

    slot: Slot
    pulled_bytes: int
    rebuilt_fragments: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of a save or restore: when it began by the node's clock, and how long it took.

    ``index`` is the fragment it was about, or -1.
    """

    name: str
    shard: ShardId
    index: int
    began_unix_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Spans:
    """A rank tells its node's agent where its time went."""

    run: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Where time went on one node: in its ranks and in its agent, the last few thousand spans."""

    node: str
    ranks: tuple[Span, ...]
    agent: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Repair:
    """Have the targets hold their fragments of a shard: from the home copy here, or fetch it first.

    The fields are those of ``Fetch`` and ``Protect``.
    """

    header: Header
    writer: int
    sources: tuple[Sources, ...]
    targets: tuple[Target, ...]
    memory_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The empty answer."""


def run_of(message: Any) -> str:
    """The run that a request is about, wherever it says so."""
    if hasattr(message, "header"):
        message = message.header.shard
    elif hasattr(message, "shard"):
        message = message.shard
    return typing.cast(str, message.run)


def version_of(body: bytes) -> int:
    """The protocol version in a packed ``NodeInfo`` of any version; ``InvalidMessage`` if none."""
    try:
        fields = msgpack.unpackb(body)
        return int(fields["protocol_version"])
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise InvalidMessage(f"NodeInfo: no protocol version: {error!r}") from error


def pack(message: Any) -> bytes:
    """The bytes of a message (any dataclass of this module)."""
    return typing.cast(bytes, msgpack.packb(_plain(message)))


def unpack(kind: type[T], body: bytes) -> T:
    """The message of that kind in ``body``; ``InvalidMessage`` if it is none."""
    if len(body) > MESSAGE_LIMIT_BYTES:
        raise InvalidMessage(f"message of {len(body)} bytes, limit {MESSAGE_LIMIT_BYTES}")
    try:
        plain = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(f"{kind.__name__}: not msgpack: {error}") from error
    return typing.cast(T, _typed(kind, plain, kind.__name__))


def _plain(value: Any) -> Any:
    if isinstance(value, Header):
        return value.to_wire()
    if isinstance(value, Generation):
        return str(value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _typed(kind: Any, value: Any, where: str) -> Any:
    """``value`` as the annotated ``kind``, or ``InvalidMessage``."""
    return _reader_of(kind)(kind, value, where)


def _reader_of(kind: Any) -> Any:
    reader = _READERS.get(kind) or _READERS.get(get_origin(kind))
    if reader is None and is_dataclass(kind):
        reader = _message
    return reader or _scalar


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        value = float(value) if type(value) is int else _expect(float, value, where)
        if not math.isfinite(value):
            raise InvalidMessage(f"{where}: {value} where a finite number belongs")
        return value
    return _expect(kind, value, where)


def _expect(kind: type[T], value: Any, where: str) -> T:
    if type(value) is not kind:
        raise InvalidMessage(f"{where}: {type(value).__name__} where {kind.__name__} belongs")
    return value


def _header(kind: Any, value: Any, where: str) -> Header:
    try:
        return Header.from_wire(value, where)
    except CorruptFragment as error:
        raise InvalidMessage(str(error)) from error


def _generation(kind: Any, value: Any, where: str) -> Generation:
    return Generation.parse(_expect(str, value, where))


def _list(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    inner = get_args(kind)[0]
    read = _reader_of(inner)
    return tuple([read(inner, item, where) for item in _expect(list, value, where)])


def _map(kind: Any, value: Any, where: str) -> dict[Any, Any]:
    key_kind, item_kind = get_args(kind)
    return {
        _typed(key_kind, key, where): _typed(item_kind, item, where)
        for key, item in _expect(dict, value, where).items()
    }


def _optional(kind: Any, value: Any, where: str) -> Any:
    return None if value is None else _typed(get_args(kind)[0], value, where)


_READERS: dict[Any, Any] = {
    Header: _header,
    Generation: _generation,
    tuple: _list,
    collections.abc.Mapping: _map,
    types.UnionType: _optional,
}


def _message(kind: Any, value: Any, where: str) -> Any:
    value = _expect(dict, value, where)
    hints = typing.get_type_hints(kind)
    if value.keys() != hints.keys():
        odd = sorted(str(name)[:80] for name in value.keys() ^ hints.keys())
        raise InvalidMessage(f"{where}: missing or unknown fields: {', '.join(odd[:8])}")
    return kind(
        **{name: _typed(hint, value[name], f"{where}.{name}") for name, hint in hints.items()}
    )
