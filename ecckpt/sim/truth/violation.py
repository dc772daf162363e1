"""The exception with which the simulator reports a broken promise."""

from __future__ import annotations


class Violation(Exception):
    """A promise was broken; ``kind`` names it, as the table of broken rules in the tests does."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
