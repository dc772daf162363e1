"""Home copies of this node, proven where they lie: every block is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ecckpt.client.slot_mappings import Slots, private_payload
from ecckpt.client.state_effects import NotWanted
from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import CorruptFragment
from ecckpt.format.block_ranges import span_of
from ecckpt.format.fragment_file import Header
from ecckpt.memory.buffers import COPY_THREADS
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.save import Slot
from ecckpt.state.file.shard import Shard, read_shard

# A proof that is no longer wanted goes on for at most so much of a shard.
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInMemory:
    """A proven shard whose tensors are views of its bytes, and what bringing it cost.

    ``own``: the bytes are this process's, which may keep and change them. ``reseeded``: paths of
    the ``RngState`` to be seeded anew.
    """

    shard: Shard
    pulled_bytes: int = 0
    rebuilt_fragments: int = 0
    reseeded: tuple[str, ...] = ()
    own: bool = False


def prove_home(
    slot: Slot,
    agent: AgentClient,
    slots: Slots,
    *,
    assign: bool,
    wanted: Callable[[], bool],
) -> ShardInMemory:
    """Map a slot of this node's ``agent``, check every block, and read the shard in it.

    To ``assign`` it the slot is mapped for this process alone: as long as there are views, however
    long ago its generation was retired. The agent must be told so, before or after the proof, as
    long as the slot's ``use`` is the same. Without, the views are valid until the generation is
    retired. Raises ``CorruptFragment`` for a bad block, ``NotWanted``, and what ``Slots.payload``
    and the agent raise.
    """
    header = slot.header
    if assign:
        payload = private_payload(slot, header.payload_bytes)
    else:
        payload = slots.payload(slot, header.payload_bytes, to_write=False)
    bad = _bad_blocks(header, payload, agent, wanted)
    if bad:
        raise CorruptFragment(
            f"home copy of {header.shard}: {len(bad)} of {header.k * header.rows} blocks "
            f"fail their CRC32C, the first in fragment {bad[0][0]}, block {bad[0][1]}"
        )
    return ShardInMemory(shard=read_shard(payload[: header.shard_bytes]), own=assign)


def _bad_blocks(
    header: Header, payload: memoryview, agent: AgentClient, wanted: Callable[[], bool]
) -> list[tuple[int, int]]:
    table, codec = agent.table(header), Codec(header.k, header.m)
    step = max(1, _PIECE_BYTES // (header.k * header.block_bytes))
    bad = []
    for start in range(0, header.rows, step):
        if not wanted():
            raise NotWanted
        rows = slice(start, min(start + step, header.rows))
        span = span_of(header, rows)
        views = {index: payload[index * header.fragment_bytes :][span] for index in range(header.k)}
        found = codec.verify(views, table[:, rows], header.block_bytes, threads=COPY_THREADS)
        bad += [(index, start + row) for index, row in found]
    return sorted(bad)
