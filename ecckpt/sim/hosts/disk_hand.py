"""An agent's hand on its disk: the real ``agent/disk.py``, one thing after another, over a platter.

The counterpart of the one thread that ``agent/driver.py`` has for it.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from ecckpt.agent.core.actions import Behind, Failed, Finished, Record, Remove, Write
from ecckpt.agent.runtime.disk_store import Disk
from ecckpt.errors import EcckptError
from ecckpt.sim.hosts.platter import Killed, Platter

if TYPE_CHECKING:
    from ecckpt.agent.storage.disk import DiskFile
    from ecckpt.sim.hosts.agent import SimulatedAgent

_ACTION_S = 0.01
_PATIENCE_S = 5.0  # for reading what is on disk, at a start
_STEPS = 12  # more than any action has


class Hand:
    """Does what the core wants of the disk."""

    def __init__(self, agent: SimulatedAgent, platter: Platter) -> None:
        self._agent, self._platter = agent, platter
        self._disk = Disk(Path(agent.node), node=agent.node, volume=platter)
        self._queue: deque[Behind] = deque()
        self._current: Behind | None = None
        self._reading = False

    def adopt(self) -> None:
        """Enter what is there, now or, if that takes long, when it is read."""
        delay_s = self._delay_s()
        if delay_s < _PATIENCE_S:
            self._adopt()
            return
        self._reading = True
        self._agent.host.cluster.witness.blinded(self._agent.host)
        self._agent.core.ledgers.await_disk()
        self._agent.world.after(delay_s, self._agent.reach, self._adopt_late)

    def take(self, action: Behind) -> None:
        """Do it when what came before is done."""
        self._queue.append(action)
        self._next()

    def read(self, file: DiskFile, offset: int, size_bytes: int) -> bytearray:
        """Some bytes of a file, for whoever asks."""
        return bytearray(self._platter.view(file.path)[offset : offset + size_bytes])

    def cut(self) -> None:
        """The agent is killed: what it was doing stops at any step."""
        if self._current is not None:
            self._platter.steps_left = self._platter.rng.randrange(_STEPS)
            try:
                self._result(self._current)
            except (Killed, EcckptError, OSError):
                pass
            finally:
                self._platter.steps_left = None

    def _adopt(self) -> None:
        ledgers, host = self._agent.core.ledgers, self._agent.host
        try:
            ledgers.adopt_disk(self._disk.adopt())
        except OSError as error:
            ledgers.lose_disk(str(error))
            host.cluster.witness.blinded(host)
        else:
            host.cluster.witness.looked(host, ledgers)

    def _adopt_late(self) -> None:
        self._reading = False
        self._adopt()
        self._next()

    def _delay_s(self) -> float:
        rng = self._platter.rng
        return rng.expovariate(1 / _ACTION_S) + rng.random() * self._platter.slow_s

    def _next(self) -> None:
        if self._queue and self._current is None and not self._reading:
            self._current = self._queue.popleft()
            self._agent.world.after(self._delay_s(), self._agent.reach, self._do)

    def _do(self) -> None:
        action, agent = self._current, self._agent
        assert action is not None
        event: Finished | Failed
        try:
            event = Finished(action, self._result(action))
        except (EcckptError, OSError) as error:
            event = Failed(action, error)
        self._current = None
        witness, host = agent.host.cluster.witness, agent.host
        match event:
            case Finished(Write(storing), file):
                witness.written(host, file, storing.message)  # type: ignore[arg-type]
            case Finished(Record(run), notes):
                witness.recorded(host, run, notes)  # type: ignore[arg-type]
            case Finished(Remove(files)):
                witness.removed(host, files)
        agent.tell(event)
        self._next()

    def _result(self, action: Behind) -> object:
        match action:
            case Write():
                return self._disk.write(action)
            case Remove():
                self._disk.remove(action)
            case Record(run):
                return self._disk.record(run, self._agent.core.ledgers.of(run).noted.lasting)
        return None
