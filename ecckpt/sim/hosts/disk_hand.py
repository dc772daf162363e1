"""A simulated agent's disk thread: the real ``Disk`` (agent/runtime/disk_store.py) on a platter.

agent/runtime/driver.py has one thread for the disk, which performs one action after another.
``SimulatedAgent`` queues the disk actions of its core here instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ecckpt.agent import deadlines
from ecckpt.agent.core.actions import Behind, Event, Failed, Finished, Record, Remove, Write
from ecckpt.agent.runtime.disk_store import Disk
from ecckpt.errors import EcckptError
from ecckpt.sim.hosts.interfaces import AgentHost
from ecckpt.sim.hosts.platter import Killed, Platter
from ecckpt.sim.world import Actor

if TYPE_CHECKING:
    from ecckpt.agent.core.run_records import RunRecords
    from ecckpt.agent.storage.disk import DiskFile

_ACTION_S = 0.01
_MOST_STEPS = 12  # more than any action has, so that a kill can also come after the last step


class DiskHand:
    """Performs the disk actions of one agent's core, in order, and reports each to the core.

    ``tell`` hands an event to the core. Everything runs within ``actor``, the agent, so nothing
    happens here while the agent is stalled.
    """

    def __init__(
        self,
        actor: Actor,
        host: AgentHost,
        platter: Platter,
        *,
        records: RunRecords,
        tell: Callable[[Event], None],
    ) -> None:
        self._actor, self._host, self._platter = actor, host, platter
        self._records, self._tell = records, tell
        self._disk = Disk(Path(host.node), node=host.node, volume=platter)
        self._queue: deque[Behind] = deque()
        self._current: Behind | None = None
        self._adopting_late = False  # actions wait until the disk has been read

    def adopt(self) -> None:
        """Take over the files on disk, at once if the disk answers fast enough.

        Otherwise the agent starts without them and takes them over when they are read.
        """
        delay_s = self._delay_s()
        if delay_s < deadlines.DISK_SCAN_PATIENCE_S:
            self._adopt()
            return
        self._adopting_late = True
        self._records.await_disk()
        self._actor.world.after(delay_s, self._actor.reach, self._adopt_late)

    def enqueue(self, action: Behind) -> None:
        """Perform an action after those that were queued before it."""
        self._queue.append(action)
        self._begin_next()

    def read(self, file: DiskFile, offset: int, size_bytes: int) -> bytearray:
        """Some bytes of a file, for a peer's pull."""
        return bytearray(self._platter.view(file.path)[offset : offset + size_bytes])

    def cut_off(self) -> None:
        """Stop the current action at some step, because the agent is killed.

        The steps before that one have taken effect on the platter.
        """
        if self._current is not None:
            self._platter.steps_left = self._platter.rng.randrange(_MOST_STEPS)
            try:
                self._perform(self._current)
            except (Killed, EcckptError, OSError):
                pass
            finally:
                self._platter.steps_left = None

    def _adopt(self) -> None:
        try:
            self._records.adopt_disk(self._disk.adopt())
        except OSError as error:
            self._records.lose_disk(str(error))
            self._host.witness.disk_unreadable(self._host)
        else:
            self._host.witness.disk_adopted(self._host, self._records)

    def _adopt_late(self) -> None:
        self._adopting_late = False
        self._adopt()
        self._begin_next()

    def _delay_s(self) -> float:
        rng = self._platter.rng
        return rng.expovariate(1 / _ACTION_S) + rng.random() * self._platter.slow_s

    def _begin_next(self) -> None:
        if self._queue and self._current is None and not self._adopting_late:
            self._current = self._queue.popleft()
            self._actor.world.after(self._delay_s(), self._actor.reach, self._finish_current)

    def _finish_current(self) -> None:
        action = self._current
        assert action is not None
        event: Finished | Failed
        try:
            event = Finished(action, self._perform(action))
        except (EcckptError, OSError) as error:
            event = Failed(action, error)
        self._current = None
        witness, host = self._host.witness, self._host
        match event:
            case Finished(Write(storing), file):
                witness.disk_written(host, file, storing.message)  # type: ignore[arg-type]
            case Finished(Record(run), notes):
                witness.disk_notes_written(host, run, notes)  # type: ignore[arg-type]
            case Finished(Remove(files)):
                witness.disk_removed(host, files)
        self._tell(event)
        self._begin_next()

    def _perform(self, action: Behind) -> object:
        match action:
            case Write():
                return self._disk.write(action)
            case Remove():
                self._disk.remove(action)
            case Record(run):
                return self._disk.record(run, self._records.get_or_create(run).noted.lasting)
        return None
