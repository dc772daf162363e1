"""The records of a run of the bench: goals met or missed, a dated row, a chart."""

from __future__ import annotations

import contextlib
import datetime
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "bench" / "README.md"
CHART = ROOT / "docs" / "codec.svg"

Ratios = dict[str, float]
Results = dict[tuple[int, int], Ratios]

# (code, case, in units of this case, at least)
GOALS = (
    ((8, 2), "encode + CRC", "memcpy", 1.45),
    ((8, 2), "encode + CRC", "ISA-L of pyeclib (GFNI), encode", 1.15),
    ((8, 2), "encode + CRC", "ISA-L 2.0.30, encode", 1.3),
    ((8, 2), "encode + CRC", "zfec, encode", 25),
    ((8, 2), "copy + encode + CRC", "memcpy", 0.95),
    ((8, 4), "encode + CRC", "memcpy", 1.25),
    ((10, 4), "encode + CRC", "memcpy", 1.25),
    ((16, 4), "encode + CRC", "memcpy", 1.10),
    ((32, 8), "encode + CRC", "memcpy", 1.05),
    ((8, 2), "rebuild 1 + CRC", "memcpy", 1.35),
    ((8, 2), "rebuild 2 + CRC", "memcpy", 1.35),
    ((8, 2), "avx2 engine, encode + CRC", "memcpy", 0.80),
    ((8, 2), "2 threads: encode + CRC", "memcpy", 1.85),
)


def reach(found: Results) -> str:
    """Return the goals with the measured figures, a line each."""
    lines = [f"{'goal':70} {'at least':>8} {'found':>7} {'limit':>7}"]
    for code, case, base, least in GOALS:
        ratios = found.get(code, {})
        if case not in ratios or base not in ratios:
            continue
        value = ratios[case] / ratios[base]
        name = f"({code[0]},{code[1]}) {case}, x {base}"
        if case.startswith("2 threads"):
            name = f"({code[0]},{code[1]}) {case}, x 1 thread"
        copied = "copy + " if case.startswith("copy") else ""
        work = f"rebuild {case.split()[1]}" if case.startswith("rebuild") else f"{copied}encode"
        limit = ratios.get(f"limit: {work} without arithmetic")
        bound = f"{limit:7.2f}" if limit and base == "memcpy" and case[0] != "2" else " " * 7
        verdict = "" if value >= least else "  missed"
        lines.append(f"{name:70} {least:8.2f} {value:7.2f} {bound}{verdict}")
    return "\n".join(lines)


def machine() -> str:
    """Return the name of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    count = sum(line.startswith("processor") for line in lines)
    virtual = " in a VM" if "hypervisor" in facts.get("flags", "") else ""
    name = facts.get("model name", "unknown CPU")
    family, model = facts.get("cpu family", "?"), facts.get("model", "?")
    return f"{name}, family {family} model {model}, {count} CPUs{virtual}"


# The names of the distributions that the bench runs.
_MEASURED = ("torch", "safetensors", "deepspeed", "nvidia-resiliency-ext", "zfec", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of all measured distributions that are installed, and Python's."""
    found = {"python": platform.python_version()}
    for name in _MEASURED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


_RUNS_END = "<!-- the next run comes here -->"


def add_run(row: Mapping[str, Any]) -> None:
    """Add a row with the main figures of a run of all benches to the README's table."""
    recovery, ways = row["recovery"], row["training"]["ways"]
    zfec = row.get("recovery, zfec", {})
    figures = (
        row["save"]["stall_over_memcpy"],
        recovery["protect / pull fragments"],
        zfec and zfec["protect"] / recovery["protect"],
        recovery["restore, process died / memcpy"],
        recovery["restore, 3 nodes lost / pull shard"],
        recovery["restore, 3 nodes lost / pull shard, fresh memory"],
        ways["agents on another CPU"]["wall"],
        row["planning"]["all_s"],
    )
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    cells = [row["date"], row["machine"], versions, *(f"{f:.2f}" if f else "" for f in figures)]
    line = f"| {' | '.join(cells)} |\n"
    README.write_text(README.read_text().replace(_RUNS_END, line + _RUNS_END))


