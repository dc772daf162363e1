"""The trainer's mappings of slots: files of its node's agent, mapped once and reused.

client/state_performer.py maps the slots that a rank saves into or loads from. client/held_ticket.py
does the same in the process to which a ticket was sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from pathlib import Path

from ecckpt.errors import CorruptFragment
from ecckpt.memory.mapping import fault_in, map_file
from ecckpt.protocol.messages.save import Slot

# The committed generation, the one being saved, one that a restore or a failed save left, and the
# slot mapped ahead.
_KEPT = 4


class Slots:
    """Mappings by region name.

    The agent never gives two regions the same name, so a cached mapping never points to another
    region. Thread-safe: slots are mapped in the background, before a save uses them.
    """

    def __init__(self) -> None:
        self._maps: OrderedDict[str, memoryview] = OrderedDict()
        self._paths: dict[str, Path] = {}
        self._faulted_in: set[str] = set()
        self._lock = threading.Lock()

    def payload(self, slot: Slot, payload_bytes: int, *, to_write: bool = True) -> memoryview:
        """Return the payload of a slot as a writable view.

        The view is valid until the slot's generation is retired.

        With ``to_write`` all pages are faulted in here, because otherwise each page would fault at
        its first write, during the save. A reader leaves that to the kernel, which maps several
        pages with each read fault. Only a call with ``to_write`` unmaps the oldest mappings beyond
        the limit.

        Raises ``CorruptFragment`` if the slot is too small for ``payload_bytes``.
        """
        payload = self._payload(slot, payload_bytes, to_write=to_write)
        with self._lock:
            # A restore reads in threads of its own. They unmap nothing, for the reason that
            # ``ahead`` gives.
            while to_write and len(self._maps) > _KEPT:
                self._drop(next(iter(self._maps)))  # the last view unmaps it
        return payload

    def ahead(self, slot: Slot, payload_bytes: int) -> None:
        """Map a slot in the background, before ``payload`` is called for it.

        Raises what ``payload`` raises. Unmaps nothing: a mapping that CUDA has registered would
        have to be unregistered first, and no thread may do that while another one captures a CUDA
        graph.
        """
        self._payload(slot, payload_bytes, to_write=True)

    def _payload(self, slot: Slot, payload_bytes: int, *, to_write: bool) -> memoryview:
        start = slot.payload_offset
        _check_room(slot, payload_bytes)
        with self._lock:
            mapped = self._maps.pop(slot.region, None)
            if mapped is None:
                mapped = self._map_new(slot)
            self._maps[slot.region] = mapped
            if to_write and slot.region not in self._faulted_in:
                self._faulted_in.add(slot.region)
                # MADV_POPULATE_WRITE needs Linux 5.14. Without it the save takes the page faults.
                with contextlib.suppress(OSError):
                    fault_in(mapped)
        return mapped[start : start + payload_bytes]

    def drop_removed(self) -> None:
        """Drop the mappings whose files are gone: their pages would stay in memory for nothing.

        Called before each save, since its slot may need that memory. The agent removes a slot when
        it may not be used again; another process may remove any. A mapping of which a view is in
        use stays until that view is gone.
        """
        with self._lock:
            for region, path in list(self._paths.items()):
                if not path.exists():
                    self._drop(region)

    def _map_new(self, slot: Slot) -> memoryview:
        mapped = _map(slot)
        self._paths[slot.region] = Path(slot.path)
        return mapped

    def _drop(self, region: str) -> None:
        self._maps.pop(region, None)
        self._paths.pop(region, None)
        self._faulted_in.discard(region)

    def close(self) -> None:
        """Drop all mappings; each is unmapped when its last view is gone."""
        with self._lock:
            self._maps.clear()
            self._paths.clear()
            self._faulted_in.clear()


def private_payload(slot: Slot, payload_bytes: int) -> memoryview:
    """Return the payload of a slot as a copy-on-write view in a mapping of its own.

    What is written to the view does not reach the slot. The slot itself must not be written from
    now on, because pages that were not copied yet would show it. The memory is released with the
    last view, even if the agent has removed the file long before.

    Raises what ``Slots.payload`` raises.
    """
    start = slot.payload_offset
    _check_room(slot, payload_bytes)
    return _map(slot, private=True)[start : start + payload_bytes]


def _check_room(slot: Slot, payload_bytes: int) -> None:
    if slot.payload_offset + payload_bytes > slot.file_bytes:
        raise CorruptFragment(f"{payload_bytes} bytes do not fit into a slot of {slot.file_bytes}")


def _map(slot: Slot, *, private: bool = False) -> memoryview:
    path = Path(slot.path)
    with path.open("r+b") as file:
        size_bytes = path.stat().st_size
        if size_bytes < slot.file_bytes or slot.file_bytes < slot.header.file_bytes:
            raise CorruptFragment(
                f"slot {path} has {size_bytes} bytes, {slot.header.file_bytes} are needed"
            )
        return map_file(file.fileno(), slot.file_bytes, private=private)
