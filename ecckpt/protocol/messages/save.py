"""A save: reserve a slot, stage a shard in it, protect it with fragments on peers, commit. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, RunWriter, ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """A rank wants a slot for its next shard, which may be as large as ``header`` says.

    Of the header only run, rank, timeline and sizes count: the step need not be known yet.
    ``memory_bytes`` is the run's budget on this node (0: the agent's default). ``local_ranks`` is
    how many ranks will ask for such a slot, ``holders`` how many peers will keep a fragment of it.
    ``discard`` names generations that this rank has given up.
    """

    header: Header
    memory_bytes: int
    local_ranks: int
    holders: int
    discard: tuple[Generation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A reserved region: map ``path`` and put the shard at ``payload_offset``.

    ``region`` is the name of the file for as long as it exists: a mapping of it stays valid.
    ``use`` changes whenever the region is allocated again; while it is the same, the content sealed
    there is the same. ``file_bytes`` is the size of the region.
    """

    path: str
    region: str
    use: int
    file_bytes: int
    payload_offset: int
    header: Header


@dataclass(frozen=True, slots=True)
class Stage:
    """The shard that ``header`` describes is in the rank's reserved slot, the file ``region``."""

    header: Header
    region: str


@dataclass(frozen=True, slots=True)
class Target:
    """A node that shall hold one fragment."""

    index: int
    node: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Protect:
    """Encode the staged shard (or take the sealed home copy) and have the targets hold it.

    ``writer`` is the sender, by which it is fenced: a restarted run also protects the older
    generation that it restored. The shard counts as protected with ``min_fragments``
    held; with ``every_living``, also the fragments of all targets that can be reached must be.
    """

    shard: ShardId
    writer: RunWriter
    targets: tuple[Target, ...]
    min_fragments: int
    every_living: bool
    memory_bytes: int
    timeout_s: float
    discard: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Watch:
    """Ask how far a shard is; answered after at most ``wait_s``, or when the state changes."""

    shard: ShardId
    known_state: str
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a shard is.

    ``state``: unknown, staging, encoding, scattering, protected or failed. ``held`` is the number
    of fragments that holders have verified; ``problems`` says what went wrong with others.
    """

    state: str
    held: int
    problems: tuple[str, ...]
    encode_s: float
    protected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Hold this fragment: pull it from ``source`` and verify it against ``table``.

    For a ``repair`` nothing is dropped to make room.
    """

    header: Header
    writer: RunWriter
    table: bytes
    source: str
    memory_bytes: int
    timeout_s: float
    discard: tuple[Generation, ...]
    repair: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """This data fragment is being encoded; the receiver may pull it from ``source`` already.

    Best effort: the only effect is that the ``Hold`` that follows may find the bytes already there.
    """

    header: Header
    writer: RunWriter
    source: str
    timeout_s: float
    discard: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """The result of a ``Hold``, sent when its work has ended: ``problem`` is empty on success."""

    shard: ShardId
    index: int
    node: str
    problem: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """This generation will not be committed, although shards of it are protected: drop it."""

    run: str
    generation: Generation


@dataclass(frozen=True, slots=True)
class Commit:
    """Every shard of this generation is protected; older generations may be dropped."""

    run: str
    generation: Generation
