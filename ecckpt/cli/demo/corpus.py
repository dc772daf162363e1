"""Text to train on that every machine already has: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 256  # a token is a byte
CORPUS_BYTES = 2 << 20
SEED_STRIDE = 1_000_003  # keeps the seeds of all ranks of neighbouring runs apart


def corpus(folder: Path | None = None, *, limit_bytes: int = CORPUS_BYTES) -> torch.Tensor:
    """Tokens of the ``*.py`` files directly in `folder` (default: the standard library).

    Files are joined in the order of their names, up to `limit_bytes`; unreadable ones are left
    out. The result is a uint8 tensor, the same at every call on the same Python.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        try:
            text += path.read_bytes()
        except OSError:
            continue
        if len(text) >= limit_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no readable *.py file in {folder}: the demo has nothing to learn")
    del text[limit_bytes:]
    return torch.frombuffer(text, dtype=torch.uint8)


class Batches:
    """Endless random windows of a token stream, different on every rank.

    The position in the stream of batches is the state of a generator of its own, so that loading
    a state dict continues with exactly the batch that would have come next.
    """

    def __init__(
        self, tokens: torch.Tensor, *, batch: int, context: int, seed: int, rank: int
    ) -> None:
        if len(tokens) <= context:
            raise ValueError(f"{len(tokens)} tokens are too few for a context of {context}")
        self._tokens = tokens
        self._batch = batch
        self._offsets = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed * SEED_STRIDE + rank)
        self._drawn = 0

    @property
    def drawn(self) -> int:
        """Batches drawn so far, those before a resume included."""
        return self._drawn

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (the inputs one token later): int64, each [batch, context]."""
        limit = len(self._tokens) - len(self._offsets) + 1
        starts = torch.randint(limit, (self._batch, 1), generator=self._generator)
        windows = self._tokens[starts + self._offsets].long()
        self._drawn += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """The position: the generator's state and the number of batches drawn."""
        return {"generator": self._generator.get_state(), "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that was drawn last when `state` was taken."""
        self._generator.set_state(state["generator"])
        self._drawn = state["drawn"]
