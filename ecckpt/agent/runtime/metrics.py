"""The status of an agent in the text format 0.0.4 of Prometheus. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

KIND = "text/plain; version=0.0.4; charset=utf-8"

_Facts = Mapping[str, Any]

# Name, kind, help text, and the value in a run's status (None: the metric is left out).
_METRICS: tuple[tuple[str, str, str, Callable[[_Facts], int | None]], ...] = (
    (
        "ecckpt_margin_nodes",
        "gauge",
        "node losses that the newest committed shards of this node's ranks survive now",
        lambda facts: facts["guard"] and facts["guard"]["margin"],
    ),
    (
        "ecckpt_fragments_missing",
        "gauge",
        "fragments of those shards that no answering node holds",
        lambda facts: facts["guard"] and facts["guard"]["missing"],
    ),
    (
        "ecckpt_holders_lost",
        "gauge",
        "nodes that should hold fragments of them and do not answer",
        lambda facts: facts["guard"] and len(facts["guard"]["lost"]),
    ),
    (
        "ecckpt_repairs_total",
        "counter",
        "fragments made again since the agent started",
        lambda facts: facts["guard"] and facts["guard"]["repaired"],
    ),
    (
        "ecckpt_committed_step",
        "gauge",
        "step of the newest generation that this node knows to be committed",
        lambda facts: int(facts["committed"].split(".")[1]) if facts["committed"] else None,
    ),
    ("ecckpt_home_copies", "gauge", "home copies in memory", lambda facts: facts["home_copies"]),
    ("ecckpt_fragments", "gauge", "peers' fragments in memory", lambda facts: facts["fragments"]),
    ("ecckpt_used_bytes", "gauge", "memory of the run", lambda facts: facts["used_bytes"]),
    ("ecckpt_disk_bytes", "gauge", "the run's files on disk", lambda facts: facts["disk_bytes"]),
    (
        "ecckpt_files_damaged",
        "gauge",
        "files in memory and on disk that a verification or the scrub found damaged",
        lambda facts: len(facts["damaged"]),
    ),
    ("ecckpt_files_rejected", "gauge", "files not adopted", lambda facts: len(facts["rejected"])),
)


def exposition(status: _Facts) -> str:
    """The text for a status (``AgentService.status``). Names of runs need no escaping."""
    lines: list[str] = []
    for name, kind, meaning, value_of in _METRICS:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        for run, facts in status["runs"].items():
            value = value_of(facts)
            if value is not None:
                lines.append(f"{name}{{{_labels(run)}}} {value}")
    return "\n".join(lines) + "\n"


def _labels(run: str) -> str:
    """A series goes on under the run's plain name; its identity tells two runs of a name apart."""
    name, _, identity = run.partition("~")
    return f'run="{name}"' + (f',identity="{identity}"' if identity else "")
