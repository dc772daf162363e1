"""One rank's part in one session of a run: restore, then saves, then the end.

    start --restore--> timeline --save, save, ...--> close
             ^            |
             +--restore---+

Checkpointer performs these routines in the training process, sim/trainer.py in the simulator.
"""

from __future__ import annotations

import math
from typing import Any

from ecckpt.client.cluster.requests import Requests
from ecckpt.client.effects import Lane, Now, Queue, Routine, perform, until
from ecckpt.client.handles import SaveHandle
from ecckpt.client.restore.protocol import Order, Wanted
from ecckpt.client.restore.restorer import Restored, Restorer
from ecckpt.client.save.archive_protocol import Archivist, Disks
from ecckpt.client.save.saver import Saver
from ecckpt.client.save.ticket import Ticket
from ecckpt.client.save.unsaved import Unsaved
from ecckpt.format.ids import Generation


class RankSession:
    """Restores and saves of one rank; ``strict`` raises what is otherwise reported by a handle.

    ``max_unsaved_s``: see ``Checkpointer``.
    """

    def __init__(
        self,
        requests: Requests,
        *,
        disk_bytes: int,
        strict: bool,
        max_unsaved_s: float = math.inf,
    ) -> None:
        config, cluster = requests.config, requests.cluster
        disks = Disks(
            every=config.disk_every if cluster.rank == 0 else 0,  # rank 0 does it for all
            keep=config.keep,
            budget_bytes=disk_bytes,
            ranks=cluster.ranks,
            least=requests.min_fragments,
        )
        self._archivist = Archivist(cluster, disks)
        self.saver = Saver(requests, self._archivist, strict=strict, unsaved=Unsaved(max_unsaved_s))
        self._requests = requests
        self._restores = 0

    def save(self, step: int, state: Any, patience_s: float) -> Routine[SaveHandle]:
        """See ``Checkpointer.save``."""
        return (yield from self.saver.save(step, state, patience_s))

    def ticket(self, step: int) -> Routine[Ticket]:
        """See ``Checkpointer.ticket``."""
        return (yield from self.saver.ticket(step))

    def restore(
        self, state: Any, wanted: Wanted, *, required: bool, assign: bool
    ) -> Routine[Restored | None]:
        """See ``Checkpointer.restore``."""
        yield from self.saver.settle()
        restorer = self._restorer(assign=assign)
        order, restored = yield from restorer.run(state, wanted, required=required)
        parent = restored.generation if restored else None
        yield from self._begin_timeline(order, restorer, parent)
        yield from perform(Queue(Lane.FOLLOW, self.saver.send_spans()))
        if restored is not None:
            assert order.header is not None
            handle = restored.reprotection
            yield from self.saver.protect_again(order.header, order.repair, handle)
        return restored

    def find(self, wanted: Wanted) -> Routine[Order]:
        """See ``Checkpointer.find``; without a header there never was a generation."""
        yield from self.saver.settle()
        restorer = self._restorer(assign=False)
        order = yield from restorer.find(wanted)
        parent = order.header.shard.generation if order.header else None
        yield from self._begin_timeline(order, restorer, parent)
        return order

    def close(self, *, settled: bool) -> Routine[None]:
        """Wait for what is on its way to disk, at most ``save_timeout_s``.

        ``settled``: all saves have ended, so the last ticket's save can be noted for the disks.
        """
        yield from self.saver.finish_close(settled=settled)
        timeout_s = self._requests.config.save_timeout_s
        self._archivist.deadline_s = (yield from perform(Now())) + timeout_s
        yield from until(lambda: self._archivist.is_done, 2 * timeout_s)

    def _restorer(self, *, assign: bool) -> Restorer:
        self._restores += 1
        return Restorer(
            self._requests.cluster,
            number=self._restores,
            after=self.saver.timeline or 0,
            timeout_s=self._requests.config.restore_timeout_s,
            assign=assign,
        )

    def _begin_timeline(
        self, order: Order, restorer: Restorer, parent: Generation | None
    ) -> Routine[None]:
        coordinator = restorer.coordinator
        if self._archivist.is_wanted:
            begun = self._archivist.is_begun
            on_disk, roll_backs = coordinator.on_disk, coordinator.roll_backs
            self._archivist.begin_timeline(order.timeline, on_disk, roll_backs)
            if not begun:
                yield from perform(Queue(Lane.ARCHIVE, self._archivist.run()))
        yield from perform(Queue(Lane.FOLLOW, coordinator.tell()))
        yield from self.saver.begin_timeline(order.timeline, parent)
