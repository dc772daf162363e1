"""Home copies of this node, proven where they lie: every block checked before it is used.

The one that a restore will most likely be told to load can be proven ahead, while rank 0 still
chooses (docs/decisions/0110-prove-while-choosing.md).
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from ecckpt.client.slot_mappings import Slots, private_payload
from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import CorruptFragment
from ecckpt.format.block_ranges import span_of
from ecckpt.format.fragment_file import Header
from ecckpt.format.ids import ShardId
from ecckpt.memory.buffers import COPY_THREADS
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.save import Slot
from ecckpt.protocol.tracing import Tracer
from ecckpt.protocol.verbs import SLOT
from ecckpt.state.file.shard import Shard, read_shard

_log = logging.getLogger(__name__)

# So much of a shard is still proven after nobody wants it any more.
_PIECE_BYTES = 64 << 20


class _Unwanted(Exception):
    """Nobody waits for this proof any more."""


class Prover:
    """Proves what this node's ``agent`` has in its slots.

    To ``assign`` it the slot is mapped for this process alone: as long as there are views, however
    long ago its generation was retired. The agent must be told so, before or after the proof, as
    long as the slot's ``use`` is the same.
    """

    def __init__(self, slots: Slots, tracer: Tracer, *, assign: bool = False) -> None:
        self._slots, self._tracer, self._assign = slots, tracer, assign

    def prove(
        self, slot: Slot, agent: AgentClient, *, unwanted: threading.Event | None = None
    ) -> memoryview:
        """The payload of a slot, every block checked; valid until its generation is retired.

        Raises ``CorruptFragment`` if one is bad, and what ``Slots.payload`` and the agent raise.
        """
        header = slot.header
        with self._tracer.span("prove", header.shard):
            if self._assign:
                payload = private_payload(slot, header.payload_bytes)
            else:
                payload = self._slots.payload(slot, header.payload_bytes, to_write=False)
            bad = self._bad_blocks(header, payload, agent, unwanted or threading.Event())
        if bad:
            raise CorruptFragment(
                f"home copy of {header.shard}: {len(bad)} of {header.k * header.rows} blocks "
                f"fail their CRC32C, the first in fragment {bad[0][0]}, block {bad[0][1]}"
            )
        return payload

    @staticmethod
    def _bad_blocks(
        header: Header, payload: memoryview, agent: AgentClient, unwanted: threading.Event
    ) -> list[tuple[int, int]]:
        table, codec = agent.table(header), Codec(header.k, header.m)
        step = max(1, _PIECE_BYTES // (header.k * header.block_bytes))
        bad = []
        for start in range(0, header.rows, step):
            if unwanted.is_set():
                raise _Unwanted
            rows = slice(start, min(start + step, header.rows))
            span = span_of(header, rows)
            views = {
                index: payload[index * header.fragment_bytes :][span] for index in range(header.k)
            }
            found = codec.verify(views, table[:, rows], header.block_bytes, threads=COPY_THREADS)
            bad += [(index, start + row) for index, row in found]
        return sorted(bad)


class ProofAhead:
    """One home copy, proven and read by a thread of its own before anybody was told to load it.

    ``agent`` has the patience that its two requests may cost. Nothing that fails here is an error:
    whoever is then told to load the shard proves it again, and reports what is wrong. ``end`` is
    to be called in any case, and leaves no thread behind.
    """

    def __init__(self, prover: Prover, agent: AgentClient, shard: ShardId) -> None:
        self._prover, self._agent, self._shard = prover, agent, shard
        self._unwanted = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ecckpt-prove")
        self._proof = self._pool.submit(self._prove)

    def take(self, slot: Slot, *, timeout_s: float) -> Shard | None:
        """The shard in this slot, if it is what was proven: the same one, in the same place.

        The slot has to be asked for after all older writers were fenced off: an agent that still
        answers with the same ``use`` has not given the region up since the proof began.
        """
        if slot.header.shard != self._shard:
            self._unwanted.set()
            return None
        try:
            proven, shard = self._proof.result(timeout_s)
        except Exception as error:  # it is met again, by whoever waits for it
            self._unwanted.set()
            _log.info("%s is not proven ahead: %s", self._shard, error)
            return None
        return shard if proven == slot else None

    def end(self) -> None:
        """Wait for the thread, which is at its next piece, or in a request, at most."""
        self._unwanted.set()
        self._pool.shutdown()

    def _prove(self) -> tuple[Slot, Shard]:
        slot = self._agent.call(SLOT, self._shard)
        payload = self._prover.prove(slot, self._agent, unwanted=self._unwanted)
        return slot, read_shard(payload[: slot.header.shard_bytes])
