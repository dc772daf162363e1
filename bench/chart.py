"""The charts of docs/PERFORMANCE.md from one recorded run: horizontal bars, one figure a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"

OURS, LIMIT, OTHERS = "#1f5f99", "#b3b3b3", "#e0a458"
WIDTH, LABEL, BAR, STEP, TOP = 860, 400, 16, 26, 52

Bar = tuple[str, float, str]


def chart(title: str, note: str, bars: Sequence[Bar], unit: str) -> str:
    """Return an SVG of labelled bars; the longest bar takes the full width."""
    longest = max(value for _, value, _ in bars)
    room = WIDTH - LABEL - 90
    height = TOP + STEP * len(bars) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="26" font-size="16">{escape(title)}</text>',
    ]
    for at, (name, value, color) in enumerate(bars):
        y, wide = TOP + STEP * at, max(1.0, room * value / longest)
        parts.append(
            f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{LABEL}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{color}"/>'
            f'<text x="{LABEL + wide + 6:.1f}" y="{y + 12}">{value:.2f}{unit}</text>'
        )
    parts.append(
        f'<text x="12" y="{height - 10}" font-size="11" fill="#444">{escape(note)}</text></svg>\n'
    )
    return "\n".join(parts)


def colored(ratios: Mapping[str, float]) -> list[Bar]:
    """Return bars, shortest first: of ecckpt, of the unit, and of the peers."""
    found = []
    for name, value in sorted(ratios.items(), key=lambda item: item[1]):
        limit = name.startswith(("memcpy", "our transport"))
        color = LIMIT if limit else OURS if name.startswith("ecckpt") else OTHERS
        found.append((name, value, color))
    return found


def copies_chart(copies: Mapping[str, float], note: str) -> str:
    """Draw the time to have a state on other nodes too."""
    saves = {
        name: value / copies["memcpy"]
        for name, value in copies.items()
        if name != "mib" and "load" not in name
    }
    title = f"{copies['mib']} MiB made safe on other nodes: time in units of one memcpy"
    return chart(title, note, colored(saves), "")


def costs_chart(costs: Sequence[Mapping[str, Any]], note: str) -> str:
    """Draw the CPU time of saves of one size."""
    cpu = {
        each["what"]: each["caller_cpu_s_per_gb"] + each["other_cpu_s_per_gb"]
        for each in costs
        if each["mib"] == 256 and "save" in each["what"]
    }
    title = "Saving 256 MiB: CPU seconds per GB, of all processes"
    return chart(title, note, colored(cpu), " s")


def recovery_chart(recovery: Mapping[str, float], note: str) -> str:
    """Draw protecting and restoring beside plain pulls."""
    names = ("protect", "pull fragments", "pull copies", "restore, process died")
    names += ("restore, 3 nodes lost", "pull shard", "pull shard, fresh memory", "memcpy")
    bars = [
        (name, 1e3 * recovery[name], LIMIT if name.startswith(("pull", "memcpy")) else OURS)
        for name in names
        if name in recovery
    ]
    return chart("256 MiB on 11 agents, RS(8, 2): milliseconds", note, bars, " ms")


def draw(row: Mapping[str, Any]) -> None:
    """Write those charts for a recorded run whose figures it has."""
    note = f"{row['date']}, {row['machine']}, torch {row['versions']['torch']}"
    charts = {}
    if state := row.get("state"):
        title = "256 MiB of CPU tensors, all in tmpfs: time in units of one memcpy"
        charts["state"] = chart(title, note, colored(state["x_memcpy"]), "")
    if recovery := row.get("recovery"):
        charts["recovery"] = recovery_chart(recovery, note)
    if copies := row.get("copies"):
        charts["copies"] = copies_chart(copies, note)
    if costs := row.get("costs"):
        charts["costs"] = costs_chart(costs["costs"], note)
    for name, text in charts.items():
        (DOCS / f"performance-{name}.svg").write_text(text)
