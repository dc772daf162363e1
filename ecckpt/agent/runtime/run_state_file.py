"""The bytes of a run's state file: a CRC32C, then a msgpack map. Pure.

Used for the state files in tmpfs (region_store.py) and on disk (disk_store.py).
"""

from __future__ import annotations

from typing import Any

import msgpack

from ecckpt.agent.records.run_notes import NOT_KNOWN_S, RunNotes
from ecckpt.coding.crc32c import crc32c
from ecckpt.errors import CorruptFragment, InvalidMessage
from ecckpt.format.ids import Generation
from ecckpt.policy.rollbacks import RollBack, in_force
from ecckpt.protocol.encoding import pack_message, unpack_message
from ecckpt.protocol.messages.repair import Guard


def pack_notes(notes: RunNotes) -> bytes:
    """The bytes of a run's notes."""
    fields = {
        "fence": notes.fence,
        "committed": str(notes.committed or ""),
        "restored": str(notes.restored or ""),
        "roll_backs": [[each.timeline, str(each.target)] for each in notes.roll_backs],
        "stored": [str(each) for each in notes.stored],
        "guard": pack_message(notes.guard) if notes.guard else b"",
        "restored_by": notes.restored_by,
        "session": notes.session,
        "born_s": notes.born_s,
    }
    body: bytes = msgpack.packb(fields)
    return crc32c(body).to_bytes(4, "little") + body


def unpack_notes(raw: bytes, where: str) -> RunNotes:
    """The notes in these bytes; ``CorruptFragment`` or ``InvalidMessage`` if they cannot be read.

    Fields that an earlier release did not write have defaults.
    """
    if int.from_bytes(raw[:4], "little") != crc32c(raw[4:]):
        raise CorruptFragment(f"{where}: run state fails its CRC32C")
    try:
        fields: dict[str, Any] = msgpack.unpackb(raw[4:])
        restored_by = fields.get("restored_by", fields["fence"])
        session = fields.get("session", "")
        if type(fields["fence"]) is not int or type(restored_by) is not int:
            raise InvalidMessage(f"{where}: the fence or a timeline is not a number")
        if type(session) is not str:
            raise InvalidMessage(f"{where}: the session is not a text")
        born_s = fields.get("born_s", NOT_KNOWN_S)
        if type(born_s) is not float:
            raise InvalidMessage(f"{where}: when the session was started is not a number")
        roll_backs = (
            RollBack(int(timeline), Generation.parse(target))
            for timeline, target in fields.get("roll_backs", ())
        )
        return RunNotes(
            fence=fields["fence"],
            committed=Generation.parse(fields["committed"]) if fields["committed"] else None,
            restored=Generation.parse(fields["restored"]) if fields["restored"] else None,
            roll_backs=in_force(roll_backs),
            stored=tuple(Generation.parse(each) for each in fields.get("stored", ())),
            guard=unpack_message(Guard, fields["guard"]) if fields.get("guard") else None,
            restored_by=restored_by,
            session=session,
            born_s=born_s,
        )
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise InvalidMessage(f"{where}: not the state of a run: {error}") from error
