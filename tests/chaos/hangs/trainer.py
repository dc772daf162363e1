"""A training process to be stopped: saves at its input's word, and says on its output how it went.

    python trainer.py ROOT AGENT...

``save STEP`` saves a state that is made of the step; ``staged STEP``, then ``committed STEP`` or
``failed STEP WHY`` come back. It begins with ``restored STEP TIMELINE DIGEST``.
"""

from __future__ import annotations

import hashlib
import sys

import torch

import ecckpt

ELEMENTS = 500_000


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step))}


def digest(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(state["weights"].numpy().tobytes()).hexdigest()[:16]


def _say(*words: object) -> None:
    print(*words, flush=True)


def main() -> None:
    root, *agents = sys.argv[1:]
    options = {"save_timeout_s": 20.0, "restore_timeout_s": 20.0}
    with ecckpt.Checkpointer("test", root=root, agents=agents, code=(2, 1), **options) as ckpt:
        state = state_of(0)
        restored = ckpt.restore(state)
        _say("restored", restored.step if restored else 0, ckpt.timeline, digest(state))
        for line in sys.stdin:
            step = int(line.split()[1])
            try:
                handle = ckpt.save(step, state_of(step), patience_s=20)
            except ecckpt.errors.Fenced as error:  # an earlier save was told of the newer start
                _say("failed", step, type(error).__name__, error)
                continue
            _say("staged", step)
            handle.wait_done(30.0)
            if handle.committed:
                _say("committed", step)
            else:
                _say("failed", step, type(handle.error).__name__, handle.error)


if __name__ == "__main__":
    main()
