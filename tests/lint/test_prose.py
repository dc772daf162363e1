"""Words that hide who does what."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = re.compile(r"\b(?:nobody|whoever|somebody)\b", re.IGNORECASE)
SUFFIXES = (".py", ".pyi", ".cpp", ".h", ".txt")


def test_prose_names_who_does_what() -> None:
    sources = [
        path
        for folder in ("ecckpt", "native")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES
    ]
    found = []
    for path in sorted([*sources, *(ROOT / "docs").glob("*.md")]):
        name = path.relative_to(ROOT)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [f"{name}:{number} {word}" for word in WORDS.findall(line)]
    assert not found
