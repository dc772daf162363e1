"""Filling the tensors of a live state: many in one go and past the caches, where they are plain
memory; beside the caller's stream, where they are on a GPU; by torch, where they are anything else.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ecckpt.copying import COPY_THREADS, copy_many
from ecckpt.state.devices import Pair, SideCopies, gpu_of
from ecckpt.state.tensors import collapse, fill


class Fills:
    """Pairs of tensors to copy, collected while a state is fitted and copied together."""

    def __init__(self) -> None:
        self._pairs: list[Pair] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note that ``source``, of the same shape and dtype, goes into ``target``."""
        self._pairs.append((target, source))

    def run(self) -> None:
        """Copy everything that was noted."""
        rows = []
        written = []
        on_gpus: list[Pair] = []
        others: list[Pair] = []
        for target, source in self._pairs:
            if not target.nbytes:
                continue
            if _is_plain(target) and _is_plain(source):
                rows.append((source.data_ptr(), target.data_ptr(), target.nbytes))
                written.append(target)
            elif gpu_of(target) is None:
                others.append((target, source))
            else:
                on_gpus.append(collapse(target, source))
        with SideCopies() as copies:
            copies.to_gpus(on_gpus)
            for target, source in others:
                fill(target, source)
            if rows:
                _copy(np.array(rows, np.int64))
                # As after copy_(): a graph that kept one of them must not be used with new values.
                torch.autograd.graph.increment_version(written)
        self._pairs.clear()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are one range of the CPU's memory, as they are."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj() or tensor.is_inference())
    )


def _copy(rows: NDArray[np.int64]) -> None:
    """Copy ranges; those of tied tensors, which overlap, one after another and not in threads."""
    order = np.argsort(rows[:, 1], kind="stable")
    begins, ends = rows[order, 1], rows[order, 1] + rows[order, 2]
    if (begins[1:] >= np.maximum.accumulate(ends)[:-1]).all():
        copy_many(rows, threads=COPY_THREADS)
        return
    for row in rows:
        copy_many(row[None, :])
