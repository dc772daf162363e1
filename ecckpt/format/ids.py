"""The identity of a checkpoint: run, generation and shard, their order and their spelling. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from ecckpt.errors import InvalidConfig, InvalidMessage

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_IDENTITY = re.compile(r"~[0-9a-f]{16}")
_WRITER = re.compile(r"(0|[1-9][0-9]{0,17})\.([0-9a-f]{16})?")
_GENERATION = re.compile(r"(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})\.([0-9a-f]{16})")


def check_name(what: str, name: str) -> str:
    """Return ``name`` if it can be used in paths and URLs, else raise ``InvalidConfig``."""
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"{what} {name!r} is not a usable name",
            hint="1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit",
        )
    return name


def check_run(run: str) -> str:
    """Return ``run`` if it names a run, in full or not, else raise ``InvalidConfig``.

    A run has the name that the user gave and an identity, 16 hex digits that are drawn at its first
    start: ``name~identity`` is its full name. Runs of one name and two identities are different
    runs: jobs that did not know of each other.
    """
    name = plain_name(run)
    identity = run[len(name) :]
    if identity and not _IDENTITY.fullmatch(identity):
        raise InvalidConfig(
            f"run {run!r} is not a usable name",
            hint="what follows a '~' is the run's identity, 16 hexadecimal digits",
        )
    check_name("run", name)
    return run


def plain_name(run: str) -> str:
    """The name that the user gave, without the identity."""
    return run.partition("~")[0]


def is_run(run: str, wanted: str) -> bool:
    """Whether a full name is the wanted one, or has the wanted name if that lacks an identity."""
    return run == wanted or plain_name(run) == wanted


@dataclass(frozen=True, slots=True)
class RunWriter:
    """Who changes a run: a session, on the timeline that it began.

    Without ``session`` any session is meant: a repair by hand.
    """

    timeline: int
    session: str

    def __str__(self) -> str:
        return f"{self.timeline}.{self.session}"

    @staticmethod
    def parse(text: str) -> RunWriter:
        """The writer that ``str()`` spelled so; ``InvalidMessage`` for any other text."""
        match = _WRITER.fullmatch(text)
        if not match:
            raise InvalidMessage(f"{text[:80]!r} is no writer (timeline.session)")
        return RunWriter(int(match[1]), match[2] or "")


@dataclass(frozen=True, order=True, slots=True)
class Generation:
    """The product of one save of a run, ordered by timeline and then by step.

    The timeline comes first: a run that went back to step 300 and then saved step 400 has made
    something newer than the step 5000 that it abandoned. ``session`` (16 hex digits, drawn when the
    run starts or restarts) distinguishes two histories that did not know of each other's timeline.
    """

    timeline: int
    step: int
    session: str

    def __str__(self) -> str:
        return f"{self.timeline}.{self.step}.{self.session}"

    @property
    def writer(self) -> RunWriter:
        """Who saved it."""
        return RunWriter(self.timeline, self.session)

    @staticmethod
    @lru_cache(maxsize=1024)  # a large run has many headers and few generations
    def parse(text: str) -> Generation:
        """The generation that ``str()`` spelled so; ``InvalidMessage`` for any other text."""
        match = _GENERATION.fullmatch(text)
        if not match:
            raise InvalidMessage(f"{text[:80]!r} is no generation (timeline.step.session)")
        return Generation(int(match[1]), int(match[2]), match[3])


@dataclass(frozen=True, order=True, slots=True)
class ShardId:
    """The state of one rank in one generation of one run."""

    run: str
    generation: Generation
    rank: int

    def __str__(self) -> str:
        return f"{self.run}/{self.generation}/rank {self.rank}"
