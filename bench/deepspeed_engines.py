"""DeepSpeed's checkpoint engines, as its ``engine.save_checkpoint`` calls them, in tmpfs.

- *torch* is the default.
- *fast* uses the ``python`` writer. Its own writer pins its buffers when it is made, and on a host
  without an accelerator that raises "Cannot access accelerator device when none is available".
- *decoupled* writes in a separate process, with the same writer. It takes no copy: after the first
  save the state's own tensors are in shared memory, and DeepSpeed commits before the next optimizer
  step. So the state may change only after that commit, and the bench times the save until then. It
  is not run with thousands of tensors, because each is a separate file then.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from bench.files import copy_into
from bench.measuring import Timed, timed
from bench.record import versions
from bench.save import flat, state_of

INSTALLED = "deepspeed" in versions()
TAG = "a"


def _settings(*, decoupled: bool) -> SimpleNamespace:
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config

    writer = {"type": "python", "decoupled": decoupled}
    config = get_checkpoint_config({"checkpoint": {"writer": writer}})
    return SimpleNamespace(checkpoint_config=config, aio_config={})


def _engines(*, decoupled: bool) -> dict[str, Any]:
    """Return the engines by name, for one rank on one node."""
    from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
        DecoupledCheckpointEngine,
    )
    from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import (
        DataParallelWriterConfig,
    )

    alone = DataParallelWriterConfig(1, 0, 0, 0, True)
    made = {
        "torch": TorchCheckpointEngine(),
        "fast": FastCheckpointEngine(_settings(decoupled=False), alone, False),
    }
    if decoupled:
        made["decoupled"] = DecoupledCheckpointEngine(_settings(decoupled=True), alone, False)
    return made


def _join() -> None:
    """Start a world of one rank without the C++ collectives, whose compilation takes minutes."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import deepspeed.comm

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False)


@contextlib.contextmanager
def engines(folder: Path, mib: int, tensors: int | None) -> Iterator[dict[str, Timed]]:
    """Cases for ``bench.elsewhere``: each engine saves until the state may change, and loads."""
    _join()
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

    state, made = flat(state_of(mib, tensors)), _engines(decoupled=not tensors)
    (folder / TAG).mkdir()

    def save(name: str) -> None:
        info = CheckpointCommitInfo(tag=TAG, save_dir=str(folder), save_latest=False)
        made[name].create(info)
        made[name].save(state, str(folder / TAG / f"{name}.pt"))
        made[name].commit(info)

    def load(name: str) -> None:
        copy_into(state, made[name].load(str(folder / TAG / f"{name}.pt"), map_location="cpu"))

    saves = {f"DeepSpeed {name} engine, save": timed(lambda n=name: save(n)) for name in made}
    loads = {
        f"DeepSpeed {name} engine, load, into the state": timed(lambda n=name: load(n))
        for name in ("torch", "fast")
    }
    yield saves | loads
    for engine in made.values():
        engine.cleanup()
    dist.destroy_process_group()
