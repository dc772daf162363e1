"""Home copies of this node, proven where they lie: every block checked right before it is used."""

from __future__ import annotations

from ecckpt import wire
from ecckpt.client import AgentClient
from ecckpt.codec import Codec
from ecckpt.copying import COPY_THREADS
from ecckpt.errors import CorruptFragment
from ecckpt.slots import Slots
from ecckpt.tracing import Tracer


class Prover:
    """Proves what this node's agent has in its slots."""

    def __init__(self, agent: AgentClient, slots: Slots, tracer: Tracer) -> None:
        self._agent, self._slots, self._tracer = agent, slots, tracer

    def prove(self, slot: wire.Slot) -> memoryview:
        """The payload of a slot, every block checked; valid until its generation is retired.

        Raises ``CorruptFragment`` if one is bad, and what ``Slots.payload`` raises.
        """
        with self._tracer.span("prove", slot.header.shard):
            return self._proven(slot)

    def _proven(self, slot: wire.Slot) -> memoryview:
        header = slot.header
        payload = self._slots.payload(slot, header.payload_bytes, to_write=False)
        size_bytes = header.fragment_bytes
        views = {
            index: payload[index * size_bytes : (index + 1) * size_bytes]
            for index in range(header.k)
        }
        table = self._agent.table(header)
        bad = Codec(header.k, header.m).verify(
            views, table, header.block_bytes, threads=COPY_THREADS
        )
        if bad:
            raise CorruptFragment(
                f"home copy of {header.shard}: {len(bad)} of {header.k * header.rows} blocks "
                f"fail their CRC32C, the first in fragment {bad[0][0]}, block {bad[0][1]}"
            )
        return payload
