"""nvidia-resiliency-ext's local checkpoints: whole copies among a clique of ranks, over gloo.

``bench.elsewhere`` runs each rank in its own process. All ranks of a clique run a case at the same
time. Some parts need a GPU (0.4.1), and so are not run:

- ``BasicTensorAwareStateDict`` refuses tensors in the host's memory; this file derives a class
  without that check.
- ``save(is_async=True)`` ends in ``torch.cuda.synchronize()``: "Torch not compiled with CUDA
  enabled". So *save* is the synchronous save, and *exchange* is the part of it that is on the
  caller's path in both.
- A rank whose files are lost receives them into ``torch.empty_like(..., device="cuda")``, with the
  same message. So a load reads the rank's own files.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.elsewhere import Elsewhere
from bench.files import copy_into
from bench.measuring import Timed, timed
from bench.record import versions
from bench.save import flat, state_of

INSTALLED = "nvidia-resiliency-ext" in versions()
MISSING = "without nvidia-resiliency-ext, which is not installed: pip install 'ecckpt[bench]'"

if INSTALLED:
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
        BasicTensorAwareStateDict,
    )

    class OnCpu(BasicTensorAwareStateDict):
        """The same for tensors in the host's memory; at module level, because it is pickled."""

        def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
            self.state_dict = tensors
            self._is_hollow = False

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            """Do nothing: the tensors are in the host's memory already."""


def _manager(folder: Path) -> tuple[Any, Any]:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
        LocalCheckpointManager,
    )
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        CliqueReplicationStrategy,
    )

    strategy = CliqueReplicationStrategy.from_replication_params(1, dist.get_world_size())
    return LocalCheckpointManager(folder, "bench", strategy), strategy


@contextlib.contextmanager
def member(folder: Path, mib: int, rank: int, ranks: int, meeting: str) -> Iterator[dict[str, Any]]:
    """One rank with that much state of its own; all other ranks keep copies of it."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(meeting, ranks), rank=rank, world_size=ranks
    )
    state = flat(state_of(mib, None))
    manager, strategy = _manager(folder)
    steps = iter(range(1 << 20))

    def load() -> None:
        manager.find_latest()
        copy_into(state, manager.load()[0].state_dict)

    yield {
        "save": timed(lambda: manager.save(OnCpu(dict(state)), next(steps))),
        "exchange": timed(lambda: strategy.replicate(OnCpu(dict(state)), (0, rank, "bench"))),
        "load": timed(load),
    }
    dist.destroy_process_group()


@contextlib.contextmanager
def clique(ranks: int, mib: int) -> Iterator[list[Elsewhere]]:
    """All ranks of one clique, which share a state of ``mib``."""
    with contextlib.ExitStack() as stack:
        meeting = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))) / "store"
        members = [
            stack.enter_context(Elsewhere(member, mib // ranks, rank, ranks, str(meeting)))
            for rank in range(ranks)
        ]
        for each in members:
            each.names()
        yield members


def together(members: Sequence[Elsewhere], name: str) -> Timed:
    """Return a case that all ranks run; it ends when the last rank has."""

    def run() -> float:
        for each in members:
            each.start(name)
        return max(each.seconds() for each in members)

    return run
