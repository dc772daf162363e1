"""torch.distributed.checkpoint over ecckpt: ``dcp.save``, ``dcp.async_save`` and ``dcp.load``.

    checkpointer = ecckpt.Checkpointer("llama-70b", code=(8, 2))
    reader = Reader(checkpointer)  # all ranks, at every start, before the first save
    if reader.step is not None:
        dcp.load(state, storage_reader=reader)
    ...
    dcp.save(state, storage_writer=Writer(checkpointer, step))

DCP plans who writes what and who reads what; the bytes of each rank are a shard like any other.
"""

from __future__ import annotations

from ecckpt.integrations.dcp.reader import Reader
from ecckpt.integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
