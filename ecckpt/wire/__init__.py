"""Control messages and their bytes. Pure.

A message is a frozen dataclass; its fields say what may be on the wire. ``unpack`` takes nothing
else: a missing, unknown or wrongly typed field is an ``InvalidMessage``.
"""

from ecckpt.wire.coding import (
    MESSAGE_LIMIT_BYTES,
    PROTOCOL_VERSION,
    REQUEST_LIMIT_BYTES,
    pack,
    run_of,
    unpack,
    version_of,
)
from ecckpt.wire.disks import Block, Piece, Retain, Store, Stored, Verified, Verify
from ecckpt.wire.nodes import Done, NodeInfo, Refusal
from ecckpt.wire.repairs import Guard, Member, Presence, Probe, Repair
from ecckpt.wire.restores import Assign, Begin, Fence, Fetch, Fetched, Forget, Sources
from ecckpt.wire.saves import (
    Commit,
    Held,
    Hold,
    Prefetch,
    Progress,
    Protect,
    Reserve,
    Slot,
    Stage,
    Target,
    Watch,
)
from ecckpt.wire.spans import Span, Spans, Trace

__all__ = [
    "MESSAGE_LIMIT_BYTES",
    "PROTOCOL_VERSION",
    "REQUEST_LIMIT_BYTES",
    "Assign",
    "Begin",
    "Block",
    "Commit",
    "Done",
    "Fence",
    "Fetch",
    "Fetched",
    "Forget",
    "Guard",
    "Held",
    "Hold",
    "Member",
    "NodeInfo",
    "Piece",
    "Prefetch",
    "Presence",
    "Probe",
    "Progress",
    "Protect",
    "Refusal",
    "Repair",
    "Reserve",
    "Retain",
    "Slot",
    "Sources",
    "Span",
    "Spans",
    "Stage",
    "Store",
    "Stored",
    "Target",
    "Trace",
    "Verified",
    "Verify",
    "Watch",
    "pack",
    "run_of",
    "unpack",
    "version_of",
]
