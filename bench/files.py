"""Peers that write files: torch, safetensors and DCP, each at its best settings, all in tmpfs.

``bench.elsewhere`` calls each function with a folder and a size. The function makes cases that save
a state and load it into the tensors that were there before.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.measuring import Timed, timed
from bench.save import flat, state_of

DISK = "/var/tmp"  # on a disk on most hosts, also where /tmp is not


def copy_into(state: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> None:
    """Copy the values into the tensors that were there before, the last part of every load."""
    for name, tensor in loaded.items():
        state[name].copy_(tensor)


@contextlib.contextmanager
def one_file(folder: Path, mib: int, tensors: int | None) -> Iterator[dict[str, Timed]]:
    """``torch.save`` and safetensors."""
    state = flat(state_of(mib, tensors))
    old, new = folder / "one.pt", folder / "one.safetensors"
    with tempfile.TemporaryDirectory(dir=DISK, prefix="bench-") as disk:

        def flushed() -> None:
            with (Path(disk) / "one.pt").open("wb") as file:
                torch.save(state, file)
                os.fsync(file.fileno())

        yield {
            "torch.save": timed(lambda: torch.save(state, old)),
            "torch.save to a disk, flushed": timed(flushed),
            "torch.load, into the state": timed(
                lambda: copy_into(state, torch.load(old, weights_only=True, mmap=True))
            ),
            "safetensors save_file": timed(lambda: save_file(state, new)),
            "safetensors load_file, into the state": timed(
                lambda: copy_into(state, load_file(new))
            ),
        }


@contextlib.contextmanager
def dcp_files(folder: Path, mib: int, tensors: int | None) -> Iterator[dict[str, Timed]]:
    """DCP in its own folder, by one process; ``dcp.async_save`` with a thread or a process too.

    Plans are cached. The stagers are kept, so that their buffers are used again. They copy on the
    caller's thread: in the background they would end later, and the state may change only then.
    Without a GPU there is no pinned memory. Tensors staged for a process have to be in shared
    memory, a file for each tensor: 20,000 tensors end in "Too many open files".
    """
    state = state_of(mib, tensors)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)
    stagers = {
        AsyncCheckpointerType.THREAD: DefaultStager(StagingOptions(False, False, False, False)),
        AsyncCheckpointerType.PROCESS: DefaultStager(StagingOptions(False, True, False, False)),
    }

    def writer() -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(folder / "dcp", overwrite=True)

    def planner() -> dcp.DefaultSavePlanner:
        return dcp.DefaultSavePlanner(enable_plan_caching=True)

    def save_later(kind: AsyncCheckpointerType) -> Timed:
        return timed(
            lambda: dcp.async_save(
                state,
                storage_writer=writer(),
                planner=planner(),
                async_checkpointer_type=kind,
                async_stager=stagers[kind],
                no_dist=kind is AsyncCheckpointerType.THREAD,
            ),
            _written,
        )

    by_a_process = {"dcp.async_save by a process, stall": save_later(AsyncCheckpointerType.PROCESS)}
    yield {
        "dcp.save": timed(
            lambda: dcp.save(state, storage_writer=writer(), planner=planner(), no_dist=True)
        ),
        "dcp.async_save, stall": save_later(AsyncCheckpointerType.THREAD),
        **({} if tensors else by_a_process),
        "dcp.load, into the state": timed(
            lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "dcp"))
        ),
    }
    dist.destroy_process_group()


def _written(future: Any) -> None:
    future.result(120)
