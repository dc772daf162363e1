"""The driver of the core: takes events from many threads and performs what the core decides.

    server thread --ask--> [lock: decide, small actions] --> large actions, by the same thread until
                                                             it has the answer; later ones by pools
    pool or alarm -------> [lock: decide, small actions] --> large actions, by pools

Decisions are made one at a time under a lock, together with their small actions. Large actions are
performed outside of the lock: those that an answer depends on by the thread that asks, the others
by small pools. Threads of the pools answer no requests, so two agents that pull from each other
cannot use up each other's server threads.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ecckpt.agent.core.actions import (
    Allocate,
    Announce,
    Answer,
    AskPeer,
    Begun,
    Behind,
    Borrow,
    Check,
    Discard,
    Due,
    Encode,
    Event,
    Failed,
    FilesRemoved,
    Finished,
    Gather,
    Large,
    MarkAssigned,
    Post,
    Pull,
    Record,
    Recycle,
    Refuse,
    Release,
    Remember,
    Remove,
    Reply,
    Request,
    Seal,
    Small,
    Wake,
    Warn,
    Write,
)
from ecckpt.agent.core.core import Core
from ecckpt.agent.core.hold import PULLS
from ecckpt.agent.core.prefetch import PREFETCHES
from ecckpt.agent.core.tasks import DiskInventory, Fetching, Job, Taking
from ecckpt.agent.runtime.disk_store import Disk, lower_priority
from ecckpt.agent.runtime.network import PeerNetwork
from ecckpt.agent.runtime.rate_limit import pace_of
from ecckpt.agent.runtime.region_store import RegionStore
from ecckpt.agent.runtime.shard_bytes import encode_home, seal
from ecckpt.agent.runtime.verify import verdict_on
from ecckpt.errors import EcckptError, NotHeld
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.save import Reserve
from ecckpt.protocol.tracing import Tracer

if TYPE_CHECKING:
    from ecckpt.agent.records.entry import Entry
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.format.ids import ShardId

_log = logging.getLogger(__name__)

_THREADS: dict[type, int] = {
    Remember: 1,  # most notes are written by the thread whose request changed them
    Allocate: 4,
    Encode: 2,
    Pull: PULLS + PREFETCHES,
    Post: 16,
    Announce: 4,
    AskPeer: 8,
}


class Driver:
    """Thread-safe. ``changed`` guards the core; it is notified after every decision."""

    def __init__(
        self,
        core: Core,
        region_store: RegionStore,
        network: PeerNetwork,
        tracer: Tracer,
        disk: Disk | None = None,
    ) -> None:
        self.core = core
        self._tracer = tracer
        self._disk = disk
        self.changed = threading.Condition()
        self._region_store = region_store
        self._network = network
        self._alarm = _Alarm(self._handle)
        self._pools = {
            kind: ThreadPoolExecutor(threads, thread_name_prefix=kind.__name__.lower())
            for kind, threads in _THREADS.items()
        }
        # One thread for all work on the disk: actions on it stay in the order of the decisions.
        behind = ThreadPoolExecutor(1, thread_name_prefix="disk", initializer=lower_priority)
        self._pools |= {Write: behind, Remove: behind, Record: behind}
        self._pools[Check] = ThreadPoolExecutor(
            1, thread_name_prefix="check", initializer=lower_priority
        )
        for pool in {id(pool): pool for pool in self._pools.values()}.values():
            pool.submit(bool)  # starts one thread of each pool while there is memory for it

    def adopt_disk(self, *, patience_s: float) -> None:
        """Enter what an earlier process left on disk; wait for it at most ``patience_s``.

        A longer scan goes on in the background. Until it ends, the disk is named in ``rejected``,
        so that no restore treats files that are not read yet as lost.
        """
        if self._disk is None:
            return
        with self.changed:
            self.core.records.await_disk()
        reading = self._pools[Write].submit(self._disk.adopt)
        reading.add_done_callback(self._adopted)
        wait([reading], patience_s)

    def _adopted(self, reading: Future[DiskInventory]) -> None:
        with self.changed:
            records = self.core.records
            try:
                records.adopt_disk(reading.result())
            except Exception as error:
                records.lose_disk(str(error))
                _log.exception("the disk cannot be read")

    @property
    def reading(self) -> bool:
        """Whether the disk is still being scanned."""
        return self.core.records.awaits_disk

    def start(self) -> None:
        """Start what needs no request: guards from the notes, and scrubbing."""
        self._handle(Begun())

    def note_damage(self, file: DiskFile, why: str) -> bool:
        """Note that a file on disk was found bad; True if that is new."""
        with self.changed:
            return self.core.records.note_damage(file, why)

    @contextmanager
    def pinned(self, shard: ShardId, index: int) -> Iterator[Entry]:
        """A sealed entry in memory, pinned for the context; ``NotHeld`` if there is none."""
        with self.changed:
            self.notice_removed_files()
            entry = self.core.records.find(shard, index)
            if entry.table is None:
                raise NotHeld(f"{shard} is still being staged")
            entry.pins += 1
        try:
            yield entry
        finally:
            with self.changed:
                for action in self.core.records.unpin(entry):
                    assert isinstance(action, Small)
                    self._settle(action)

    def ask(self, request: Request) -> object:
        """The answer to a request; raises the error that refuses it.

        The calling thread performs all actions until it has the answer, except those on the disk.
        What the core decides after the answer goes to the pools.
        """
        answer: Answer | None = None
        todo = deque(self._decide(request))
        while todo:
            action = todo.popleft()
            if isinstance(action, Reply | Refuse):
                answer = action
            elif answer is None and not isinstance(action, Behind):
                todo.extend(self._decide(self._perform(action)))
            else:
                self._submit(action)
        if isinstance(answer, Refuse):
            raise answer.error
        assert isinstance(answer, Reply), request
        return answer.message

    def notice_removed_files(self) -> None:
        """Notice files in tmpfs that another process has removed. The caller holds ``changed``."""
        removed = self._region_store.find_removed()
        if removed is not None:
            self._handle(removed)

    def _handle(self, event: Event) -> None:
        """Decide about an event that is not a request, and hand the actions to the pools."""
        for action in self._decide(event):
            assert not isinstance(action, Reply | Refuse)
            self._submit(action)

    def _submit(self, action: Large) -> None:
        try:
            self._pools[type(action)].submit(self._work, action)
        except RuntimeError as error:  # no memory for one more thread; an existing one will do it
            _log.warning(
                "%s waits for a free thread, none could be started: %s",
                type(action).__name__.lower(),
                error,
            )

    def _work(self, action: Large) -> None:
        try:
            self._handle(self._perform(action))
        except Exception:
            _log.exception("the end of %s could not be handled", type(action).__name__.lower())

    def _decide(self, event: Event) -> list[Large | Answer]:
        with self.changed:
            if not isinstance(event, FilesRemoved):
                self.notice_removed_files()  # the core must not build on a file that is gone
            actions = self.core.handle(event, time.monotonic())
            large = [action for action in actions if not isinstance(action, Small)]
            # Still under the lock: the next decision must find the files as this one left them.
            for action in actions:
                if isinstance(action, Small):
                    self._settle(action)
            self.changed.notify_all()
        return large

    def _settle(self, action: Small) -> None:
        match action:
            case Seal(entry):
                seal(entry)
            case Recycle() | Discard():
                self._region_store.let_go(action)
            case MarkAssigned(region):
                self._region_store.tier.assign(region)
            case Release(run):
                self._region_store.tier.release(run)
            case Borrow():
                self._region_store.borrow(action)
            case Wake(at_s, task):
                self._alarm.set(at_s, Due(task))
            case Warn(text):
                _log.warning("%s", text)

    def _perform(self, action: Large) -> Event:
        try:
            if isinstance(action, Behind):
                return Finished(action, self._result_on_disk(action))
            return Finished(action, self._result(action))
        except (EcckptError, OSError) as error:
            if not _is_expected(action):
                _log.warning("%s failed: %s", type(action).__name__.lower(), error)
            return Failed(action, error)
        except Exception as error:
            _log.exception("%s failed", type(action).__name__.lower())
            node = self.core.records.node
            text = f"unexpected {type(error).__name__}, see the log of {node}"
            return Failed(action, EcckptError(text))

    def _result(self, action: Large) -> object:
        result: object = None
        match action:
            case Remember(run):
                # The current notes, written under the lock: whichever of several such actions is
                # performed last, an older state never replaces a newer one in the file.
                with self.changed:
                    return self._region_store.remember(
                        run, self.core.records.get_or_create(run).notes
                    )
            case Allocate(task=task):
                with self._tracer.span("allocate", _shard_of(task)):
                    return self._region_store.allocate(action)
            case Encode(job):
                assert job.home is not None
                header = job.home.header
                with self._tracer.span("encode", header.shard):
                    return encode_home(header, job.home.region, job.parity)
            case Pull(taking):
                return self._network.pull(taking)
            case Gather(fetching):
                result = self._network.gather(fetching)
            case Post():
                self._network.post(action)
            case Announce():
                self._network.announce(action)
            case AskPeer():
                result = self._network.ask(action)
            case Check(file=file, bytes_per_s=bytes_per_s):
                result = verdict_on(file, pace_of(bytes_per_s))
        return result

    def _result_on_disk(self, action: Behind) -> object:
        assert self._disk is not None
        match action:
            case Write():
                header = action.entry.header
                with self._tracer.span("write", header.shard, header.index):
                    return self._disk.write(action)
            case Remove():
                self._disk.remove(action)
            case Record(run):
                with self.changed:  # not held while writing: a disk may hang
                    notes = self.core.records.get_or_create(run).noted.lasting
                return self._disk.record(run, notes)
        return None


def _is_expected(action: Large) -> bool:
    """Whether a failure needs no log line: it is common, or the core reports it itself."""
    early = isinstance(action, Pull) and action.taking.early
    return early or isinstance(action, Allocate | Announce | AskPeer | Write)


def _shard_of(task: Reserve | Job | Taking | Fetching) -> ShardId:
    if isinstance(task, Reserve):
        return task.header.shard
    return task.message.shard if isinstance(task, Job) else task.message.header.shard


class _Alarm:
    """One thread that hands in events at their times; started with the first of them.

    Where no thread can be started for want of memory, the next event tries again, and the pending
    ones are handed in late.
    """

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._pending: list[tuple[float, int, Due]] = []
        self._thread: threading.Thread | None = None

    def set(self, at_s: float, event: Due) -> None:
        with self._changed:
            heapq.heappush(self._pending, (at_s, next(self._order), event))
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="alarm", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    _log.warning("alarms are late, their thread could not be started: %s", error)
                else:
                    self._thread = thread

    def _run(self) -> None:
        while True:
            event = self._await()
            try:
                self._tell(event)
            except Exception:
                _log.exception("an alarm could not be handled")

    def _await(self) -> Due:
        with self._changed:
            while True:
                now_s = time.monotonic()
                if self._pending and self._pending[0][0] <= now_s:
                    return heapq.heappop(self._pending)[2]
                self._changed.wait(self._pending[0][0] - now_s if self._pending else None)
