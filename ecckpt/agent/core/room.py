"""What goes first when there is no room for a region."""

from __future__ import annotations

from dataclasses import replace

from ecckpt.agent.core.actions import Action, Allocate, Warn
from ecckpt.agent.core.prefetch import Prefetcher
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.errors import MemoryBudgetTooSmall, NotMapped, TmpfsFull

NO_ROOM = (MemoryBudgetTooSmall, TmpfsFull, NotMapped)


def room_made(
    action: Allocate, error: Exception, records: RunRecords, prefetcher: Prefetcher
) -> list[Action]:
    """Drop what matters least and try the allocation again; no actions if nothing can be dropped.

    In this order, each only if the one before freed nothing:

        1. prefetched fragments: no ``Hold`` has asked for them yet;
        2. doomed entries that only a pending write to disk keeps;
        3. files of older timelines (a save that failed before a restart would otherwise stay
           until a commit for which there is no room), and slots that ranks of any run reserved
           in advance: a rank that has ended needs none, and one that lives reserves again.

    After steps 1 and 2 the action stays ``again=False``, so the next step is still open if it
    fails again. Step 3 is the last: the action that it returns is ``again=True``.
    """
    # A budget is one run's; a full tmpfs is shared by the files of all runs.
    run = action.run if isinstance(error, MemoryBudgetTooSmall) else None
    early = prefetcher.clear(run)
    if early:
        return [*early, action]
    recalled = records.recall(run, action.size_bytes)
    if recalled:
        return [*recalled, action]
    record = records.get_or_create(action.run)
    abandoned = record.abandoned() or record.leftover()
    unused = records.unused()
    if not abandoned and not unused:
        return []
    text = (
        f"run {action.run}: dropped {len(abandoned)} files of older timelines and "
        f"{len(unused)} slots that were reserved"
    )
    return [*unused, *records.retire(abandoned), Warn(text), replace(action, again=True)]
