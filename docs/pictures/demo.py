"""Draws the recorded demo, ``demo.svg``, from ``demo.cast``: python docs/pictures/demo.py [FOLDER].

What is shown is what was printed. Waits are shortened, by `PACE` and to `LONGEST_WAIT_S` at most;
the seconds at the left of the lines are the demo's own. Everything moves by CSS: without it, or
where a reader has asked for less motion, the last screen stands still, as it does at the end.
"""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from drawing import MONO, SANS, number, write

CAST = Path(__file__).with_name("demo.cast")
PACE, LONGEST_WAIT_S = 0.5, 1.5
HANGING = 11  # columns: where the rest of a long line goes on, below what is told
SIZE, ADVANCE, LEADING = 15, 9.04, 21  # of the letters; ADVANCE for the widest of the fonts
SIDE, BAR = 16, 40
TYPING_S, BEFORE_S = 0.06, 0.6
END_S = 0.5

# What tells of the loss, of safety and of the way back; the rest is plain.
KINDS = (
    ("bad", re.compile(r"\blost n\d|cannot be rebuilt|not saved|NOT shown|nothing is left")),
    ("good", re.compile(r"committed:|bit-identical|can be rebuilt")),
    ("back", re.compile(r"restored from|made again|take their places")),
    ("soft", re.compile(r"^ *[\d.]+ s +step")),
)
STYLE = f"""
text {{ font: {SIZE}px {MONO}; fill: #d7dde5; white-space: pre; }}
.bar {{ font: 14px {SANS}; fill: #aab4c0; }}
.soft {{ fill: #98a3b0; }} .bad {{ fill: #ff8f87; }} .good {{ fill: #7ee08f; }}
.back {{ fill: #8fc3ff; }} .key {{ fill: #ffffff; font-weight: 600; }}
@keyframes show {{ from {{ visibility: hidden; }} }}
#roll text, #roll tspan {{ animation: show 1ms step-end backwards; }}
"""
CALM = "@media (prefers-reduced-motion: reduce) { #roll, #roll * { animation: none !important; } }"


@dataclass(frozen=True)
class Row:
    """A line of the screen and when it appears."""

    text: str
    at_s: float
    kind: str
    indent: int = 0


def read_cast(path: Path) -> tuple[dict[str, Any], list[tuple[float, str]]]:
    """The header of an asciicast, and its lines of output with their seconds."""
    header, *events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    lines = [(at_s, data.removesuffix("\r\n")) for at_s, kind, data in events if kind == "o"]
    return header, lines


def kind_of(line: str) -> str:
    """Which colour a line has."""
    return next((name for name, pattern in KINDS if pattern.search(line)), "")


def wrap(line: str, columns: int) -> list[str]:
    """Pieces of a line that fit: cut between words, the second and later ones to be indented."""
    pieces = []
    while len(line) > columns - (HANGING if pieces else 0):
        cut = line.rfind(" ", 0, columns - (HANGING if pieces else 0)) + 1
        pieces.append(line[:cut])
        line = line[cut:]
    return [*pieces, line]


def rows_of(lines: list[tuple[float, str]], columns: int, start_s: float) -> list[Row]:
    """The rows of the screen, with long waits shortened."""
    rows, shown_s, before_s = [], start_s, 0.0
    for at_s, line in lines:
        shown_s += min(PACE * (at_s - before_s), LONGEST_WAIT_S)
        before_s = at_s
        head, *rest = wrap(line, columns)
        kind = kind_of(line)
        rows.append(Row(head, shown_s, kind))
        rows += [Row(each, shown_s, kind, HANGING) for each in rest]
    while rows and not rows[-1].text:
        rows.pop()
    return rows


def prompt(command: str) -> tuple[str, float]:
    """The first row, typed letter by letter, and when the command starts."""
    letters = "".join(
        f'<tspan style="animation-delay:{number(BEFORE_S + at * TYPING_S)}s">{letter}</tspan>'
        for at, letter in enumerate(escape(command))
    )
    row = f'<text x="{SIDE}" y="0" class="key">$ {letters}</text>'
    return row, BEFORE_S + len(command) * TYPING_S + 0.3


def element(at: int, row: Row) -> str:
    """One row as text. Nothing is drawn for an empty one."""
    if not row.text.strip():
        return ""
    name = f' class="{row.kind}"' if row.kind else ""
    delay = f'style="animation-delay:{number(row.at_s)}s"'
    x = number(SIDE + row.indent * ADVANCE)
    return f'<text x="{x}" y="{at * LEADING}"{name} {delay}>{escape(row.text)}</text>'


def rolling(rows: list[Row], height: int) -> str:
    """CSS that moves the rows up whenever the screen is full; at the end they stay."""
    end_s = rows[-1].at_s + END_S
    tops: dict[float, int] = {}
    for at, row in enumerate(rows, start=1):  # the prompt is row 0
        over = at + 1 - height
        if over > 0:
            tops[row.at_s] = over
    frames = "".join(
        f"{number(100 * at_s / end_s)}%{{transform:translateY({-over * LEADING}px)}}"
        for at_s, over in tops.items()
    )
    last = max(tops.values(), default=0) * LEADING
    return (
        f"@keyframes roll{{0%{{transform:none}}{frames}}}\n"
        f"#roll{{transform:translateY({-last}px);animation:roll {number(end_s)}s step-end}}"
    )


def frame(width: float, height: float, header: dict[str, Any]) -> str:
    """The window: its edge, three dots and what is shown."""
    day = datetime.datetime.fromtimestamp(header["timestamp"], datetime.UTC).date()
    title = f"recorded {day}; waits shortened, the seconds are the demo's"
    dots = "".join(
        f'<circle cx="{22 + 20 * at}" cy="20" r="6" fill="{fill}"/>'
        for at, fill in enumerate(("#ff6058", "#ffbd2e", "#28c941"))
    )
    return (
        f'<rect x="0.5" y="0.5" width="{number(width - 1)}" height="{number(height - 1)}" rx="10" '
        f'fill="#12171e" stroke="#3d4652"/>{dots}'
        f'<text x="{number(width - SIDE)}" y="25" text-anchor="end" class="bar">{title}</text>'
    )


def draw(header: dict[str, Any], lines: list[tuple[float, str]]) -> str:
    """The recording as one animated picture."""
    first, start_s = prompt(header["command"])
    rows = rows_of(lines, header["width"], start_s)
    width = 2 * SIDE + header["width"] * ADVANCE
    height = BAR + header["height"] * LEADING + 14
    told = " ".join(line.strip() for _, line in lines[-9:] if line.strip())
    shown = "\n".join(filter(None, (element(at, row) for at, row in enumerate(rows, start=1))))
    box = f'width="{number(width)}" height="{number(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} '
        f'viewBox="0 0 {number(width)} {number(height)}" role="img" '
        'aria-labelledby="title about" xml:space="preserve">\n'
        f'<title id="title">A recording of {escape(header["command"])}</title>\n'
        f'<desc id="about">It ends with: {escape(told)}</desc>\n'
        f"<style>{STYLE}{rolling(rows, header['height'])}\n{CALM}</style>\n"
        f"{frame(width, height, header)}\n"
        f'<svg x="0" y="{BAR}" width="{number(width)}" height="{header["height"] * LEADING + 6}">'
        f'<g transform="translate(0 {LEADING - 5})"><g id="roll">\n{first}\n{shown}\n'
        "</g></g></svg>\n</svg>\n"
    )


if __name__ == "__main__":
    write({"demo.svg": draw(*read_cast(CAST))})
