"""The core of an agent: one event in, the actions that follow out. No I/O, no threads, no clock.

A driver hands in requests and the ends of actions, one at a time, and performs the actions that
come back, in order: agent/runtime/driver.py, and in a simulation sim/hosts/agent.py.

    Reserve, Stage, Protect, Prefetch, Hold, Held, Commit, Revoke, Begin,
    Forget, Fence, Fetch, Assign, Guard, Store, Retain      requests (protocol/messages)
    Begun, Finished, Failed, Due, FilesRemoved              start, ends of actions, alarms, losses

A request that raises has changed nothing. The rules are in the files of their subjects.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ecckpt.agent.core.actions import (
    Action,
    Allocate,
    AskPeer,
    Begun,
    Behind,
    Check,
    Due,
    Encode,
    Event,
    Failed,
    FilesRemoved,
    Finished,
    Gather,
    MarkAssigned,
    Noted,
    Post,
    Pull,
    Record,
    Recycle,
    Refuse,
    Remember,
    Reply,
    Request,
    Write,
)
from ecckpt.agent.core.archive import Archiver
from ecckpt.agent.core.fetch import Fetcher, slot_of
from ecckpt.agent.core.health import GroupHealth
from ecckpt.agent.core.hold import Holder
from ecckpt.agent.core.protect import EARLY_BYTES, Protector
from ecckpt.agent.core.repair import Repairer
from ecckpt.agent.core.room import NO_ROOM, room_made
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.scrub import Scrubber
from ecckpt.agent.core.tasks import Fetching, Job, Scrubbing, Taking
from ecckpt.agent.records.entry import Entry
from ecckpt.agent.records.run_notes import RunNotes
from ecckpt.errors import Fenced, InvalidMessage, MemoryBudgetTooSmall
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import ShardId
from ecckpt.policy.sizing import steady_bytes
from ecckpt.protocol.messages.disk import Retain, Store
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.repair import Guard, Presence, Probe
from ecckpt.protocol.messages.restore import Assign, Begin, Fence, Fetch, Forget
from ecckpt.protocol.messages.save import (
    Commit,
    Held,
    Hold,
    Prefetch,
    Progress,
    Protect,
    Reserve,
    Revoke,
    Stage,
)


class Core:
    """The decisions of one agent. Not thread-safe: the driver hands in one event after another.

    Peers reach the agent at ``address``. ``budget_bytes`` is the memory that a run may use on this
    node unless its requests say otherwise. ``disk``: whether the node has a disk; ``disk_problem``:
    why it cannot be used. ``scrub_bytes_per_s``: rate at which the disk is read to find damage, 0
    for never. Fragments of at least ``early_bytes`` are announced to their holders before they are
    encoded.
    """

    def __init__(
        self,
        *,
        node: str,
        address: str,
        budget_bytes: int,
        disk: bool = False,
        disk_problem: str = "",
        scrub_bytes_per_s: float = 0.0,
        early_bytes: int = EARLY_BYTES,
    ) -> None:
        self.records = RunRecords(node, disk=disk)
        self.archiver = Archiver(self.records, problem=disk_problem)
        self._node = node
        self._budget_bytes = budget_bytes
        self._protector = Protector(self.records, address=address, early_bytes=early_bytes)
        self._holder = Holder(self.records)
        self._fetcher = Fetcher(self.records)
        self.repairer = Repairer(self.records, self._protector, budget_bytes=budget_bytes)
        self._scrubber = Scrubber(self.records, bytes_per_s=scrub_bytes_per_s)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Decide what follows from an event at that time.

        Raises an ``EcckptError`` to refuse a request. ``now_s`` is of any clock that never goes
        back.
        """
        match event:
            case Finished(Check() as check, verdict):
                actions = self._scrubber.checked(check, str(verdict), now_s)
            case Failed(Check() as check):  # no verdict: the file is neither good nor damaged
                actions = self._scrubber.checked(check, "", now_s)
            case Finished(action, result) if isinstance(action, Behind):
                actions = self._done_on_disk(action, result)
            case Finished(action, result):
                actions = self._finished(action, result, now_s)
            case Failed(action, error):
                actions = self._failed(action, error, now_s)
            case Due(task):
                actions = self._due(task, now_s)
            case FilesRemoved(runs):
                actions = self.records.drop_removed(runs)
            case Begun():
                actions = [
                    *self.repairer.resume(now_s),
                    *self._scrubber.schedule_first_round(now_s),
                ]
            case _:
                actions = self._requested(event, now_s)
        # Any event may have fenced a writer, committed a generation or ended the repair.
        return [*actions, *self._holder.prefetcher.review(), *self.repairer.review(now_s)]

    def _due(self, task: Job | Taking | GroupHealth | Scrubbing, now_s: float) -> list[Action]:
        match task:
            case Job():
                return self._protector.due(task, now_s)
            case Taking():
                return self._holder.prefetcher.due(task)
            case Scrubbing():
                return self._scrubber.due(task, now_s)
        return self.repairer.due(task, now_s)

    def progress(self, shard: ShardId) -> Progress:
        """How far the protection of a shard is."""
        return self._protector.progress(shard)

    def home(self, shard: ShardId) -> Entry:
        """The sealed home copy of a shard; raises if there is none, or it is still being staged."""
        entry = self.records.find(shard, HOME)
        if entry.table is None:
            raise InvalidMessage(f"{shard} is still being staged")
        return entry

    def presence(self, message: Probe) -> Presence:
        """Which fragments of these shards this node has, and which it is about to have."""
        record = self.records.get(message.run)
        return Presence(
            node=self._node,
            committed=record.committed,
            held=tuple(tuple(record.held(shard)) for shard in message.shards),
            coming=tuple(tuple(self._holder.coming(shard)) for shard in message.shards),
        )

    # -- requests ---------------------------------------------------------------------------------

    def _requested(self, request: Request, now_s: float) -> list[Action]:
        match request:
            case Reserve():
                actions = self._reserve(request)
            case Stage():
                actions = self._stage(request)
            case Protect():
                actions = self._protector.start(request, now_s)
            case Prefetch() | Hold():
                actions = self._holder.start(request, now_s)
            case Held():
                actions = [Reply(Done()), *self._protector.held(request, now_s)]
            case Commit() | Revoke():
                actions = self._commit(request)
            case Begin() | Forget() | Fence():
                actions = self._fence(request, now_s)
            case Fetch() | Assign():
                actions = self._asked_to_restore(request)
            case Guard() | Store() | Retain():
                actions = self._asked_behind(request, now_s)
        return actions

    def _asked_behind(self, request: Guard | Store | Retain, now_s: float) -> list[Action]:
        """Dispatch the requests whose work goes on in the background of the saves."""
        if isinstance(request, Guard):
            return self.repairer.start(request, now_s)
        return self.archiver.handle_request(request)

    def _reserve(self, message: Reserve) -> list[Action]:
        header = message.header
        run, rank = header.shard.run, header.shard.rank
        if header.index != HOME:
            raise InvalidMessage(f"a slot for index {header.index}: only home copies are staged")
        budget_bytes = message.memory_bytes or self._budget_bytes
        need_bytes = steady_bytes(header, local_ranks=message.local_ranks, holders=message.holders)
        if need_bytes > budget_bytes:
            raise MemoryBudgetTooSmall(
                self._node,
                need_bytes=need_bytes,
                have_bytes=budget_bytes,
                what=f"keeping shards of {header.shard_bytes:,} bytes for {message.local_ranks} "
                f"local ranks with RS({header.k}, {header.m})",
            )
        return [
            *self.records.admit(run, header.shard.generation.writer, header),
            *self.records.discard(run, rank, message.discard),
            *self.records.clear(run, rank),  # before the new slot: it may need their memory
            Allocate(
                run=run,
                size_bytes=header.file_bytes,
                budget_bytes=budget_bytes,
                what=f"a slot for rank {rank}",
                task=message,
            ),
        ]

    def _reserved(self, message: Reserve, region: Any) -> list[Action]:
        header = message.header
        try:
            # Again: the fence may have risen while the region was allocated.
            self.records.get_or_create(header.shard.run).admit(header.shard.generation.writer)
        except Fenced as error:
            return [Recycle(header.shard.run, region), Refuse(error)]
        older = self.records.reserve(header, region)
        return [*older, Reply(slot_of(header, region))]

    def _stage(self, message: Stage) -> list[Action]:
        header = message.header
        run, writer = header.shard.run, header.shard.generation.writer
        # ``stage`` may raise, so the fence is raised only after it.
        self.records.get(run).check_writer(writer)
        staged = self.records.stage(header, message.region)
        return [*staged, *self.records.admit(run, writer), Reply(Done())]

    def _asked_to_restore(self, request: Fetch | Assign) -> list[Action]:
        if isinstance(request, Fetch):
            return self._fetcher.start(request)
        home = self.home(request.shard)
        home.region.assigned = True
        return [MarkAssigned(home.region), Reply(slot_of(home.header, home.region))]

    def _commit(self, message: Commit | Revoke) -> list[Action]:
        if isinstance(message, Revoke):
            return [*self.records.revoke(message.run, message.generation), Reply(Done())]
        record = self.records.get_or_create(message.run)
        record.commit(message.generation)
        return self.records.write_notes(record, message) or [
            *self.records.retire(record.outdated()),
            Reply(Done()),
        ]

    def _fence(self, message: Begin | Forget | Fence, now_s: float) -> list[Action]:
        if isinstance(message, Forget):  # of people, who may leave the identity out
            message = replace(message, run=self.records.full_name(message.run))
        if isinstance(message, Begin) and not message.writer.timeline:  # it only asks
            self.records.get(message.run).check_age(message.writer, now_s - message.age_s)
            return [self._reply(message)]
        record = self.records.get_or_create(message.run)
        if isinstance(message, Fence):
            newer = record.admit(message.writer)
            record.learn_roll_backs(message.roll_backs)
            if message.restored:
                record.went_on_from(message.restored)
        else:
            if not message.writer.session:
                raise InvalidMessage(f"{message.run}: a timeline is begun by a session")
            born_s = now_s - (message.age_s if isinstance(message, Begin) else 0.0)
            newer = record.begin_timeline(message.writer, born_s)
        forgotten: list[Action] = []
        if isinstance(message, Forget):
            forgotten = [
                *self.archiver.stop(message.run),
                *self._holder.prefetcher.clear(message.run),
                *self.records.forget(message.run),
            ]
        return [
            *(self.records.clear(message.run) if newer else ()),
            *forgotten,
            *(self.records.write_notes(record, message) or [self._reply(message)]),
        ]

    def _reply(self, request: Noted) -> Reply:
        """The answer to a request whose changes are now in the written notes."""
        if isinstance(request, Begin):
            return Reply(self.records.get(request.run).inventory(self._node))
        return Reply(Done())

    # -- ends of actions --------------------------------------------------------------------------

    def _finished(self, action: object, result: Any, now_s: float) -> list[Action]:
        actions: list[Action] = []  # a ``Post`` that was delivered needs no action
        match action:
            case Remember(run, request):
                actions = self._remembered(run, result)
                return [*actions, self._reply(request)] if request else actions
            case Allocate(task=task):
                return self._allocated(task, result)
            case Encode(job):
                return self._protector.encoded(job, result, now_s)
            case Pull(taking):
                return self._holder.pulled(taking, result)
            case Gather(fetching):
                actions = self._fetcher.gathered(fetching, result)
            case AskPeer():
                actions = self.repairer.answered(action, result, now_s)
        return actions

    def _done_on_disk(self, action: Behind, result: Any) -> list[Action]:
        match action:
            case Write():
                return self.archiver.written(action, result)
            case Record(run):
                return self.records.notes_copied(run, result)
        return []  # Remove: the records were changed when it was decided

    def _remembered(self, run: str, notes: RunNotes) -> list[Action]:
        record = self.records.get_or_create(run)
        record.noted = notes
        # Only now, with the commit in the state file: an agent that is killed before this line
        # finds the old notes and still has every file that they need.
        return [
            *self.records.retire(record.outdated()),
            *self.records.copy_notes_to_disk(record),
            *self.records.remove(run, record.superseded()),
        ]

    def _allocated(self, task: object, region: Any) -> list[Action]:
        match task:
            case Job():
                return self._protector.allocated(task, region)
            case Taking():
                return self._holder.allocated(task, region)
            case Fetching():
                return self._fetcher.allocated(task, region)
            case Reserve():
                return self._reserved(task, region)
        raise AssertionError(task)

    def _failed(self, action: object, error: Exception, now_s: float) -> list[Action]:
        # Notes that could not be written are written with the next change. A ``Held`` that could
        # not be sent is not sent again: the home's job has a deadline.
        actions: list[Action] = []
        match action:
            case Allocate(again=False) if isinstance(error, NO_ROOM):
                freed = room_made(action, error, self.records, self._holder.prefetcher)
                actions = freed or self._failed(replace(action, again=True), error, now_s)
            case Allocate(task=Job() as job) | Encode(job):
                actions = self._protector.failed(job, error, now_s)
            case Allocate(task=Taking() as taking) | Pull(taking):
                actions = self._holder.failed(taking, error)
            case Allocate(task=Fetching() as fetching) | Gather(fetching):
                actions = self._fetcher.failed(fetching, error)
            case Allocate(task=Reserve() as request) | Remember(request=request):
                actions = [Refuse(error)] if request else []
            case Write():
                actions = self.archiver.failed(action, error)
            case AskPeer():
                actions = self.repairer.missed(action, now_s)
            case Record(run):
                actions = self.records.notes_copied(run, None)
            case Post(message=Hold(header=header), job=Job() as job, node=node):
                run = header.shard.run
                told = self.records.reach(run, error.current) if isinstance(error, Fenced) else []
                lost = self._protector.unreached(job, header.index, node, error, now_s)
                actions = [*told, *lost]
        return actions
