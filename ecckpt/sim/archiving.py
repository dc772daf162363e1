"""How rank 0 gets committed saves to the disks: the rule of ``archiving.py``, without a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecckpt.client.save.archive_protocol import Archivist, Ask, Disks, Pause, Say, Step, Tell
from ecckpt.errors import EcckptError
from ecckpt.format.ids import Generation
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import OnDisk
from ecckpt.sim.world import Steps, sleep

if TYPE_CHECKING:
    from ecckpt.sim.trainer import Rank

_ASK_TIMEOUT_S = 2.0


class Archiver:
    """The counterpart of ``storing.Storer``."""

    def __init__(self, rank: Rank) -> None:
        session = rank.session
        rules = session.rules
        disks = Disks(
            every=rules.disk_every,
            keep=rules.keep,
            budget_bytes=rules.disk_bytes,
            ranks=session.ranks,
            least=rules.least,
        )
        self._rank, self._wanted = rank, bool(rules.disk_every) and rank.rank == 0
        world = rank.world
        self._archivist = Archivist(
            session.run, list(session.hosts), disks, clock=lambda: world.now_s
        )
        self._working = False

    def begin(self, timeline: int, there: OnDisk, roll_backs: tuple[RollBack, ...]) -> None:
        """A timeline begins."""
        self._archivist.begin(timeline, there, roll_backs)

    def committed(self, generation: Generation) -> None:
        """A save is committed."""
        if not self._wanted:
            return
        self._archivist.committed(generation)
        if not self._working:
            self._rank.spawn(self._work())

    def _work(self) -> Steps:
        self._working = True
        while self._archivist.due is not None:
            yield from self._archive()
        self._working = False

    def _archive(self) -> Steps:
        steps = self._archivist.archive()
        try:
            step = next(steps)
            while True:
                try:
                    result = yield from self._do(step)
                except EcckptError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration:
            return

    def _do(self, step: Step) -> Steps:
        hosts, node = self._rank.session.hosts, self._rank.host.node
        match step:
            case Ask(target, message):
                return (yield hosts[target].ask(node, message, _ASK_TIMEOUT_S))
            case Tell(target, told):
                return (yield hosts[target].ask(node, told, _ASK_TIMEOUT_S))
            case Pause(wait_s):
                yield sleep(wait_s)
            case Say():
                pass
        return None
