"""Many seeds, one after another, and what came of them in all."""

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


@dataclass(slots=True)
class Tally:
    """Sums over seeds; ``failed`` are those that broke a promise."""

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
        """Simulated time, counted once for every node."""
        return self.simulated_s * self.nodes / _YEAR_S

    def add(self, outcome: SimulationOutcome) -> None:
        """Count one seed."""
        self.seeds += 1
        self.simulated_s += outcome.simulated_s
        self.events += outcome.events
        self.injected += outcome.injected
        self.counts.add(outcome.counts)
        self.lost += outcome.lost
        if outcome.violation:
            self.failed.append(outcome)

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"node_years": self.node_years}

    def __str__(self) -> str:
        return (
            f"{self.seeds} seeds of {self.nodes} nodes in {self.seconds:.1f} s "
            f"({self.seeds / max(self.seconds, 1e-9):.2f} per second): "
            f"{self.node_years:.3f} node-years, {self.events:,} events, "
            f"{self.injected:,} faults injected, {self.counts}, {self.lost} runs lost to more than "
            f"they promise to survive, {len(self.failed)} violations"
        )


def campaign(
    seeds: Iterable[int],
    nodes: int,
    *,
    clock: Callable[[], float],
    ended: Callable[[SimulationOutcome, Tally], None],
) -> Tally:
    """Simulate each seed; ``ended`` hears of each. ``clock`` tells seconds that really pass."""
    tally = Tally(nodes)
    started_s = clock()
    for seed in seeds:
        with _muted():
            outcome = simulate(seed, nodes)
        tally.add(outcome)
        tally.seconds = clock() - started_s
        ended(outcome, tally)
    return tally


@contextmanager
def _muted() -> Iterator[None]:
    """What agents log of disks that are made up is no news."""
    level = _log.level
    _log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _log.setLevel(level)


def describe(outcome: SimulationOutcome) -> str:
    """One seed, for people: what it drew and what became of it."""
    end = outcome.violation or "every promise was kept"
    return (
        f"seed {outcome.seed}, {outcome.nodes} nodes, {outcome.ranks} ranks, {outcome.rules}\n"
        f"  faults: {outcome.faults}\n"
        f"  {outcome.events:,} events in {outcome.simulated_s:.1f} simulated s, "
        f"{outcome.injected:,} faults injected, {outcome.counts}, digest {outcome.digest:08x}\n"
        f"  {end}"
    )
