"""How the simulator says that a promise was broken."""

from __future__ import annotations


class Violation(Exception):
    """A promise was broken: ``kind`` names it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
