"""Simulate many seeds, one after another, and sum up the outcomes. For ``ecckpt simulate``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from ecckpt.sim.simulate import SimulationOutcome, simulate
from ecckpt.sim.truth.counts import Counts

_log = logging.getLogger("ecckpt")

_YEAR_S = 365.25 * 24 * 3600


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over seeds; ``failed`` are the outcomes with a violation."""

    nodes: int
    seeds: int = 0
    seconds: float = 0.0
    simulated_s: float = 0.0
    events: int = 0
    injected: int = 0
    counts: Counts = field(default_factory=Counts)
    lost: int = 0
    failed: list[SimulationOutcome] = field(default_factory=list)

    @property
    def node_years(self) -> float:
        """Simulated time times the number of nodes."""
        return self.simulated_s * self.nodes / _YEAR_S

    def add(self, outcome: SimulationOutcome) -> None:
        """Add the outcome of one seed."""
        self.seeds += 1
        self.simulated_s += outcome.simulated_s
        self.events += outcome.events
        self.injected += outcome.injected
        self.counts.add(outcome.counts)
        self.lost += outcome.lost
        if outcome.violation:
            self.failed.append(outcome)

    def as_json(self) -> dict[str, Any]:
        """The tally as plain values, for ``--json``."""
        return asdict(self) | {"node_years": self.node_years}

    def __str__(self) -> str:
        return (
            f"{self.seeds} seeds of {self.nodes} nodes in {self.seconds:.1f} s "
            f"({self.seeds / max(self.seconds, 1e-9):.2f} per second): "
            f"{self.node_years:.3f} node-years, {self.events:,} events, "
            f"{self.injected:,} faults injected, {self.counts}, {self.lost} runs lost to more "
            f"failures than they promise to survive, {len(self.failed)} violations"
        )


def campaign(
    seeds: Iterable[int],
    nodes: int,
    *,
    clock: Callable[[], float],
    ended: Callable[[SimulationOutcome, Tally], None],
) -> Tally:
    """Simulate each seed and return the sums.

    ``ended`` is called after each seed. ``clock`` returns real seconds; the simulator may not read
    a clock itself.
    """
    tally = Tally(nodes=nodes)
    started_s = clock()
    for seed in seeds:
        with _log_muted():
            outcome = simulate(seed, nodes)
        tally.add(outcome)
        tally.seconds = clock() - started_s
        ended(outcome, tally)
    return tally


@contextmanager
def _log_muted() -> Iterator[None]:
    """Suppress what agents log about simulated disks and memory."""
    level = _log.level
    _log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _log.setLevel(level)


def describe(outcome: SimulationOutcome) -> str:
    """One outcome as text: what the seed drew, and what became of it."""
    end = outcome.violation or "every promise was kept"
    return (
        f"seed {outcome.seed}, {outcome.nodes} nodes, {outcome.ranks} ranks, {outcome.rules}\n"
        f"  faults: {outcome.faults}\n"
        f"  {outcome.events:,} events in {outcome.simulated_s:.1f} simulated s, "
        f"{outcome.injected:,} faults injected, {outcome.counts}, digest {outcome.digest:08x}\n"
        f"  {end}"
    )