COLUMNS = ("encode", "encode + CRC", "copy + encode + CRC", "limit: encode without arithmetic")


def add_row(found: Results) -> None:
    """Append a dated row per code to the table at the end of the README."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows = []
    for (k, m), ratios in found.items():
        isa_l = max((v for name, v in ratios.items() if name.startswith("ISA-L")), default=0)
        values = [
            *(ratios.get(name) for name in COLUMNS),
            *(ratios.get(f"rebuild {lost} + CRC") for lost in (1, m)),
            *(ratios.get(f"restore, {lost} lost") for lost in (1, m)),
            *(ratios.get("2 threads: encode + CRC"), ratios.get("avx2 engine, encode + CRC")),
            *(isa_l or None, ratios.get("zfec, encode")),
            ratios.get("pyeclib, encode in 1 MiB segments"),
        ]
        cells = ["" if value is None else f"{value:.2f}" for value in values]
        rows.append(f"| {' | '.join([today, machine(), f'{k}+{m}', *cells])} |\n")
    README.write_text(README.read_text() + "".join(rows))


# -- the chart ------------------------------------------------------------------------------------

BARS = {
    "zfec, encode": "#b3b3b3",
    "pyeclib, encode in 1 MiB segments": "#8c8c8c",
    "ISA-L of pyeclib (GFNI), encode": "#e0a458",
    "copy + encode + CRC": "#5b9bd5",
    "encode + CRC": "#1f5f99",
}
LABELS = {
    "zfec, encode": "zfec, no checksums",
    "pyeclib, encode in 1 MiB segments": "pyeclib on ISA-L, no checksums",
    "ISA-L of pyeclib (GFNI), encode": "ISA-L with GFNI, no checksums",
    "copy + encode + CRC": "ecckpt, copy + parity + CRC32C of all",
    "encode + CRC": "ecckpt, parity + CRC32C of all",
}
BAR, GAP, UNIT, LEFT, TOP = 16, 30, 150, 60, 150


def draw(found: Results) -> None:
    """Draw the chart: bars per code, in units of one memcpy of the data."""
    base = TOP + 1.6 * UNIT
    group = BAR * len(BARS) + GAP
    width, height = LEFT + group * len(found) + 20, base + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16">Speed of encoding, one thread, '
        "in units of one memcpy of the data</text>",
    ]
    for at, (name, color) in enumerate(BARS.items()):
        y = 40 + 19 * at
        parts.append(f'<rect x="{LEFT}" y="{y}" width="13" height="13" fill="{color}"/>')
        parts.append(f'<text x="{LEFT + 20}" y="{y + 11}">{LABELS[name]}</text>')
    for level in (0, 0.5, 1, 1.5):
        y, weight = base - level * UNIT, 2 if level == 1 else 0.5
        parts.append(
            f'<line x1="{LEFT}" x2="{width - 10}" y1="{y}" y2="{y}" stroke="#444" '
            f'stroke-width="{weight}"/><text x="{LEFT - 34}" y="{y + 4}">{level}</text>'
        )
    for at, ((k, m), ratios) in enumerate(found.items()):
        x = LEFT + GAP / 2 + at * group
        for number, (name, color) in enumerate(BARS.items()):
            tall = UNIT * ratios.get(name, 0)
            parts.append(
                f'<rect x="{x + number * BAR:.1f}" y="{base - tall:.1f}" width="{BAR - 2}" '
                f'height="{tall:.1f}" fill="{color}"/>'
            )
        middle = x + BAR * len(BARS) / 2
        parts.append(f'<text x="{middle}" y="{base + 20}" text-anchor="middle">{k}+{m}</text>')
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts.append(
        f'<text x="{LEFT}" y="{base + 46}" font-size="11" fill="#444">{today}, {machine()}, '
        "256 MiB of data</text></svg>\n"
    )
    CHART.write_text("\n".join(parts))
