"""What leaves room for the training on a node: the agent's CPUs, its priority, its pull rate."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ecckpt.errors import InvalidConfig

_CPUS = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")
_MOST_CPUS = 8192


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """``cpus`` as in "0-3,8", empty for all; ``nice`` 0 to 19; ``pull_bytes_per_s`` 0: no limit."""

    cpus: str = ""
    nice: int = 0
    pull_bytes_per_s: float = 0.0

    def apply(self) -> None:
        """Give this process, and those it starts, its CPUs and its priority.

        Without ``cpus`` it gets all CPUs: an agent that a rank starts would otherwise inherit the
        few that this rank is bound to. Raises ``InvalidConfig`` if the system refuses.
        """
        cpus = parse_cpus(self.cpus) or range(_MOST_CPUS)
        try:
            os.sched_setaffinity(0, cpus)
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        except OSError as error:
            wanted = f"CPUs {self.cpus or 'all'} and nice {self.nice}"
            raise InvalidConfig(f"cannot have {wanted}: {error.strerror}") from error


def parse_cpus(text: str) -> set[int]:
    """The numbers in a list like "0-3,8"; an empty text is the empty set.

    Raises ``InvalidConfig`` for anything else.
    """
    if not text:
        return set()
    if not _CPUS.fullmatch(text):
        raise InvalidConfig(f"{text!r} is not a list of CPUs", hint='such as "0-3,8"')
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), min(int(last or first), _MOST_CPUS) + 1))
    if not found:
        raise InvalidConfig(f"{text!r} names no CPU")
    return found
