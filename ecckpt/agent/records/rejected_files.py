"""Files that were not adopted, by the run that each of them concerns.

The superblock of such a file cannot be trusted, but its name was chosen when it was made. A file
without a run in its name concerns every run: it may hold anything.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from ecckpt.errors import InvalidConfig
from ecckpt.format.ids import check_run


class RejectedFiles:
    """Names and reasons. ``everywhere`` has those that concern every run."""

    def __init__(self) -> None:
        self.everywhere: dict[str, str] = {}
        self._own: dict[str, dict[str, str]] = {}

    def add(self, name: str, why: str) -> None:
        """Note that a file was not adopted, and why."""
        run = run_in_name(name)
        rejected = self._own.setdefault(run, {}) if run else self.everywhere
        rejected[name] = why

    def runs(self) -> set[str]:
        """The runs that have files of their own here."""
        return {run for run, rejected in self._own.items() if rejected}

    def for_run(self, run: str, *, kept: bool = False) -> Mapping[str, str]:
        """What concerns a run. If it is ``kept``, a later ``add`` is seen in it."""
        own = self._own.setdefault(run, {}) if kept else self._own.get(run, {})
        return ChainMap(self.everywhere, own)


def run_in_name(name: str) -> str:
    """The run in the name of a file (``RUN@...`` or ``RUN.state``); empty if there is none."""
    file = name.removeprefix("disk/")
    run, at, _ = file.partition("@")
    if not at:
        run = file.removesuffix(".state") if file.endswith(".state") else ""
    try:
        return check_run(run)
    except InvalidConfig:
        return ""
