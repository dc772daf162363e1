"""Slots as a trainer sees them: files of its node's agent, mapped once and used again."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from pathlib import Path

from ecckpt import wire
from ecckpt.errors import CorruptFragment

# The committed generation, the one being saved, and one that a restore or a failed save left.
_KEPT = 4


class Slots:
    """Mappings by region name. A region keeps its name for life, so a mapping never goes stale."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()

    def payload(self, slot: wire.Slot) -> memoryview:
        """The payload of a slot, writable; valid until the slot's generation is retired."""
        mapped = self._maps.pop(slot.region, None) or _map(slot)
        self._maps[slot.region] = mapped
        while len(self._maps) > _KEPT:
            self._maps.popitem(last=False)  # unmapped when its last view is gone
        start = slot.payload_offset
        return memoryview(mapped)[start : start + slot.header.payload_bytes]

    def close(self) -> None:
        """Forget all mappings."""
        self._maps.clear()


def _map(slot: wire.Slot) -> mmap.mmap:
    path = Path(slot.path)
    with path.open("r+b") as file:
        size_bytes = path.stat().st_size
        if size_bytes < slot.file_bytes or slot.file_bytes < slot.header.file_bytes:
            raise CorruptFragment(
                f"slot {path} has {size_bytes} bytes, {slot.header.file_bytes} are needed"
            )
        # Populated now: the pages exist, and a fault for each would cost the first save dearly.
        return mmap.mmap(file.fileno(), slot.file_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
