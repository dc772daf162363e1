"""Scrubbing: reading all files on disk again and again to find damage.

    rest (SCRUB_REST_S) --Due--> round: the files on disk now, the oldest first
      ^                            |
      |                            v
      +---- no file left ------- check one file --> damaged: note it and warn

A damaged file is named in the status and kept: its good blocks still help to decode a shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecckpt.agent import deadlines
from ecckpt.agent.core.actions import Action, Check, Wake, Warn
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.tasks import Scrubbing

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile


class Scrubber:
    """One round after another, one file at a time, at ``bytes_per_s`` (0: never)."""

    def __init__(self, records: RunRecords, *, bytes_per_s: float) -> None:
        self._records = records
        self._bytes_per_s = bytes_per_s

    def schedule_first_round(self, now_s: float) -> list[Action]:
        """Begin with a rest: a starting agent has more urgent reads."""
        if not (self._bytes_per_s and self._records.disk):
            return []
        return [Wake(now_s + deadlines.SCRUB_REST_S, Scrubbing())]

    def due(self, scrubbing: Scrubbing, now_s: float) -> list[Action]:
        """Begin a round."""
        scrubbing.waiting.extend(self._records.files())
        return self._next(scrubbing, now_s)

    def checked(self, check: Check, verdict: str, now_s: float) -> list[Action]:
        """A file was read; ``verdict`` says what is wrong with it, or is empty."""
        news = bool(verdict) and self._records.note_damage(check.file, verdict)
        warned = [Warn(f"damaged: {check.file.path.name}: {verdict}")] if news else []
        return [*warned, *self._next(check.scrubbing, now_s)]

    def _next(self, scrubbing: Scrubbing, now_s: float) -> list[Action]:
        while scrubbing.waiting:
            file: DiskFile = scrubbing.waiting.popleft()
            if self._records.has_file(file):  # it may have been removed since the round began
                return [Check(scrubbing, file, self._bytes_per_s)]
        return [Wake(now_s + deadlines.SCRUB_REST_S, scrubbing)]
