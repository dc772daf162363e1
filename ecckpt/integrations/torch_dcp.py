"""torch.distributed.checkpoint over ecckpt: ``dcp.save``, ``dcp.async_save`` and ``dcp.load``.

    checkpointer = ecckpt.Checkpointer("llama-70b", code=(8, 2))
    reader = Reader(checkpointer)  # all ranks, at every start, before the first save
    if reader.step is not None:
        dcp.load(state, storage_reader=reader)
    ...
    dcp.save(state, storage_writer=Writer(checkpointer, step))

DCP plans which rank writes and which rank reads which parts. The bytes that a rank writes are a
shard like those of ``Checkpointer.save``. docs/DCP.md describes the use.
"""

from __future__ import annotations

from ecckpt.integrations.dcp.reader import Reader
from ecckpt.integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
