"""The bytes of what an agent writes down of a run: a CRC32C, then a msgpack map. Pure."""

from __future__ import annotations

from typing import Any

import msgpack

from ecckpt import wire
from ecckpt.agent.ledger import Notes
from ecckpt.checksums import crc32c
from ecckpt.errors import CorruptFragment, InvalidMessage
from ecckpt.generation import Generation
from ecckpt.lineage import RollBack, in_force


def pack_notes(notes: Notes) -> bytes:
    """The notes of a run as bytes."""
    fields = {
        "fence": notes.fence,
        "committed": str(notes.committed or ""),
        "restored": str(notes.restored or ""),
        "roll_backs": [[each.timeline, str(each.target)] for each in notes.roll_backs],
        "stored": [str(each) for each in notes.stored],
        "guard": wire.pack(notes.guard) if notes.guard else b"",
        "restored_by": notes.restored_by,
        "session": notes.session,
    }
    body: bytes = msgpack.packb(fields)
    return crc32c(body).to_bytes(4, "little") + body


def unpack_notes(raw: bytes, where: str) -> Notes:
    """The notes in those bytes; ``CorruptFragment`` or ``InvalidMessage`` if there are none."""
    if int.from_bytes(raw[:4], "little") != crc32c(raw[4:]):
        raise CorruptFragment(f"{where}: run state fails its CRC32C")
    try:
        fields: dict[str, Any] = msgpack.unpackb(raw[4:])
        restored_by = fields.get("restored_by", fields["fence"])
        session = fields.get("session", "")
        if type(fields["fence"]) is not int or type(restored_by) is not int:
            raise InvalidMessage(f"{where}: no fence in it, or a timeline that is no number")
        if type(session) is not str:
            raise InvalidMessage(f"{where}: a session that is no text")
        roll_backs = (
            RollBack(int(timeline), Generation.parse(target))
            for timeline, target in fields.get("roll_backs", ())
        )
        return Notes(
            fields["fence"],
            Generation.parse(fields["committed"]) if fields["committed"] else None,
            Generation.parse(fields["restored"]) if fields["restored"] else None,
            in_force(roll_backs),
            tuple(Generation.parse(each) for each in fields.get("stored", ())),
            wire.unpack(wire.Guard, fields["guard"]) if fields.get("guard") else None,
            restored_by,
            session,
        )
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise InvalidMessage(f"{where}: no run state: {error}") from error
