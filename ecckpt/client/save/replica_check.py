"""Background check that tensors declared ``replicated`` are identical on all ranks.

The first rank whose shard is staged puts the digest of its claim into the ranks' store; every other
rank compares its own with it: one exchange each, whatever the number of ranks. A rank that differs
reads the first rank's checksums to name the tensors, puts its verdict into the store, and fails the
save.
"""

from __future__ import annotations

import logging
from typing import Literal

from ecckpt.client import deadlines
from ecckpt.client.effects import (
    Now,
    Report,
    Routine,
    StoreAgree,
    StoreDrop,
    StoreGet,
    StorePut,
    perform,
    sleep,
)
from ecckpt.client.events import Message
from ecckpt.client.state_effects import ReplicaClaim
from ecckpt.errors import EcckptError, SaveFailed
from ecckpt.format.ids import ShardId

_VERDICT_BYTES = 4000


class ReplicaCheck:
    """The claim of one rank in one save.

    ``left`` are the keys that this rank has in the store, of earlier saves too: shared by all
    checks of a rank, so that keys of a failed save go after the next commit.
    """

    def __init__(self, shard: ShardId, claim: ReplicaClaim, left: list[str]) -> None:
        self._shard, self._claim, self._left = shard, claim, left

    def compare(self) -> Routine[None]:
        """Raise ``SaveFailed``, with the paths and the ranks, if another rank's claim differs."""
        claim, rank = self._claim, self._shard.rank
        mine = f"{claim.digest.hex()} {rank}"
        first = yield from perform(StoreAgree(self._key("digest"), mine))
        if first == mine:
            self._left.append(self._key("digest"))
            yield from self._put("sums", claim.pack())
            return
        digest, other = first.split(" ")
        if digest == claim.digest.hex():
            return
        sums = yield from self._await_sums()
        where = claim.differences(sums) if sums else f"rank {other} did not tell what"
        text = (
            f"not the same on rank {rank} as on rank {other}, though replicated= says so: {where}"
        )
        yield from self._put("verdict", text.encode()[:_VERDICT_BYTES])
        raise SaveFailed(text)

    def explain(self, error: EcckptError | None) -> Routine[EcckptError | None]:
        """How the save ended: with another rank's verdict if a claim was the reason.

        After a commit no rank needs the keys of this rank any more, and they go.
        """
        try:
            if error is None:
                for key in self._left:
                    yield from perform(StoreDrop(key))
                self._left.clear()
            elif verdict := (yield from perform(StoreGet(self._key("verdict")))):
                return SaveFailed(f"{self._shard}: {verdict.decode(errors='replace')}")
        except EcckptError as lost:
            text = f"{self._shard}: the replica check: {lost}"
            yield from perform(Report(Message(logging.WARNING, text)))
        return error

    def _await_sums(self) -> Routine[bytes | None]:
        deadline_s = (yield from perform(Now())) + deadlines.CLAIM_S
        while (yield from perform(Now())) < deadline_s:
            if sums := (yield from perform(StoreGet(self._key("sums")))):
                return sums
            yield from sleep(deadlines.CLAIM_LOOK_S)
        return None

    def _put(self, what: Literal["sums", "verdict"], value: bytes) -> Routine[None]:
        self._left.append(self._key(what))
        yield from perform(StorePut(self._key(what), value))

    def _key(self, what: str) -> str:
        return f"claim/{self._shard.generation}/{what}"
