"""Protection of a staged shard: encode it once, seal the home copy, have peers hold its fragments.

The states of a job:

    start --> ENCODING --encoded, home copy sealed, holders asked--> SCATTERING
                 |                                                       |
                 | cancelled, no room, encoding failed                   | all holders answered,
                 v                                                       | deadline, or cancelled
              FAILED <---- cancelled, or fewer than min_fragments held --+
                                                                         |
              PROTECTED <-------------- at least min_fragments held -----+

Every end releases the pin of the home copy and recycles the parity. A job that is cancelled while
its parity is being encoded does so only when the encoding has ended: a thread still writes to the
region.

Data fragments are ranges of the home copy, and parity has a region of its own, so holders pull
everything from files. Bytes are sent only to peers that asked for them. While a job encodes,
holders of large data fragments may pull them already (prefetch.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from ecckpt.agent import deadlines
from ecckpt.agent.core.actions import (
    Action,
    Allocate,
    Announce,
    Encode,
    Post,
    Recycle,
    Reply,
    Seal,
    Wake,
    Warn,
)
from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.core.tasks import Job, JobState
from ecckpt.agent.records.entry import Entry
from ecckpt.errors import AgentMismatch, AgentUnreachable, CorruptFragment, NotHeld
from ecckpt.format.fragment_file import HOME, pack_table
from ecckpt.format.ids import ShardId
from ecckpt.policy.sizing import parity_region_bytes
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.save import Held, Hold, Prefetch, Progress, Protect

if TYPE_CHECKING:
    from ecckpt.agent.storage.region import Region

# Once enough fragments are held, the other holders get this many times the time it took.
_GRACE_FACTOR = 3.0
_KEPT_JOBS = 256  # ended jobs, which ``watch`` and repairs still ask about
# Encoding less takes no longer than the announcement to the holders (docs/decisions/0111).
EARLY_BYTES = 32 << 20


class Protector:
    """The jobs of this node's ranks, one for each shard, and the last ones that have ended.

    ``address`` is where peers pull from and answer to. Data fragments of at least ``early_bytes``
    are announced to their holders before they are encoded.
    """

    def __init__(self, records: RunRecords, *, address: str, early_bytes: int) -> None:
        self._records = records
        self._address = address
        self._early_bytes = early_bytes
        self._jobs: dict[ShardId, Job] = {}
        self._dead: set[int] = set()  # in the last job that ended well
        self._repair: Job | None = None  # its shard may also have a job in ``_jobs``

    def start(self, message: Protect, now_s: float) -> list[Action]:
        """Start a job, or start again for the fragments that the request names.

        A job of the same shard and a repair that is under way are cancelled first.
        """
        # Both may raise, and nothing is changed until then.
        self._records.get(message.shard.run).check_writer(message.writer)
        home = self._records.find(message.shard, HOME)
        actions = self._records.admit(message.shard.run, message.writer)
        if (older := self._jobs.get(message.shard)) and not older.ended:
            actions += self._cancel(older, "begun again", now_s)
        actions += self.stop_repair(now_s)
        ended = [shard for shard, job in self._jobs.items() if job.ended]
        for shard in ended[: max(0, len(self._jobs) - _KEPT_JOBS)]:
            del self._jobs[shard]
        job = _job(message, home, now_s, repair=False)
        self._jobs[message.shard] = job
        home.pins += 1
        return [*actions, Reply(Done()), *self._prepare(job, home, now_s)]

    def repair(self, message: Protect, now_s: float) -> tuple[Job, list[Action]]:
        """Start to make fragments of a sealed home copy again; one repair at a time.

        The caller checks ``busy`` first. Nothing is dropped to make room for a repair.
        """
        home = self._records.find(message.shard, HOME)
        assert home.table is not None
        assert not self.busy
        job = _job(message, home, now_s, repair=True)
        self._repair = job
        home.pins += 1
        return job, self._prepare(job, home, now_s)

    @property
    def busy(self) -> bool:
        """Whether a save or a repair is under way here."""
        jobs = [*self._jobs.values(), *([self._repair] if self._repair else [])]
        return any(not job.ended for job in jobs)

    def stop_repair(self, now_s: float) -> list[Action]:
        """Cancel the repair, because a save goes first."""
        if self._repair is None or self._repair.ended:
            return []
        return self._cancel(self._repair, "a save goes first", now_s)

    def ended_s(self, shard: ShardId) -> float:
        """When the last job of a shard ended; what holders said before that may be out of date."""
        jobs = [self._jobs.get(shard), self._repair]
        return max(
            (
                job.started_s + job.protected_s
                for job in jobs
                if job is not None and job.message.shard == shard
            ),
            default=-math.inf,
        )

    def progress(self, shard: ShardId) -> Progress:
        """How far a shard is, as ``watch`` answers it."""
        job = self._jobs.get(shard)
        if job is None:
            home = self._records.get(shard.run).find(shard, HOME)
            # A sealed home copy without a job was left by an earlier agent process.
            state = "unknown" if home is None or home.table is not None else "staging"
            return Progress(state=state, held=0, problems=(), encode_s=0.0, protected_s=0.0)
        problems = tuple(job.problems)
        return Progress(
            state=job.state.value,
            held=len(job.held),
            problems=problems,
            encode_s=job.encode_s,
            protected_s=job.protected_s,
        )

    def allocated(self, job: Job, region: Region) -> list[Action]:
        """The region for the parity was allocated."""
        job.parity = region
        return self._release(job) if job.ended else self._encode(job)

    def encoded(self, job: Job, table: np.ndarray, now_s: float) -> list[Action]:
        """Parity and checksums are computed: seal the home copy and ask the holders.

        If the home copy was sealed before (a repair, or a job started again), the checksums must be
        those of its table. If not, its bytes have changed in memory, and the job fails.
        """
        if job.ended:
            return self._release(job)
        job.encode_s = now_s - job.started_s
        home = job.home
        assert home is not None
        if home.table is not None and not np.array_equal(home.table, table):
            shard = home.header.shard
            problem = f"home copy of {shard} no longer matches its checksums"
            return self.failed(job, CorruptFragment(problem), now_s)
        if home.region.removed:
            problem = f"the file of the home copy of {home.header.shard} was removed"
            return self.failed(job, NotHeld(problem), now_s)
        sealed: list[Action] = []
        if home.table is None:
            home.table, home.early = table, False
            sealed = [Seal(home)]
        home.parity = job.parity  # peers may pull parity from now on
        return sealed + self._scatter(job, now_s)

    def failed(self, job: Job, error: Exception, now_s: float) -> list[Action]:
        """The parity could not be allocated or encoded."""
        if job.ended:
            return self._release(job)
        job.problems.append(str(error))
        return self._finish(job, now_s, failed=True)

    def held(self, message: Held, now_s: float) -> list[Action]:
        """A holder has answered the ``Hold`` of a job, or of the repair of the same shard."""
        actions: list[Action] = []
        for job in (self._jobs.get(message.shard), self._repair):
            if job is not None and job.message.shard == message.shard:
                actions += self.answer(job, message.index, message.node, message.problem, now_s)
        return actions

    def answer(self, job: Job, index: int, node: str, problem: str, now_s: float) -> list[Action]:
        """A fragment is held, or will not be. Ignored if the job does not wait for that answer.

        Once ``min_fragments`` are held, the deadline becomes earlier: the other holders get
        ``_GRACE_FACTOR`` times the time that passed so far.
        """
        if index not in job.waiting:
            return []
        job.waiting.discard(index)
        if problem:
            job.problems.append(f"fragment {index} at {node}: {problem}")
        else:
            job.held.add(index)
        if not job.waiting:
            return self._finish(job, now_s)
        if len(job.held) >= job.message.min_fragments > 0:
            grace_ends_s = _grace_ends_s(job, now_s)
            if grace_ends_s < job.deadline_s:
                job.deadline_s = grace_ends_s
                return [Wake(job.deadline_s, job)]
        return []

    def unreached(
        self, job: Job, index: int, node: str, error: Exception, now_s: float
    ) -> list[Action]:
        """A ``Hold`` could not be sent. It is sent once more; then its holder counts as dead.

        A holder that refuses it lives, and has answered.
        """
        if index not in job.waiting:
            return []
        if not isinstance(error, AgentUnreachable | AgentMismatch):
            return self.answer(job, index, node, str(error), now_s)
        if index not in job.unreached:
            job.unreached.add(index)
            return self._posts(job, {index})
        job.dead.add(index)
        return self.answer(job, index, node, str(error), now_s)

    def due(self, job: Job, now_s: float) -> list[Action]:
        """The deadline may have passed: holders that have not answered by then count as failed.

        If all that live have to hold theirs, they are asked again, as long as ``timeout_s`` has not
        passed: a message was lost, or a holder was restarted. An alarm for an earlier deadline
        finds nothing to do.
        """
        if job.ended or now_s < job.deadline_s:
            return []
        end_s = job.started_s + job.message.timeout_s
        if job.message.every_living and now_s < end_s:
            job.deadline_s = min(end_s, _grace_ends_s(job, now_s))
            return [Wake(job.deadline_s, job), *self._posts(job, job.waiting)]
        job.problems.extend(f"fragment {index}: no answer" for index in sorted(job.waiting))
        job.waiting.clear()
        return self._finish(job, now_s)

    def _prepare(self, job: Job, home: Entry, now_s: float) -> list[Action]:
        header, targets = home.header, job.message.targets
        if home.table is not None and all(target.index < header.k for target in targets):
            return self._scatter(job, now_s)
        if not header.m:
            return self._encode(job)
        what = f"the parity of {header.shard}"
        size_bytes, budget_bytes = parity_region_bytes(header), job.message.memory_bytes
        return [
            Allocate(
                run=header.shard.run,
                size_bytes=size_bytes,
                budget_bytes=budget_bytes,
                what=what,
                task=job,
                again=job.repair,
            )
        ]

    def _encode(self, job: Job) -> list[Action]:
        """Encode, and announce data fragments to their future holders.

        Not to holders on the same host: their pulls would slow the encoding down by as much as they
        gain.
        """
        home, message = job.home, job.message
        assert home is not None
        header = home.header
        if home.table is not None or header.fragment_bytes < self._early_bytes:
            return [Encode(job)]
        home.early = True
        prefetches = [
            Announce(
                target.address,
                target.node,
                Prefetch(
                    header=header.at(target.index),
                    writer=message.writer,
                    source=self._address,
                    timeout_s=message.timeout_s,
                    discard=message.discard,
                ),
                job,
            )
            for target in message.targets
            if target.index < header.k and _host(target.address) != _host(self._address)
        ]
        return [Encode(job), *prefetches]

    def _scatter(self, job: Job, now_s: float) -> list[Action]:
        job.state = JobState.SCATTERING
        job.waiting = {target.index for target in job.message.targets}
        if not job.waiting:
            return self._finish(job, now_s)
        return [Wake(job.deadline_s, job), *self._posts(job, job.waiting)]

    def _posts(self, job: Job, indices: Collection[int]) -> list[Action]:
        """A ``Hold`` for the holders of these fragments."""
        message, home = job.message, job.home
        assert home is not None
        assert home.table is not None
        header, packed = home.header, pack_table(home.table)
        return [
            Post(
                target.address,
                Hold(
                    header=header.at(target.index),
                    writer=message.writer,
                    table=packed,
                    source=self._address,
                    memory_bytes=message.memory_bytes,
                    timeout_s=message.timeout_s,
                    discard=message.discard,
                    repair=job.repair,
                ),
                job,
                target.node,
            )
            for target in message.targets
            if target.index in indices
        ]

    def _finish(self, job: Job, now_s: float, *, failed: bool = False) -> list[Action]:
        job.protected_s = now_s - job.started_s
        if not failed and len(job.held) < job.needed:
            text = f"{len(job.held)} fragments held, at least {job.needed} needed"
            if len(job.held) >= job.message.min_fragments:
                text += (
                    ": all whose holders can be reached (a number for min_margin asks for fewer)"
                )
            job.problems.append(text)
            failed = True
        job.state = JobState.FAILED if failed else JobState.PROTECTED
        problem = "; ".join(job.problems[:4])
        what = "repairing" if job.repair else "protecting"
        warning = [Warn(f"{what} {job.message.shard} failed: {problem}")] if failed else []
        if not failed and job.dead != self._dead and not job.repair:
            self._dead = job.dead
            count = f"{len(job.held)} of {len(job.message.targets)} fragments"
            warning = [Warn(f"{job.message.shard} is protected with {count}: {problem or 'all'}")]
        return warning + self._release(job)

    def _cancel(self, job: Job, why: str, now_s: float) -> list[Action]:
        """End a job early. While it encodes, ``encoded`` or ``failed`` release its regions."""
        job.problems.append(why)
        job.protected_s = now_s - job.started_s
        if job.state is JobState.ENCODING:
            job.state = JobState.FAILED
            return []
        job.waiting.clear()
        return self._finish(job, now_s, failed=True)

    def _release(self, job: Job) -> list[Action]:
        """Unpin the home copy and recycle the parity of a job that has ended."""
        home, parity = job.home, job.parity
        assert home is not None
        if home.parity is parity:
            home.parity = None
        home.early = False
        job.home = job.parity = None
        spare = [] if parity is None else [Recycle(home.header.shard.run, parity)]
        return spare + self._records.unpin(home)


def _job(message: Protect, home: Entry, now_s: float, *, repair: bool) -> Job:
    return Job(
        message=message,
        home=home,
        started_s=now_s,
        deadline_s=now_s + message.timeout_s,
        repair=repair,
    )


def _grace_ends_s(job: Job, now_s: float) -> float:
    """When holders that are slower than others have had their time."""
    return now_s + max(deadlines.PROTECT_GRACE_LEAST_S, _GRACE_FACTOR * (now_s - job.started_s))


def _host(address: str) -> str:
    return address.rsplit(":", 1)[0]
