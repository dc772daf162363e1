"""A simulated training program: it restores with the other ranks, then saves step after step.

The rules of saving and restoring are the client's own (client/rank_session.py), performed in
simulated time. This file has only what a user's program does with them.
"""

from __future__ import annotations

from ecckpt.client.handles import SaveHandle
from ecckpt.client.rank_session import RankSession
from ecckpt.errors import EcckptError, Fenced, NothingToRestore
from ecckpt.sim.hosts.host import SimulatedHost
from ecckpt.sim.performer import SimulatedPerformer
from ecckpt.sim.session import Session
from ecckpt.sim.world import Actor, Failure, Steps, sleep

_PATIENCE_S = 0.05  # a save that cannot begin by then is skipped


class Trainer(Actor):
    """One rank's process in one session, on its home host."""

    def __init__(self, session: Session, rank: int, host: SimulatedHost) -> None:
        super().__init__(session.world)
        self.session, self.rank, self.host = session, rank, host
        self._performer = SimulatedPerformer(self, session, rank, host)
        requests = session.requests(rank)
        self._client = RankSession(requests, disk_bytes=session.rules.disk_bytes, strict=False)
        # Of the last two saves: one may fail only after the next one was begun.
        self._latest: list[SaveHandle] = []

    def main(self, *, after_s: float = 0.0) -> Steps:
        """The program: restore, then step and save until the process fails or is killed.

        ``after_s``: how long it is stopped before it restores.
        """
        if after_s:
            yield sleep(after_s)
        step = yield from self._restore()
        save = self._save_by_ticket if self.session.rules.tickets else self._save
        while True:
            yield self.session.next_step()
            try:
                yield from save(step)
            except EcckptError as error:
                raise Failure(str(error)) from error
            step += 1
            if any(isinstance(handle.error, Fenced) for handle in self._latest):
                raise Failure("replaced by a restart, must end")

    def _restore(self) -> Steps:
        """Restore; return the step to go on with.

        Every second rank keeps its tensors in the slot (``assign``), so both ways are simulated.
        """
        session = self.session
        routine = self._client.restore(
            None, session.wanted, required=session.required, assign=self.rank % 2 == 1
        )
        try:
            restored = yield from self._performer.run(routine)
        except EcckptError as error:
            if isinstance(error, NothingToRestore):
                session.nothing_left = not session.wanted.named
            raise Failure(str(error)) from error
        return restored.step + 1 if restored else 0

    def _save(self, step: int) -> Steps:
        handle = yield from self._performer.run(self._client.save(step, step, _PATIENCE_S))
        self._latest = [*self._latest[-1:], handle]

    def _save_by_ticket(self, step: int) -> Steps:
        """Save as the DCP writer does.

        All ranks stage and protect, tell rank 0 whether they failed, and rank 0 commits if no rank
        did.
        """
        run, session = self._performer.run, self.session
        ticket = yield from run(self._client.ticket(step))
        problem = ""
        try:
            yield from run(ticket.stage(self._performer.plan(step)))
            yield from run(ticket.protect())
        except Fenced:
            raise
        except (EcckptError, OSError) as error:
            problem = f"rank {self.rank}: {error}"

        def commit_unless_failed(problems: list[str]) -> Steps:
            if any(problems):
                yield from run(ticket.revoke())
            else:
                yield from run(ticket.commit())
            return [b""] * len(problems)

        timeout_s = session.rules.save_timeout_s
        yield from session.exchange(
            self.host,
            self.rank,
            f"dcp/{ticket.shard.generation}",
            problem,
            commit_unless_failed,
            timeout_s=timeout_s,
        )
