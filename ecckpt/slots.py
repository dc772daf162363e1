"""Slots as a trainer sees them: files of its node's agent, mapped once and used again."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from pathlib import Path

from ecckpt import wire
from ecckpt.errors import CorruptFragment
from ecckpt.mapping import fault_in, map_file

# The committed generation, the one being saved, and one that a restore or a failed save left.
_KEPT = 4


class Slots:
    """Mappings by region name. A region keeps its name for life, so a mapping never goes stale.

    Thread-safe: slots are mapped in the background, ahead of their use.
    """

    def __init__(self) -> None:
        self._maps: OrderedDict[str, memoryview] = OrderedDict()
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
        return mapped[start : start + payload_bytes]

    def close(self) -> None:
        """Forget all mappings."""
        with self._lock:
            self._maps.clear()


def _map(slot: wire.Slot) -> memoryview:
    path = Path(slot.path)
    with path.open("r+b") as file:
        size_bytes = path.stat().st_size
        if size_bytes < slot.file_bytes or slot.file_bytes < slot.header.file_bytes:
            raise CorruptFragment(
                f"slot {path} has {size_bytes} bytes, {slot.header.file_bytes} are needed"
            )
        view = map_file(file.fileno(), slot.file_bytes)
    with contextlib.suppress(OSError):  # before Linux 5.14 the first save pays for each fault
        fault_in(view)
    return view
