"""The demo's training data: the source of Python's standard library, which each machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 256  # a token is a byte
CORPUS_BYTES = 2 << 20
SEED_STRIDE = 1_000_003  # more than any number of ranks: seeds of two runs never coincide


def corpus(folder: Path | None = None, *, limit_bytes: int = CORPUS_BYTES) -> torch.Tensor:
    """Return the bytes of the ``*.py`` files directly in ``folder`` as a uint8 tensor.

    The default folder is the standard library. Files are joined in the order of their names, up to
    ``limit_bytes``; unreadable files are skipped. The result is the same for each call with the
    same Python. Raises ``FileNotFoundError`` if there is no readable file.
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
        raise FileNotFoundError(f"no readable *.py file in {folder} to train on")
    del text[limit_bytes:]
    return torch.frombuffer(text, dtype=torch.uint8)


class Batches:
    """Endless random windows of a token stream, different on each rank.

    Its own random generator draws the windows, and the generator's state is the position. After
    ``load_state_dict`` the next batch is the one that would have followed.
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
        """Number of batches drawn so far, those before a resume included."""
        return self._drawn

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets (the inputs one token later): int64, each [batch, context]."""
        limit = len(self._tokens) - len(self._offsets) + 1
        starts = torch.randint(limit, (self._batch, 1), generator=self._generator)
        windows = self._tokens[starts + self._offsets].long()
        self._drawn += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the generator's state and the number of batches drawn."""
        return {"generator": self._generator.get_state(), "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch that was drawn before ``state`` was taken."""
        self._generator.set_state(state["generator"])
        self._drawn = state["drawn"]
