"""A pause of Python's cyclic garbage collector, for code that makes very many small objects.

``state`` uses it when it plans a snapshot and when it parses a shard's header,
``integrations/dcp`` when it makes or reads DCP's metadata.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cyclic collector of the whole process inside the ``with`` block.

    For code that allocates hundreds of thousands of objects and no reference cycles. The number of
    allocations triggers the collector, and each full collection visits all objects of the program:
    for 20,000 tensors to plan, or a restore of 16,384 ranks, that takes longer than the work
    itself. Reference counting goes on. The collector is enabled again only if it was enabled
    before, so that blocks may nest.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
