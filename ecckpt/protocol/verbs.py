"""Every verb that an agent answers under ``/v1/runs/{run}/``, in one table.

Clients call by it (agent_client.py), the agent routes by it (agent/runtime/http_app.py), and tests
compare docs/PROTOCOL.md and docs/openapi.yaml with it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ecckpt.errors import (
    CorruptFragment,
    EcckptError,
    Fenced,
    InvalidMessage,
    MemoryBudgetTooSmall,
    NotHeld,
    NotMapped,
    OlderStart,
    RequestRefused,
    TmpfsFull,
    TooFewFragments,
    TwoHistories,
)
from ecckpt.format.ids import ShardId
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.messages.disk import Retain, Store, Stored, Verified, Verify
from ecckpt.protocol.messages.node import Done, Identities
from ecckpt.protocol.messages.repair import Guard, Presence, Probe, Repair
from ecckpt.protocol.messages.restore import Assign, Begin, Fence, Fetch, Fetched, Forget
from ecckpt.protocol.messages.save import (
    Commit,
    Held,
    Hold,
    Prefetch,
    Progress,
    Protect,
    Reserve,
    Revoke,
    Slot,
    Stage,
    Watch,
)
from ecckpt.protocol.messages.trace import Spans, Trace

M = TypeVar("M")
A = TypeVar("A")

_Errors = tuple[type[EcckptError], ...]

# What making a region on the node may be refused with.
_NO_MEMORY: _Errors = (MemoryBudgetTooSmall, TmpfsFull, NotMapped)
_FETCH: _Errors = (Fenced, RequestRefused, *_NO_MEMORY, TooFewFragments)

# Bytes per second at which an agent creates tmpfs pages: a fifth of the slowest rate measured.
_FAULT_IN_BYTES_PER_S = 200e6


def _nothing_extra(message: Any) -> float:
    del message
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verb(Generic[M, A]):
    """One kind of request, and what answers it.

    Attributes:
        name: last part of the path, and the name of the agent's method (agent/runtime/service.py).
        request: class of the body; ``str`` for a GET, whose only argument is the run.
        answer: class of the answer.
        local: answered over the Unix socket only, to ranks of the agent's own node.
        extra_s: seconds that the answer may take beyond the client's timeout.
        errors: what the agent refuses it with, beside what every request may be refused with: a
            body that is no such message, a run that is no name, and HTTP's own reasons.
    """

    name: str
    request: type[M]
    answer: type[A]
    local: bool = False
    extra_s: Callable[[M], float] = _nothing_extra
    errors: _Errors = ()

    @property
    def is_read(self) -> bool:
        """Whether the request is a GET, which changes nothing."""
        return self.request is str


# -- a save ---------------------------------------------------------------------------------------
RESERVE = Verb(
    name="reserve",
    request=Reserve,
    answer=Slot,
    local=True,
    extra_s=lambda message: message.header.file_bytes / _FAULT_IN_BYTES_PER_S,
    errors=(Fenced, InvalidMessage, *_NO_MEMORY),
)
STAGE = Verb(
    name="stage",
    request=Stage,
    answer=Done,
    local=True,
    errors=(Fenced, NotHeld, InvalidMessage),
)
PROTECT = Verb(name="protect", request=Protect, answer=Done, local=True, errors=(Fenced, NotHeld))
WATCH = Verb(
    name="watch",
    request=Watch,
    answer=Progress,
    local=True,
    extra_s=lambda message: message.wait_s,
)
PREFETCH = Verb(name="prefetch", request=Prefetch, answer=Done, errors=(Fenced, InvalidMessage))
HOLD = Verb(
    name="hold",
    request=Hold,
    answer=Done,
    errors=(Fenced, InvalidMessage, CorruptFragment, RequestRefused),
)
HELD = Verb(name="held", request=Held, answer=Done)
COMMIT = Verb(name="commit", request=Commit, answer=Done, errors=(Fenced,))
REVOKE = Verb(name="revoke", request=Revoke, answer=Done, errors=(Fenced, InvalidMessage))

# -- joining -------------------------------------------------------------------------------------
IDENTITIES = Verb(name="identities", request=str, answer=Identities)

# -- a restore ------------------------------------------------------------------------------------
BEGIN = Verb(
    name="begin", request=Begin, answer=Inventory, errors=(Fenced, InvalidMessage, OlderStart)
)
FENCE = Verb(name="fence", request=Fence, answer=Done, errors=(Fenced,))
FETCH = Verb(
    name="fetch",
    request=Fetch,
    answer=Fetched,
    local=True,
    extra_s=lambda message: message.timeout_s,
    errors=_FETCH,
)
SLOT = Verb(name="slot", request=ShardId, answer=Slot, local=True, errors=(NotHeld, InvalidMessage))
ASSIGN = Verb(
    name="assign", request=Assign, answer=Slot, local=True, errors=(NotHeld, InvalidMessage)
)
INVENTORY = Verb(name="inventory", request=str, answer=Inventory, errors=(TwoHistories,))
FORGET = Verb(
    name="forget",
    request=Forget,
    answer=Done,
    errors=(Fenced, InvalidMessage, RequestRefused, TwoHistories),
)

# -- repair ---------------------------------------------------------------------------------------
GUARD = Verb(name="guard", request=Guard, answer=Done, local=True, errors=(Fenced, InvalidMessage))
PROBE = Verb(name="probe", request=Probe, answer=Presence)
REPAIR = Verb(
    name="repair",
    request=Repair,
    answer=Done,
    extra_s=lambda message: message.timeout_s,
    errors=_FETCH,
)

# -- disks ----------------------------------------------------------------------------------------
STORE = Verb(name="store", request=Store, answer=Stored, errors=(Fenced,))
RETAIN = Verb(name="retain", request=Retain, answer=Done, errors=(Fenced, InvalidMessage))
VERIFY = Verb(name="verify", request=Verify, answer=Verified, errors=(NotHeld, RequestRefused))

# -- traces ---------------------------------------------------------------------------------------
SPANS = Verb(name="spans", request=Spans, answer=Done, local=True)
TRACE = Verb(name="trace", request=str, answer=Trace, errors=(TwoHistories,))

VERBS: dict[str, Verb[Any, Any]] = {
    each.name: each for each in list(globals().values()) if isinstance(each, Verb)
}
