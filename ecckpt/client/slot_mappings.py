"""Slots as a trainer sees them: files of its node's agent, mapped once and used again."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from pathlib import Path

from ecckpt.errors import CorruptFragment
from ecckpt.memory.mapping import fault_in, map_file
from ecckpt.protocol.messages.save import Slot

# The committed generation, the one being saved, and one that a restore or a failed save left.
_KEPT = 4


class Slots:
    """Mappings by region name. A region keeps its name for life, so a mapping never goes stale.

    Thread-safe: slots are mapped in the background, ahead of their use.
    """

    def __init__(self) -> None:
        self._maps: OrderedDict[str, memoryview] = OrderedDict()
        self._faulted_in: set[str] = set()
        self._lock = threading.Lock()

    def payload(self, slot: Slot, payload_bytes: int, *, to_write: bool = True) -> memoryview:
        """The payload of a slot, writable; valid until the slot's generation is retired.

        Every page would fault at its first write, so they all are brought in before. For reading
        the kernel maps several with each fault: not ``to_write`` leaves it to that. Only who writes
        has the oldest mappings undone. Raises
        ``CorruptFragment`` if the slot has no room for that many bytes.
        """
        payload = self._payload(slot, payload_bytes, to_write=to_write)
        with self._lock:
            # A restore reads in threads of its own, which unmap nothing either (see ``ahead``).
            while to_write and len(self._maps) > _KEPT:
                region, _ = self._maps.popitem(last=False)  # unmapped with its last view
                self._faulted_in.discard(region)
        return payload

    def ahead(self, slot: Slot, payload_bytes: int) -> None:
        """Map a slot for the ``payload`` to come; raises what that does.

        In the background, so it unmaps nothing: what CUDA knows would have to be unregistered, and
        no thread may do that while another one captures a CUDA graph.
        """
        self._payload(slot, payload_bytes, to_write=True)

    def _payload(self, slot: Slot, payload_bytes: int, *, to_write: bool) -> memoryview:
        start = slot.payload_offset
        _check_room(slot, payload_bytes)
        with self._lock:
            mapped = self._maps.pop(slot.region, None)
            if mapped is None:
                mapped = _map(slot)
            self._maps[slot.region] = mapped
            if to_write and slot.region not in self._faulted_in:
                self._faulted_in.add(slot.region)
                with contextlib.suppress(OSError):  # before Linux 5.14 the save pays for each fault
                    fault_in(mapped)
        return mapped[start : start + payload_bytes]

    def close(self) -> None:
        """Forget all mappings."""
        with self._lock:
            self._maps.clear()
            self._faulted_in.clear()


def private_payload(slot: Slot, payload_bytes: int) -> memoryview:
    """The payload of a slot, writable, in a mapping of its own; what is written stays in there.

    Nobody may write to the slot from now on: that would show here. Its memory goes with the last
    view, even if the agent has given it back long before. Raises what ``Slots.payload`` does.
    """
    begin = slot.payload_offset
    _check_room(slot, payload_bytes)
    return _map(slot, private=True)[begin : begin + payload_bytes]


def _check_room(slot: Slot, payload_bytes: int) -> None:
    if slot.payload_offset + payload_bytes > slot.file_bytes:
        raise CorruptFragment(f"{payload_bytes} bytes into a slot of {slot.file_bytes}")


def _map(slot: Slot, *, private: bool = False) -> memoryview:
    path = Path(slot.path)
    with path.open("r+b") as file:
        size_bytes = path.stat().st_size
        if size_bytes < slot.file_bytes or slot.file_bytes < slot.header.file_bytes:
            raise CorruptFragment(
                f"slot {path} has {size_bytes} bytes, {slot.header.file_bytes} are needed"
            )
        return map_file(file.fileno(), slot.file_bytes, private=private)
