"""Slots as a trainer sees them: files of its node's agent, mapped once and used again."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import OrderedDict
from pathlib import Path

from ecckpt import wire
from ecckpt.errors import CorruptFragment

# The committed generation, the one being saved, and one that a restore or a failed save left.
_KEPT = 4
_MADV_POPULATE_READ = 22
_FAULT_BYTES = 16 << 20


class Slots:
    """Mappings by region name. A region keeps its name for life, so a mapping never goes stale.

    Thread-safe: slots are mapped in the background, ahead of their use.
    """

    def __init__(self) -> None:
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def payload(self, slot: wire.Slot, payload_bytes: int) -> memoryview:
        """The payload of a slot, writable; valid until the slot's generation is retired.

        Raises ``CorruptFragment`` if the slot has no room for that many bytes.
        """
        start = slot.payload_offset
        if start + payload_bytes > slot.file_bytes:
            raise CorruptFragment(f"{payload_bytes} bytes into a slot of {slot.file_bytes}")
        with self._lock:
            mapped = self._maps.pop(slot.region, None) or _map(slot)
            self._maps[slot.region] = mapped
            while len(self._maps) > _KEPT:
                self._maps.popitem(last=False)  # unmapped when its last view is gone
        return memoryview(mapped)[start : start + payload_bytes]

    def close(self) -> None:
        """Forget all mappings."""
        with self._lock:
            self._maps.clear()


def _map(slot: wire.Slot) -> mmap.mmap:
    path = Path(slot.path)
    with path.open("r+b") as file:
        size_bytes = path.stat().st_size
        if size_bytes < slot.file_bytes or slot.file_bytes < slot.header.file_bytes:
            raise CorruptFragment(
                f"slot {path} has {size_bytes} bytes, {slot.header.file_bytes} are needed"
            )
        mapped = mmap.mmap(file.fileno(), slot.file_bytes)
    # The pages exist, and a fault for each would cost the first save dearly. In steps, because the
    # training program must be able to go on in between.
    with contextlib.suppress(OSError):  # before Linux 5.14
        for start in range(0, slot.file_bytes, _FAULT_BYTES):
            length = min(_FAULT_BYTES, slot.file_bytes - start)
            mapped.madvise(_MADV_POPULATE_READ, start, length)
    return mapped
