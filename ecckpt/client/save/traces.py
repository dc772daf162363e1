"""Leaving with this node's agent where the time of saves and restores went."""

from __future__ import annotations

from ecckpt.client import deadlines
from ecckpt.client.effects import Routine, TakeSpans, call_own, perform
from ecckpt.errors import EcckptError
from ecckpt.protocol.messages.trace import Spans
from ecckpt.protocol.verbs import SPANS


def send_spans(run: str) -> Routine[None]:
    """Send the spans noted so far to this node's agent; a failure only costs a look."""
    spans = yield from perform(TakeSpans())
    if not spans:
        return
    try:
        yield from call_own(SPANS, Spans(run, spans), deadlines.SPANS_S)
    except (EcckptError, OSError):
        return
