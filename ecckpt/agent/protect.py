"""From a staged slot to a protected shard: encode once, seal the home copy, have peers hold it.

Data fragments are ranges of the slot and parity lies in a region of its own, so holders pull
everything from files; nothing is sent to anybody who did not ask for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ecckpt import wire
from ecckpt.agent.ledger import Entry
from ecckpt.agent.shelf import Shelf
from ecckpt.client import peer_client
from ecckpt.codec import Codec
from ecckpt.errors import CorruptFragment, EcckptError
from ecckpt.fragment import HOME, SUPERBLOCK_BYTES, Header, pack_table
from ecckpt.generation import ShardId
from ecckpt.tiers.memory import Region

_log = logging.getLogger(__name__)

_POST_TIMEOUT_S = 5.0
# Once enough fragments are safe, slower holders get a few times what the others took.
_GRACE_LEAST_S = 1.0
_GRACE_FACTOR = 3.0
_KEPT_JOBS = 256
_ENDED = ("protected", "failed")


@dataclass(eq=False, slots=True)
class Job:
    """The progress of one shard; read and written under the shelf's lock."""

    state: str = "encoding"
    waiting: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    encode_s: float = 0.0
    protected_s: float = 0.0


class Protector:
    """Runs protection jobs for the ranks of this node, each in its own thread of a bounded pool."""

    def __init__(self, shelf: Shelf, *, address: str, token: str) -> None:
        self._shelf = shelf
        self._address = address
        self._token = token
        self._jobs: dict[ShardId, Job] = {}
        self._pool = ThreadPoolExecutor(32, thread_name_prefix="protect")
        self._posts = ThreadPoolExecutor(16, thread_name_prefix="post")
        self._encoding = threading.Semaphore(2)

    def start(self, message: wire.Protect) -> None:
        """Begin (or begin again, for the fragments it names) and return."""
        self._shelf.admit(message.shard.run, message.writer)
        with self._shelf.pinned(message.shard, HOME), self._shelf.changed:
            ended = [each for each, job in self._jobs.items() if job.state in _ENDED]
            for shard in ended[: max(0, len(self._jobs) - _KEPT_JOBS)]:
                del self._jobs[shard]
            self._jobs[message.shard] = Job()
        self._pool.submit(self._run, message, self._jobs[message.shard])

    def progress(self, message: wire.Watch) -> wire.Progress:
        """How far a shard is; waits for news up to ``wait_s`` (at most 30 s)."""
        deadline_s = time.monotonic() + min(message.wait_s, 30.0)
        known = (message.known_state, message.known_committed)
        with self._shelf.changed:
            while True:
                now = self._snapshot(message.shard)
                left_s = deadline_s - time.monotonic()
                if (now.state, now.committed) != known or left_s <= 0:
                    return now
                self._shelf.changed.wait(left_s)

    def held(self, message: wire.Held) -> None:
        """A holder's answer."""
        with self._shelf.changed:
            job = self._jobs.get(message.shard)
            if job is not None and message.index in job.waiting:
                self._answer(job, message.index, message.node, message.problem)

    def _snapshot(self, shard: ShardId) -> wire.Progress:
        ledger = self._shelf.look(shard.run)
        committed = ledger.committed is not None and ledger.committed >= shard.generation
        job = self._jobs.get(shard)
        if job is None:
            state = "staging" if ledger.find(shard, HOME) else "unknown"
            return wire.Progress(state, 0, (), committed, 0.0, 0.0)
        return wire.Progress(
            job.state,
            len(job.held),
            tuple(job.problems),
            committed,
            job.encode_s,
            job.protected_s,
        )

    def _answer(self, job: Job, index: int, node: str, problem: str) -> None:
        job.waiting.discard(index)
        if problem:
            job.problems.append(f"fragment {index} at {node}: {problem}")
        else:
            job.held.add(index)
        self._shelf.changed.notify_all()

    def _move(self, job: Job, state: str) -> None:
        with self._shelf.changed:
            job.state = state
            self._shelf.changed.notify_all()

    def _run(self, message: wire.Protect, job: Job) -> None:
        try:
            with self._shelf.pinned(message.shard, HOME) as home:
                self._protect(home, message, job)
        except (EcckptError, OSError) as error:
            job.problems.append(str(error))
            self._move(job, "failed")
            _log.warning("protecting %s failed: %s", message.shard, error)
        except BaseException:
            job.problems.append("unexpected error in the agent, see its log")
            self._move(job, "failed")
            _log.exception("protecting %s failed", message.shard)

    def _protect(self, home: Entry, message: wire.Protect, job: Job) -> None:
        started_s = time.monotonic()
        with self._encoded(home, message) as table:
            job.encode_s = time.monotonic() - started_s
            with self._shelf.changed:
                job.waiting = {target.index for target in message.targets}
            self._move(job, "scattering")
            for target in message.targets:
                self._posts.submit(self._ask, home.header, target, pack_table(table), message, job)
            self._await(job, message, started_s)
        job.protected_s = time.monotonic() - started_s
        if len(job.held) < message.min_fragments:
            job.problems.append(
                f"{len(job.held)} fragments held, at least {message.min_fragments} needed"
            )
        self._move(job, "failed" if len(job.held) < message.min_fragments else "protected")

    @contextmanager
    def _encoded(self, home: Entry, message: wire.Protect) -> Iterator[np.ndarray]:
        """Parity and checksums of the home copy; parity is there to pull inside the block."""
        header = home.header
        if home.table is not None and all(target.index < header.k for target in message.targets):
            yield home.table
            return
        parity = self._parity_region(header, message)
        try:
            with self._encoding:
                table = encode_home(header, home.region, parity)
            if home.table is None:
                self._shelf.seal(home, table)
            elif not np.array_equal(home.table, table):
                raise CorruptFragment(
                    f"home copy of {header.shard} no longer matches its checksums"
                )
            home.parity = parity
            yield table
        finally:
            home.parity = None
            if parity is not None:
                self._shelf.tier.recycle(header.shard.run, parity)

    def _parity_region(self, header: Header, message: wire.Protect) -> Region | None:
        if not header.m:
            return None
        return self._shelf.allocate(
            header.shard.run,
            parity_region_bytes(header),
            budget_bytes=message.memory_bytes,
            what=f"the parity of {header.shard}",
        )

    def _ask(
        self, header: Header, target: wire.Target, table: bytes, message: wire.Protect, job: Job
    ) -> None:
        request = wire.Hold(
            header=header.at(target.index),
            writer=message.writer,
            table=table,
            source=self._address,
            memory_bytes=message.memory_bytes,
            timeout_s=message.timeout_s,
            discard=message.discard,
        )
        try:
            client = peer_client(target.address, self._token, timeout_s=_POST_TIMEOUT_S)
            client.hold(request)
        except (EcckptError, OSError) as error:
            with self._shelf.changed:
                self._answer(job, target.index, target.node, str(error))

    def _await(self, job: Job, message: wire.Protect, started_s: float) -> None:
        deadline_s = started_s + message.timeout_s
        with self._shelf.changed:
            while job.waiting:
                now_s = time.monotonic()
                if len(job.held) >= message.min_fragments > 0:
                    took_s = now_s - started_s
                    grace_s = max(_GRACE_LEAST_S, _GRACE_FACTOR * took_s)
                    deadline_s = min(deadline_s, now_s + grace_s)
                if now_s >= deadline_s:
                    break
                self._shelf.changed.wait(deadline_s - now_s)
            job.problems.extend(f"fragment {index}: no answer" for index in sorted(job.waiting))
            job.waiting.clear()


def data_views(header: Header, region: Region) -> list[memoryview]:
    """The k data fragments within a home copy, as views of its region."""
    return _pieces(region.view[SUPERBLOCK_BYTES:], header.fragment_bytes, header.k)


def parity_views(header: Header, region: Region | None) -> list[memoryview]:
    """The m parity fragments within a parity region, as views of it."""
    if region is None:
        return []
    return _pieces(region.view[SUPERBLOCK_BYTES:], header.fragment_bytes, header.m)


def parity_region_bytes(header: Header) -> int:
    """Size of a parity region: behind a void superblock, so that no parity is taken for one."""
    return SUPERBLOCK_BYTES + header.m * header.fragment_bytes


def encode_home(header: Header, home: Region, parity: Region | None) -> np.ndarray:
    """Fill ``parity`` from a home copy; returns the checksum table, uint32 (n, rows)."""
    return Codec(header.k, header.m).encode(
        data_views(header, home), parity_views(header, parity), header.block_bytes
    )


def _pieces(view: memoryview, piece_bytes: int, count: int) -> list[memoryview]:
    return [view[at * piece_bytes : (at + 1) * piece_bytes] for at in range(count)]
