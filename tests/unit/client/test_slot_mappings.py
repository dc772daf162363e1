"""Slots as a trainer sees them: mapped once, some of them kept."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from ecckpt.client.slot_mappings import Slots, private_payload
from ecckpt.errors import CorruptFragment
from ecckpt.format.fragment_file import SUPERBLOCK_BYTES
from ecckpt.protocol.messages.save import Slot
from tests.support.builders import header

HEADER = header()


@contextmanager
def regions(count):
    """Slots of an agent, in its folder."""
    folder = Path("/dev/shm") / f"ecckpt-slots-{os.getpid()}"
    folder.mkdir()
    try:
        for number in range(count):
            (folder / f"{number}.region").write_bytes(bytes([number]) * HEADER.file_bytes)
        yield [
            Slot(
                path=str(path),
                region=path.stem,
                use=1,
                file_bytes=HEADER.file_bytes,
                payload_offset=SUPERBLOCK_BYTES,
                header=HEADER,
            )
            for path in sorted(folder.iterdir())
        ]
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def mapped():
    """The numbers of the regions that are mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({Path(line.split()[5]).stem for line in lines if f"slots-{os.getpid()}" in line})


def test_the_latest_stay_mapped():
    slots = Slots()
    with regions(6) as made:
        for number, slot in enumerate(made):
            assert bytes(slots.payload(slot, 100)) == bytes([number]) * 100
        assert mapped() == ["2", "3", "4", "5"]
        slots.payload(made[2], 100)  # not the oldest any more
        slots.payload(made[0], 100)
        assert mapped() == ["0", "2", "4", "5"]
        slots.close()
        assert not mapped()


def test_nothing_is_unmapped_in_the_background():
    """Memory that CUDA knows would be unregistered there, beside a capture of a CUDA graph."""
    slots = Slots()
    with regions(6) as made:
        for slot in made[:4]:
            slots.payload(slot, 100)
        slots.ahead(made[4], 100)
        assert mapped() == ["0", "1", "2", "3", "4"]
        slots.payload(made[5], 100, to_write=False)  # as a proof ahead of its order does
        assert mapped() == ["0", "1", "2", "3", "4", "5"]
        slots.payload(made[4], 100)
        assert mapped() == ["2", "3", "4", "5"]
        slots.close()


def test_a_private_payload_is_the_callers():
    slots = Slots()
    with regions(1) as (slot,):
        private, shared = private_payload(slot, 100), slots.payload(slot, 100)
        private[:] = bytes(range(100))
        assert bytes(shared) == bytes(100)
        slots.close()
        del shared
        assert mapped() == ["0"]
        with pytest.raises(CorruptFragment, match="into a slot"):
            private_payload(slot, slot.file_bytes)
        del private
        assert not mapped()


def test_a_slot_that_is_too_small():
    slots = Slots()
    with regions(1) as (slot,):
        with pytest.raises(CorruptFragment, match="into a slot"):
            slots.ahead(slot, slot.file_bytes)
        os.truncate(slot.path, slot.file_bytes - 1)
        with pytest.raises(CorruptFragment, match="are needed"):
            slots.payload(slot, 100)


def test_mappings_of_removed_files_are_dropped():
    slots = Slots()
    with regions(3) as made:
        for slot in made:
            slots.payload(slot, 100)
        Path(made[1].path).unlink()
        slots.drop_removed()
        assert mapped() == ["0", "2"]
        slots.drop_removed()  # the others stay
        assert mapped() == ["0", "2"]
        slots.close()
