"""A save: a slot, what is in it, who holds fragments of it, and that all of it is safe. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import Generation, ShardId


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

    ``region`` names the file for life: a mapping made once stays good for it. ``use`` is another
    number whenever the region is taken for something else; while it is the same, so is what was
    sealed there. ``file_bytes`` is how much fits into it.
    """

    path: str
    region: str
    use: int
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
class Prefetch:
    """This data fragment is about to be encoded: who likes may pull it from ``source`` already.

    Nothing comes of it but that the ``Hold`` that follows finds the bytes there.
    """

    header: Header
    writer: int
    source: str
    timeout_s: float
    discard: tuple[Generation, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to ``Hold``, when the work is done: ``problem`` is empty on success."""

    shard: ShardId
    index: int
    node: str
    problem: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Every shard of this generation reached its redundancy; older ones may go."""

    run: str
    generation: Generation
