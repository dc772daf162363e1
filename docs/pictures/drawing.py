"""What the pictures share: two palettes, a canvas of SVG text, and writing the files.

The files stand alone (no script, font or image from elsewhere) and depend on nothing but the
script, so that a test can compare them with what it makes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Palette:
    """Colours of one variant."""

    suffix: str
    page: str
    edge: str
    text: str
    soft: str
    box: str
    box_edge: str
    wait: str
    wait_edge: str
    wait_text: str
    go: str
    go_edge: str
    go_text: str
    bad: str
    line: str


LIGHT = Palette(
    suffix="",
    page="#ffffff",
    edge="#d0d7de",
    text="#1f2328",
    soft="#4d5560",
    box="#f3f6fa",
    box_edge="#9aa5b1",
    wait="#fff0d0",
    wait_edge="#9c5d00",
    wait_text="#7a4900",
    go="#e2f5e6",
    go_edge="#25783f",
    go_text="#1a5c31",
    bad="#c62828",
    line="#38598b",
)
DARK = Palette(
    suffix="-dark",
    page="#0d1117",
    edge="#30363d",
    text="#e6edf3",
    soft="#a9b4c0",
    box="#1b222c",
    box_edge="#56616e",
    wait="#3b2a0a",
    wait_edge="#e0a030",
    wait_text="#f5cf86",
    go="#12301d",
    go_edge="#3fb264",
    go_text="#93dfab",
    bad="#ff7b72",
    line="#8fb4ee",
)


def number(value: float) -> str:
    """A coordinate, as short as it can be said."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Canvas:
    """Elements of one picture, in the order in which they are painted."""

    def __init__(
        self, width: int, height: int, palette: Palette, *, title: str, about: str
    ) -> None:
        self.palette = palette
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title about" '
            f'font-family="{SANS}">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="about">{escape(about)}</desc>',
        ]
        self._head(palette)
        self.rect(
            0.5, 0.5, width - 1, height - 1, fill=palette.page, stroke=palette.edge, radius=12
        )

    def _head(self, palette: Palette) -> None:
        self._parts.append(
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="10" '
            'markerHeight="10" markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            f'<path d="M0 0 10 5 0 10z" fill="{palette.line}"/></marker></defs>'
        )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        radius: float = 6,
        dash: str = "",
        weight: float = 1,
    ) -> None:
        """A rectangle with round corners."""
        place = " ".join(
            f'{name}="{number(value)}"'
            for name, value in zip(
                ("x", "y", "width", "height", "rx"), (x, y, width, height, radius), strict=True
            )
        )
        look = f' stroke="{stroke}"' if stroke != "none" else ""
        look += f' stroke-width="{number(weight)}"' if weight != 1 else ""
        look += f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<rect {place} fill="{fill}"{look}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 15,
        fill: str = "",
        bold: bool = False,
        anchor: str = "start",
        turned: bool = False,
    ) -> None:
        """One line; `y` is its base line. `turned`: it runs upwards."""
        look = f' fill="{fill or self.palette.text}"'
        look += ' font-weight="600"' if bold else ""
        look += f' text-anchor="{anchor}"' if anchor != "start" else ""
        look += f' transform="rotate(-90 {number(x)} {number(y)})"' if turned else ""
        self._parts.append(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}"{look}>'
            f"{escape(words)}</text>"
        )

    def arrow(
        self,
        *points: tuple[float, float],
        weight: float = 2,
        dash: str = "",
        both: bool = False,
    ) -> None:
        """A line through the points, with a tip at its end."""
        path = " ".join(f"{number(x)} {number(y)}" for x, y in points)
        look = f' stroke-dasharray="{dash}"' if dash else ""
        look += ' marker-start="url(#tip)"' if both else ""
        self._parts.append(
            f'<path d="M{path}" fill="none" stroke="{self.palette.line}" '
            f'stroke-width="{number(weight)}"{look} marker-end="url(#tip)"/>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str, weight: float = 1,
        dash: str = "",
    ) -> None:  # fmt: skip
        """A straight line without a tip."""
        look = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<path d="M{number(x1)} {number(y1)} {number(x2)} {number(y2)}" '
            f'stroke="{stroke}" stroke-width="{number(weight)}"{look}/>'
        )

    def shape(self, *points: tuple[float, float], fill: str) -> None:
        """A filled polygon."""
        path = " ".join(f"{number(x)} {number(y)}" for x, y in points)
        self._parts.append(f'<path d="M{path}z" fill="{fill}"/>')

    def badge(self, x: float, y: float, label: str) -> None:
        """A step's number in a disc."""
        self._parts.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="12.5" fill="{self.palette.line}"/>'
        )
        self.text(x, y + 5, label, size=14.5, fill=self.palette.page, bold=True, anchor="middle")

    def step(
        self,
        x: float,
        y: float,
        width: float,
        label: str,
        head: str,
        *lines: str,
        kind: str = "plain",
    ) -> float:
        """A box with a numbered step; returns the height that it takes."""
        palette = self.palette
        fill, edge, ink = {
            "plain": (palette.box, palette.box_edge, palette.text),
            "wait": (palette.wait, palette.wait_edge, palette.wait_text),
            "go": (palette.go, palette.go_edge, palette.go_text),
        }[kind]
        height = step_height(len(lines))
        self.rect(x, y, width, height, fill=fill, stroke=edge, weight=1.5)
        self.text(x + 16, y + 22, head, size=16.5, fill=ink, bold=True)
        for at, words in enumerate(lines):
            self.text(x + 16, y + 42 + 18 * at, words, size=15)
        if label:
            self.badge(x + 1, y + 3, label)
        return height

    def svg(self) -> str:
        """The picture."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def step_height(lines: int) -> float:
    """How high the box of a step with so many lines below its head is."""
    return 32 + 18 * lines


def write(pictures: Mapping[str, str]) -> None:
    """Write the files beside the scripts, or into the folder that the command line names."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, svg in pictures.items():
        (folder / name).write_text(svg, encoding="utf-8")
